"""What a checkpoint of a run holds, which one is the best, and how a run goes on from one."""

import warnings
from pathlib import Path
from typing import Any

from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.data.position import DataPosition
from allstep.ddp.sync import send_buffers
from allstep.trainer.run import Run
from allstep.trainer.state import TrainerState

__all__ = ["Saver"]


class Saver:
    """Saves and resumes one run.

    Args:
        run: the run.
        checkpoints: where they lie.
        processing_class: a tokenizer or the like, saved beside the model.
    """

    def __init__(self, run: Run, checkpoints: CheckpointManager, processing_class: Any) -> None:
        self._run, self._checkpoints, self._processing_class = run, checkpoints, processing_class
        self._best_is_now = False  # the last evaluation was the best, and no checkpoint holds it yet

    def note(self, metrics: dict[str, float]) -> bool:
        """Take in the metrics of an evaluation; whether they are the best so far.

        Raises:
            KeyError: `metric_for_best_model` is not among them.
        """
        args, state = self._run.args, self._run.callbacks.state
        name = args.metric_for_best_model
        if name is None:
            return False
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise KeyError(f"metric_for_best_model={name!r}, but the evaluation gave {', '.join(sorted(metrics))}.")
        value, best = metrics[key], state.best_metric
        if best is not None and not (value > best if args.greater_is_better else value < best):
            self._best_is_now = False
            return False
        state.best_metric, state.best_global_step = value, state.global_step
        self._best_is_now = True
        return True

    def save(self) -> None:
        """Collective. Commit `checkpoint-{global_step}`; all ranks go on with the buffers that are in it, rank 0's."""
        send_buffers(self._run.communicator, self._run.bare_model)
        state = self._run.callbacks.state
        if self._best_is_now and state.best_global_step == state.global_step:
            self._checkpoints.best = self._checkpoints.output_dir / f"checkpoint-{state.global_step}"
            state.best_model_checkpoint = str(self._checkpoints.best)
        self._checkpoints.save(
            self._train_state(),
            global_step=state.global_step,
            epoch=state.epoch,
            global_batch_size=self._run.grid.global_batch_size,
        )

    def resume(self, folder: Path) -> None:
        """Collective. Fill model, optimizer, schedule and state from `folder`, and stand where it stood in the data.

        Raises:
            ReplicaError: the ranks do not hold the same afterwards.
        """
        run, state = self._run, self._run.callbacks.state
        saved = TrainerState.from_dict(self._checkpoints.load(folder, self._train_state()).trainer_state)
        for name in ("epoch", "global_step", "log_history", "interval", "run"):
            setattr(state, name, getattr(saved, name))
        for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(state, name, getattr(saved, name))
        if saved.best_model_checkpoint is not None:
            self._checkpoints.best = Path(saved.best_model_checkpoint)
        run.position = saved.position or DataPosition.after(state.global_step, run.grid.steps_per_epoch)
        state.position = run.position
        if saved.global_batch_size not in (0, run.grid.global_batch_size):
            warnings.warn(
                f"{folder} was trained with a global batch of {saved.global_batch_size} samples on {saved.world_size} ranks; "
                f"this run has {run.grid.global_batch_size} on {run.communicator.size}. Steps and samples no longer match: set "
                f"per_device_train_batch_size x gradient_accumulation_steps x ranks to {saved.global_batch_size}.",
                stacklevel=4,
            )
        run.model.check_consistency(run.optimizer)

    def load_best(self) -> None:
        """Collective. Put the weights of the best checkpoint into the model, if there is one."""
        best = self._run.callbacks.state.best_model_checkpoint
        if best is not None:
            self._checkpoints.load(best, TrainState(model=self._run.bare_model, with_generators=False))

    def _train_state(self) -> TrainState:
        run = self._run
        whole = not run.args.save_only_model
        return TrainState(
            model=run.bare_model,
            optimizer=run.optimizer if whole else None,
            scheduler=run.scheduler if whole else None,
            processing_class=self._processing_class,
            trainer_state=run.callbacks.state.to_dict(),
            training_args=run.args.to_dict(),
            with_generators=whole,
        )
