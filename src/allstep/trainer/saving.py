"""What a checkpoint of a run holds, which one is the best, and how a run goes on from one."""

import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.saves import Save
from allstep.checkpoint.state import TrainState
from allstep.checkpoint.store import checkpoint_name
from allstep.data.position import DataPosition
from allstep.data.stream_feeds import StreamFeeds
from allstep.ddp.sync import send_buffers
from allstep.errors import CheckpointError
from allstep.trainer.run import Run
from allstep.trainer.save_record import SaveRecord
from allstep.trainer.state import TrainerState

__all__ = ["Saver"]


class _Best(NamedTuple):
    """The best evaluation whose checkpoint is on disk, as `TrainerState` has it."""

    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None


class Saver:
    """Saves and resumes one run. All ranks make the same calls, and no call talks to them from another thread.

    With `save_in_background` a checkpoint that was begun is brought in by a later call: `poll` once all ranks have written it,
    or `save` and `finish`, which wait for it.

    Args:
        run: the run.
        checkpoints: where they lie.
        processing_class: a tokenizer or the like, saved beside the model.
        write_model: the user's way to write the model into a folder, on rank 0.
        writes_together: it is called on all ranks.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: CheckpointManager,
        processing_class: Any,
        write_model: Callable[[Path], object] | None = None,
        *,
        writes_together: bool = False,
    ) -> None:
        self._run, self._checkpoints, self._processing_class = run, checkpoints, processing_class
        self._write_model, self._writes_together = write_model, writes_together
        self.calls = 0
        """How often `save` was called."""
        self._best_is_now = False  # the last evaluation was the best, and no checkpoint holds it yet
        self._best_on_disk = _Best()
        self._best_to_be: _Best | None = None  # once the checkpoint that is being written has come in
        self._pending: Save | None = None
        self._record = SaveRecord()

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
        """Collective. Save `checkpoint-{global_step}`; all ranks go on with the buffers that are in it, rank 0's.

        `on_save` is called once it is on disk. What happens where the file system refuses, `save_failure` says.

        Raises:
            CheckpointError: on every rank. Older checkpoints are untouched.
        """
        self.finish()
        self.calls += 1
        send_buffers(self._run.communicator, self._run.bare_model)
        args, state = self._run.args, self._run.callbacks.state
        if self._best_is_now and state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self._checkpoints.output_dir / checkpoint_name(state.global_step))
            self._best_to_be = _Best(state.best_metric, state.best_global_step, state.best_model_checkpoint)
        try:
            self._pending = self._checkpoints.begin(
                self._train_state(whole=self._run.is_stopping or not args.save_only_model),
                global_step=state.global_step,
                epoch=state.epoch,
                global_batch_size=self._run.grid.global_batch_size,
                in_background=args.save_in_background,
            )
        except CheckpointError as error:
            self._refused(state.global_step, error)
        if not args.save_in_background:
            self.finish()

    def poll(self) -> bool:
        """Collective. Bring in the checkpoint that is being written beside training, if all ranks have written their files.

        Ranks talk only where there is one, which all of them know. Whether there was one to bring in.
        """
        if self._pending is None or not all(self._run.communicator.all_gather_object(self._pending.is_written)):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Collective. Wait for the checkpoint that is being written, if there is one, and bring it in.

        Raises:
            CheckpointError: as `save` does.
        """
        save, self._pending = self._pending, None
        if save is None:
            return
        best = self._best_on_disk if self._best_to_be is None else self._best_to_be
        self._checkpoints.best = None if best.best_model_checkpoint is None else Path(best.best_model_checkpoint)
        try:
            path = self._checkpoints.finish(save)
        except CheckpointError as error:
            self._refused(save.step, error)
            return
        self._best_on_disk, self._best_to_be = best, None
        self._record.came_in(path)
        self._run.callbacks.call("on_save", checkpoint=path)

    def abandon(self) -> None:
        """Not collective. Let go of the checkpoint that is being written, where the run ends by an error."""
        save, self._pending = self._pending, None
        if save is not None:
            save.abandon()

    @property
    def newest(self) -> Path | None:
        """The checkpoint that came in last, or that the run has gone on from."""
        return self._record.newest

    def last_words(self) -> str | None:
        """What the end of the run has to say of checkpoints that could not be written; None where all came in."""
        return self._record.last_words()

    def _refused(self, step: int, error: CheckpointError) -> None:
        """Go on without the checkpoint of `step`, where the file system refused it and the arguments say so."""
        if not error.by_file_system or self._run.args.save_failure == "stop":
            raise error
        state, on_disk = self._run.callbacks.state, self._best_on_disk
        if state.best_global_step == step:  # or no later evaluation would be the best, and none of them were kept
            for name, value in on_disk._asdict().items():
                setattr(state, name, value)
        elif self._best_to_be is not None:
            state.best_model_checkpoint = on_disk.best_model_checkpoint
        self._best_to_be = None
        self._record.refused(checkpoint_name(step), error)
        if self._run.communicator.rank == 0:
            warnings.warn(f'{error} Training goes on; save_failure="stop" would end it here.', stacklevel=2)

    def resume(self, folder: Path) -> str:
        """Collective. Fill model, optimizer, schedule and state from `folder`, and stand where it stood in the data.

        Returns a line that says where that is, and how the global batch is made up now.

        Raises:
            CheckpointError: no step of this run begins where that run stood.
            ReplicaError: the ranks do not hold the same afterwards.
        """
        run, state = self._run, self._run.callbacks.state
        # Generators are seeded for each micro-batch, so nothing depends on where they stood (test_resume_elsewhere.py).
        wanted = dataclasses.replace(self._train_state(not self._run.args.save_only_model), with_generators=False)
        saved = TrainerState.from_dict(self._checkpoints.load(folder, wanted).trainer_state)
        for name in (
            "epoch",
            "global_step",
            "log_history",
            "interval",
            "run",
            "skipped_steps",
            "num_input_tokens_seen",
            "total_flos",
        ):
            setattr(state, name, getattr(saved, name))
        for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(state, name, getattr(saved, name))
        if saved.best_model_checkpoint is not None:
            self._best_on_disk = _Best(saved.best_metric, saved.best_global_step, saved.best_model_checkpoint)
        if run.args.restore_callback_states_from_checkpoint:
            run.callbacks.restore(saved.stateful_callbacks)
        self._record.resumed_from(folder)
        steps = run.grid.steps_per_epoch or sys.maxsize  # without a length: still in the first pass
        position = saved.position or DataPosition.after(state.global_step, steps)
        position = self._placed(position, saved.global_batch_size, folder)
        if run.args.ignore_data_skip:
            position = DataPosition(epoch=position.epoch)
        run.position = state.position = position
        run.model.check_consistency(run.optimizer)
        return _went_on(folder, saved, run)

    def _placed(self, position: DataPosition, batch: int, folder: Path) -> DataPosition:
        """Where a run with a global batch of `batch` samples stood, in steps of this run: no sample twice, none left out."""
        grid = self._run.grid
        if batch in (0, grid.global_batch_size):
            return position
        step, rest = divmod(position.step * batch, grid.global_batch_size)
        if rest:
            raise CheckpointError(
                f"{folder} stands at sample {position.step * batch} of an epoch, after {position.step} steps of {batch} "
                f"samples; no step of {grid.global_batch_size} samples begins there. Leave global_batch_size out, which keeps "
                f"{batch}, or give a number that divides {position.step * batch}."
            )
        warnings.warn(
            f"{folder} was trained with a global batch of {batch} samples; this run goes on with {grid.global_batch_size}, as "
            f"global_batch_size says. No sample is lost, but an epoch has other steps than the schedule was made for.",
            stacklevel=5,
        )
        return DataPosition(epoch=position.epoch, step=step)

    def load_best(self) -> None:
        """Collective. Put the weights of the best checkpoint into the model, if there is one."""
        best = self._run.callbacks.state.best_model_checkpoint
        if best is None:
            self._run.say("load_best_model_at_end: no checkpoint of the best step is on disk; the model keeps its last weights")
        else:
            self._checkpoints.load(best, TrainState(model=self._run.bare_model, with_generators=False))

    def _train_state(self, whole: bool) -> TrainState:
        run = self._run
        run.callbacks.state.stateful_callbacks = run.callbacks.export()
        return TrainState(
            model=run.bare_model,
            optimizer=run.optimizer if whole else None,
            scheduler=run.scheduler if whole else None,
            scaler=run.scaler if whole else None,
            data=run.feeds if whole and isinstance(run.feeds, StreamFeeds) else None,
            processing_class=self._processing_class,
            write_model=self._write_model,
            writes_together=self._writes_together,
            trainer_state=run.callbacks.state.to_dict(),
            training_args=run.args.to_dict(),
            with_generators=whole,
        )


def _went_on(folder: Path, saved: TrainerState, run: Run) -> str:
    """One line for a person: where a run goes on, and how its global batch is made up."""
    grid, ranks = run.grid, run.communicator.size
    made_up = f"{ranks} rank(s) x {grid.micro_batches_per_step // ranks} micro-batch(es) x {grid.micro_batch_size} samples"
    before = f"; {saved.world_size} rank(s) before" if saved.world_size != ranks else ""
    asked = ranks * run.args.gradient_accumulation_steps * grid.micro_batch_size
    if run.args.global_batch_size is None and asked != grid.global_batch_size:
        before += f" (gradient_accumulation_steps={run.args.gradient_accumulation_steps} would make {asked}: for that, write "
        before += f"global_batch_size={asked})"
    return (
        f"resumed from {folder} at step {saved.global_step}, epoch {saved.epoch:.2f}: "
        f"global batch of {grid.global_batch_size} = {made_up}{before}"
    )
