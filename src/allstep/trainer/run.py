"""Everything that one call of `Trainer.train` works with, put together once and handed to the loop."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.comm.communicator import Communicator
from allstep.data.dataloaders import Source
from allstep.data.feeds import TrainingFeeds
from allstep.data.grid import Grid
from allstep.data.loader import MicroBatchLoader
from allstep.data.position import DataPosition
from allstep.data.stream_loader import StreamLoader
from allstep.data.streams import StreamGrid
from allstep.ddp.module import DistributedDataParallel
from allstep.errors import ArgumentsError
from allstep.report.ledger import Ledger
from allstep.trainer.callbacks.handler import CallbackHandler
from allstep.trainer.meter import Meter
from allstep.trainer.optimization.scaling import AgreedGradScaler

__all__ = ["Plan", "Run"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run is."""

    max_steps: int
    """Optimizer steps in all."""
    epochs: int
    """Passes over the data that are begun; for a stream of unknown length `sys.maxsize`, as in Hugging Face's Trainer."""

    @classmethod
    def of(cls, args: TrainingArguments, steps_per_epoch: int | None) -> "Plan":
        """`max_steps` where it is given, else `num_train_epochs` passes; a part of a pass is rounded up to whole steps.

        Raises:
            ArgumentsError: neither `max_steps` nor the steps of an epoch are known, as with a stream of unknown length.
        """
        if steps_per_epoch is None:
            if args.max_steps <= 0:
                raise ArgumentsError(
                    f"The training stream has no length, so num_train_epochs={args.num_train_epochs:g} says nothing of how "
                    f"many steps the learning rate is to be planned for. Give max_steps, or give the stream a __len__ (the "
                    f"number of its samples)."
                )
            return cls(max_steps=args.max_steps, epochs=sys.maxsize)
        if args.max_steps > 0:
            return cls(max_steps=args.max_steps, epochs=math.ceil(args.max_steps / steps_per_epoch))
        steps = max(1, math.ceil(args.num_train_epochs * steps_per_epoch))
        return cls(max_steps=steps, epochs=math.ceil(args.num_train_epochs))


@dataclass(kw_only=True)
class Run:
    """The parts of a run; what changes while it runs is `position`, and the state and control of `callbacks`."""

    args: TrainingArguments
    plan: Plan
    communicator: Communicator
    device: torch.device
    model: DistributedDataParallel
    bare_model: nn.Module
    """The model inside the wrapper."""
    optimizer: torch.optim.Optimizer
    scheduler: Any
    """A schedule with `step`, `state_dict` and `load_state_dict`."""
    grid: Grid | StreamGrid
    source: Source
    """The training data and its order."""
    loader: MicroBatchLoader | StreamLoader
    feeds: TrainingFeeds
    """This rank's micro-batches, from `loader`."""
    position: DataPosition
    callbacks: CallbackHandler
    sums_in_order: bool
    """Whether gradients are summed in an order that does not depend on the number of ranks."""
    scaler: AgreedGradScaler | None = None
    """What scales the losses of a float16 run; None in others."""
    ledger: Ledger | None = None
    """What writes down every step; None for nobody."""
    weigh: Callable[[Any], float]
    """What the mean loss of inputs is taken over: their weight."""
    compute_loss: Callable[[nn.Module, Any, float], torch.Tensor]
    """The mean loss of a micro-batch, given the wrapped model, inputs on the device, and their weight."""
    training_step: Callable[[nn.Module, Any, float, Callable[[torch.Tensor], None]], Any]
    """Forward and backward of a micro-batch, given the wrapped model, inputs, their weight, and what goes backward."""
    has_own_step: bool = False
    """Whether the training step is the user's, which may go backward as often as it likes."""
    has_own_parts: bool = False
    """Whether any part of it is the user's, which may talk to the other ranks."""
    meter: Meter
    deciding_events: frozenset[str] = frozenset()
    """Events behind which the ranks have to agree on what callbacks wish; see `trainer/decisions.py`."""
    is_stopping: bool = False
    """Whether the ranks have agreed to stop because somebody asked one of them to."""
    skipped_in_a_row: int = 0
    """Steps left out since the last one that was taken, because gradients were not finite."""
    batches_saved: int = 0
    """Micro-batches whose gradients were not finite that this rank has written down."""
    say: Callable[[str], None]
    """Shows a person a line, on rank 0."""
    log: Callable[[dict[str, float]], None]
    save: Callable[[], None]
    """Collective. Writes a checkpoint, by the user's method if there is one."""
    evaluate: Callable[[], dict[str, float]]

    def settle(self) -> None:
        """Bring state and ledger up to date with the last step; waits for the device."""
        self.meter.settle(self.callbacks.state)
        if self.ledger is not None:
            self.ledger.settle()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that the optimizer moves."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
