"""Checkpoints of a run on all its ranks: saved by agreement, found, read, and thinned out.

Every method says whether it is collective: all ranks call it, at the same point, with the same arguments. An error on any
rank is raised on every rank, so that none waits for one that has left.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.checkpoint import folder as output_folder
from allstep.checkpoint.folder_lock import FolderLock
from allstep.checkpoint.generators import GeneratorStates
from allstep.checkpoint.holds import Hold
from allstep.checkpoint.job import is_of_this_job, job_name, launched_at
from allstep.checkpoint.manifest import Manifest
from allstep.checkpoint.reasons import reason
from allstep.checkpoint.retention import thin_out
from allstep.checkpoint.saves import Save
from allstep.checkpoint.state import ReadState, TrainState, model_files, read_state, restore_state, rng_file
from allstep.checkpoint.store import CheckpointStore, Hook
from allstep.checkpoint.votes import Communicator, Votes
from allstep.errors import CheckpointError

__all__ = ["CheckpointManager", "Restored"]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a load hands back; model, optimizer and schedule are filled by then."""

    path: Path
    """The folder that was read."""
    trainer_state: dict[str, Any]
    """What the saving run put into trainer_state.json."""
    training_args: dict[str, Any]
    """The arguments of the saving run; empty for a folder of Hugging Face's."""
    manifest: Manifest | None
    """Step, epoch, world size and global batch of the saving run; None for a folder of Hugging Face's."""
    generators: GeneratorStates | None
    """Call `generators.restore()` as the last thing before training goes on. None: this rank starts from its seed."""


