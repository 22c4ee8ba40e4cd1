"""Where in the data a run is: the one thing that resuming needs to know."""

from dataclasses import dataclass

__all__ = ["DataPosition"]


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """The next step to be taken."""

    epoch: int = 0
    """Epochs that are complete."""
    step: int = 0
    """Optimizer steps that are done in the epoch that is not."""

    def advanced(self, steps_per_epoch: int) -> "DataPosition":
        """The position one step on."""
        if self.step + 1 < steps_per_epoch:
            return DataPosition(epoch=self.epoch, step=self.step + 1)
        return DataPosition(epoch=self.epoch + 1)

    @classmethod
    def after(cls, global_step: int, steps_per_epoch: int) -> "DataPosition":
        """The position after `global_step` optimizer steps from the start of a run."""
        epoch, step = divmod(global_step, steps_per_epoch)
        return cls(epoch=epoch, step=step)