class CheckpointManager:
    """The checkpoints of one run, below one output folder that all ranks share."""

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        communicator: Communicator,
        save_total_limit: int | None = None,
        *,
        say: Callable[[str], None] = lambda line: warnings.warn(line, UserWarning, stacklevel=2),
        hook: Hook = lambda action, path: None,
    ) -> None:
        self.output_dir = Path(output_dir)
        """Where the checkpoints lie."""
        self.save_total_limit = save_total_limit
        """Checkpoints to keep, the best one included. None, 0 or less: all."""
        self.best: Path | None = None
        """The checkpoint never to delete, whatever its age. Set it on every rank; only rank 0 acts on it."""
        self._ranks = communicator
        self._votes = Votes(communicator)
        self._lock: FolderLock | None = None  # on rank 0, from `prepare` on
        self._store = CheckpointStore(self.output_dir, hook)
        self._say = say if communicator.rank == 0 else lambda line: None
        self._proven: Hold | None = None
        """The checkpoint that was just read from end to end, so that a load right after it need not do it again; rank 0's."""

    def prepare(self) -> None:
        """Collective. Make the output folder, keep other runs out, prove on every rank that it can be written, and clear a
        killed run's debris.

        To be called before training, so that a run does not find out at its first checkpoint; `close` when it is over.

        Raises:
            CheckpointError: on every rank; names the rank, the folder and the reason. A folder made here is gone again.
        """
        made: list[Path] = []
        self._votes.on_first(lambda: output_folder.make(self.output_dir, made), "make the output folder")

        def undo() -> None:
            for folder in reversed(made):
                folder.rmdir()

        self._votes.on_first(self._take_folder, "take the output folder for itself")
        self._votes.on_all(
            lambda: output_folder.probe(self.output_dir, self._ranks.rank), "write to the output folder", undo=undo
        )
        self._votes.on_first(lambda: output_folder.sync(made), "make the output folder")
        self._votes.on_first(self._store.clean, "delete what a killed run left in the output folder")

    def _take_folder(self) -> None:
        self._lock = FolderLock(self.output_dir)

    def close(self) -> None:
        """Not collective. Let other runs into the output folder."""
        if self._lock is not None:
            self._lock.release()

    def save(self, state: TrainState, *, global_step: int, epoch: float, global_batch_size: int) -> Path:
        """Collective. Write `checkpoint-{global_step}`, or nothing at all; its folder.

        Rank 0 writes the shared files, every rank its generators. When all have written all, rank 0 brings the folder in
        and thins out older ones. A checkpoint of the same step is replaced, without a moment in which there is none.

        Raises:
            CheckpointError: on every rank; names the rank, the file and the reason. Older checkpoints are untouched.
        """
        return self.finish(self.begin(state, global_step=global_step, epoch=epoch, global_batch_size=global_batch_size))

    def begin(
        self, state: TrainState, *, global_step: int, epoch: float, global_batch_size: int, in_background: bool = False
    ) -> Save:
        """Collective. Begin what `finish` ends; in the background, the objects of `state` may change from here on.

        Raises:
            CheckpointError: on every rank, as `save` does.
        """
        facts = {"global_step": global_step, "epoch": epoch, "global_batch_size": global_batch_size}
        return Save(self._store, self._ranks, state, facts, in_background=in_background)

    def finish(self, save: Save) -> Path:
        """Collective. Wait for what was begun, bring it in, and thin out older checkpoints; its folder.

        Raises:
            CheckpointError: on every rank, as `save` does. Nothing was deleted.
        """
        path = save.finish()
        if self._ranks.rank == 0:  # all ranks have met in the commit, and none is reading: see `load`
            thin_out(self._store, save.step, self.save_total_limit, self.best, self._say)
        return path

    def save_model(self, state: TrainState, folder: str | os.PathLike[str] | None = None) -> Path:
        """Collective. Write model and tokenizer alone, straight into `folder`, by default the output folder; that folder.

        Raises:
            CheckpointError: on every rank; names the file and the reason. Files that were there before are there still.
        """
        target = self.output_dir if folder is None else Path(folder)
        self._votes.on_first(lambda: self._store.export(target, model_files(state)), f"write the model to {target}")
        return target

    def newest(self, *, of_this_job: bool = False) -> Path | None:
        """Collective. The newest checkpoint that is whole; None if there is none. Warns of each newer one it passed over.

        Args:
            of_this_job: leave out those that this job has not written; see `checkpoint/job.py`.
        """
        path: Path | None = self._votes.on_first(lambda: self._newest(of_this_job), "look for a checkpoint")
        return path

    def resolve(
        self, resume_from_checkpoint: bool | str | os.PathLike[str] | None, *, of_this_job: bool = False
    ) -> Path | None:
        """Collective. The folder that `train(resume_from_checkpoint=...)` means; None for the beginning.

        True is the newest whole checkpoint of the output folder, "auto" the same or, with a line that says so, the beginning.
        False and None are the beginning. "true" and "false", as a command line has them, are True and False. Another text is
        the path of a folder; one of Hugging Face's, which has no manifest and so cannot be proven whole, is taken with a
        warning. Until it is loaded, no other process deletes the checkpoint that was found. `of_this_job` leaves out what
        another job wrote, unless it is given by its path.

        Raises:
            CheckpointError: on every rank. There is no whole checkpoint, or the path is none; the message names the file.
        """
        wanted = _wanted(resume_from_checkpoint)
        if wanted is False:
            return None
        if isinstance(wanted, Path):
            self._votes.on_first(lambda: self._check(wanted), f"resume from {wanted}")
            return wanted
        newest = self.newest(of_this_job=of_this_job)
        if newest is None and wanted == "auto":
            self._say(
                f'resume_from_checkpoint="auto" found no whole checkpoint in {self.output_dir}: starting at the beginning'
            )
        elif newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True found no whole checkpoint in {self.output_dir}. Pass "
                f'resume_from_checkpoint=False to start from the beginning, "auto" for whichever is there, or the path of a '
                f"checkpoint."
            )
        return newest

    def global_batch_size(self, path: Path) -> int | None:
        """Collective. Samples of one optimizer step of the run that wrote a checkpoint; None for a folder of Hugging Face's."""

        def read() -> int | None:
            manifest = self._store.manifest(path)
            return None if manifest is None else manifest.global_batch_size

        size: int | None = self._votes.on_first(read, f"resume from {path}")
        return size or None

    def load(self, path: str | os.PathLike[str], state: TrainState) -> Restored:
        """Collective. Fill the live objects of `state` from a checkpoint. No rank goes on before all have read theirs, so
        nothing is deleted under a rank that reads.

        Raises:
            CheckpointError: on every rank; names the rank, the file and the reason.
        """
        folder = Path(path)
        manifest: Manifest | None = self._votes.on_first(lambda: self._check(folder), f"load {folder}")

        own: list[ReadState] = []
        lines: list[str | None] = []

        def read() -> bool:
            own.append(read_state(folder, state, self._ranks.rank, self._ranks.size))
            lines.append(restore_state(own[0], state, folder))
            return own[0].generators is not None

        try:
            have_generators = self._votes.on_all(read, f"load {folder}")
        finally:
            self._let_go()
        for line in filter(None, lines):
            self._say(line)
        generators = own[0].generators
        if state.with_generators:
            generators = self._judge_generators(folder, manifest, generators, have_generators)
        return Restored(
            path=folder,
            trainer_state=own[0].trainer_state,
            training_args=own[0].training_args,
            manifest=manifest,
            generators=generators,
        )

    def _newest(self, of_this_job: bool) -> Path | None:
        self._store.recover()
        for path in reversed(self._store.checkpoints()):
            if of_this_job and not self._is_own(path):
                self._say(f"passed over {path}: it is of another job, and was there before this one was started")
                continue
            try:
                self._hold(path)
            except OSError as error:
                problems = [f"{reason(error)}."]
            else:
                problems = self._store.problems(path)
            if not problems:
                return path
            self._let_go()
            hint = "" if (path / "training_args.json").exists() else " To resume from it all the same, pass its path."
            _warn(f"Passed over {path}: {' '.join(problems)}{hint}")
        return None

    def _is_own(self, path: Path) -> bool:
        try:
            manifest = self._store.manifest(path)
        except CheckpointError:
            return True  # it is damaged, which is said where that is looked at
        return manifest is not None and is_of_this_job(manifest, job_name(), launched_at())

    def _check(self, path: Path) -> Manifest | None:
        """The manifest of a checkpoint that is whole; None for a folder of Hugging Face's."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder. Pass that of a checkpoint, such as {self.output_dir}/checkpoint-20.")
        manifest = self._store.manifest(path)
        if self._proven is not None and path == self._proven.folder:
            return manifest
        self._hold(path)
        if manifest is None and not (path / "training_args.json").exists():  # each of our own folders has that file
            _warn(f"{path} has no manifest.json, as folders of Hugging Face's have none: whether it is whole is unknown.")
        elif problems := self._store.problems(path):
            self._let_go()
            raise CheckpointError(f"{path} is damaged: {' '.join(problems)}")
        return manifest

    def _hold(self, path: Path) -> None:
        self._let_go()
        self._proven = Hold(path)

    def _let_go(self) -> None:
        if self._proven is not None:
            self._proven.release()
        self._proven = None

    def _judge_generators(
        self, folder: Path, manifest: Manifest | None, own: GeneratorStates | None, have: Sequence[bool]
    ) -> GeneratorStates | None:
        """This rank's generators, or None, with a warning on rank 0, where the ranks are not those that saved them."""
        missing = [rank for rank, there in enumerate(have) if not there]
        if manifest is not None and manifest.world_size != self._ranks.size:
            why = f"was saved by {manifest.world_size} ranks and is read by {self._ranks.size}"
        elif missing:
            why = f"has no {', '.join(rng_file(rank, self._ranks.size) for rank in missing)}"
        else:
            return own
        if self._ranks.rank == 0:
            _warn(f"{folder} {why}: the random number generators start from the seed, not where they stood.")
        return None


def _wanted(value: bool | str | os.PathLike[str] | None) -> bool | str | Path:
    """What `resume_from_checkpoint` says: True, False, "auto", or a path."""
    named: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    if value is None or isinstance(value, bool):
        return bool(value)
    return named.get(value.lower(), Path(value)) if isinstance(value, str) else Path(value)


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)
