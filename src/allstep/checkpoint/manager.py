"""Checkpoints of a run on all its ranks: saved by agreement, found, read, and thinned out.

Every method says whether it is collective: all ranks call it, at the same point, with the same arguments. An error on any
rank is raised on every rank, so that none waits for one that has left.
"""

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from allstep import __version__
from allstep.checkpoint.generators import GeneratorStates
from allstep.checkpoint.manifest import FileEntry, Manifest
from allstep.checkpoint.state import (
    ReadState,
    TrainState,
    model_files,
    rank_files,
    read_state,
    restore_state,
    rng_file,
    shared_files,
)
from allstep.checkpoint.store import CheckpointStore, Hook, checkpoint_name, step_of
from allstep.checkpoint.votes import Communicator, Votes
from allstep.errors import CheckpointError

__all__ = ["CheckpointManager", "Restored", "steps_to_remove"]


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
        self._store = CheckpointStore(self.output_dir, hook)
        self._proven: Path | None = None
        """The checkpoint that was just read from end to end, so that a load right after it need not do it again."""

    def prepare(self) -> None:
        """Collective. Make the output folder, prove on every rank that it can be written, and clear a killed run's debris.

        To be called before training, so that a run does not find out at its first checkpoint.

        Raises:
            CheckpointError: on every rank; names the rank, the folder and the reason. A folder made here is gone again.
        """
        made: list[Path] = []
        self._votes.on_first(lambda: _make(self.output_dir, made), "make the output folder")

        def undo() -> None:
            for folder in reversed(made):
                folder.rmdir()

        self._votes.on_all(lambda: _probe(self.output_dir, self._ranks.rank), "write to the output folder", undo=undo)
        self._votes.on_first(self._store.clean, "delete what a killed run left in the output folder")

    def save(self, state: TrainState, *, global_step: int, epoch: float, global_batch_size: int) -> Path:
        """Collective. Write `checkpoint-{global_step}`, or nothing at all; its folder.

        Rank 0 writes the shared files, every rank its generators. When all have written all, rank 0 brings the folder in
        and thins out older ones. A checkpoint of the same step is replaced, without a moment in which there is none.

        Raises:
            CheckpointError: on every rank; names the rank, the file and the reason. Older checkpoints are untouched.
        """
        name = checkpoint_name(global_step)
        facts = {"global_step": global_step, "epoch": epoch, "global_batch_size": global_batch_size}
        advice = f"Older checkpoints in {self.output_dir} are untouched; resume_from_checkpoint=True goes on from the newest."
        staging: Path = self._votes.on_first(lambda: self._store.stage(global_step), f"begin {name}", advice)
        try:
            entries = self._votes.on_all(
                lambda: self._write(state, staging), f"write {name}", advice, undo=lambda: self._store.leave(staging)
            )
            path: Path = self._votes.on_first(
                lambda: self._store.commit(staging, self._manifest(entries, facts)), f"finish {name}", advice
            )
        except BaseException:  # a peer that died, a Ctrl-C: whatever broke off the save leaves no debris
            if self._ranks.rank == 0:
                self._store.leave(staging)
            raise
        self._thin_out(global_step)
        return path

    def save_model(self, state: TrainState, folder: str | os.PathLike[str] | None = None) -> Path:
        """Collective. Write model and tokenizer alone, straight into `folder`, by default the output folder; that folder.

        Raises:
            CheckpointError: on every rank; names the file and the reason. Files that were there before are there still.
        """
        target = self.output_dir if folder is None else Path(folder)
        self._votes.on_first(lambda: self._store.export(target, model_files(state)), f"write the model to {target}")
        return target

    def newest(self) -> Path | None:
        """Collective. The newest checkpoint that is whole; None if there is none. Warns of each newer one it passed over."""
        path: Path | None = self._votes.on_first(self._newest, "look for a checkpoint")
        return path

    def resolve(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> Path | None:
        """Collective. The folder that `train(resume_from_checkpoint=...)` means; None for False and None.

        True is the newest whole checkpoint of the output folder. A path is that folder; one of Hugging Face's, which has no
        manifest and so cannot be proven whole, is taken with a warning.

        Raises:
            CheckpointError: on every rank. There is no whole checkpoint, or the path is none; the message names the file.
        """
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        if resume_from_checkpoint is not True:
            path = Path(resume_from_checkpoint)
            self._votes.on_first(lambda: self._check(path), f"resume from {path}")
            return path
        newest = self.newest()
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True found no whole checkpoint in {self.output_dir}. Pass "
                f"resume_from_checkpoint=False to start from the beginning, or the path of a checkpoint."
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

        def read() -> bool:
            own.append(read_state(folder, state, self._ranks.rank, self._ranks.size))
            restore_state(own[0], state, folder)
            return own[0].generators is not None

        have_generators = self._votes.on_all(read, f"load {folder}")
        self._proven = None
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

    def _write(self, state: TrainState, staging: Path) -> dict[str, FileEntry]:
        rank, size = self._ranks.rank, self._ranks.size
        files = (shared_files(state) if rank == 0 else {}) | rank_files(state, rank, size)
        entries: dict[str, FileEntry] = {}
        for label, write in files.items():
            entries |= self._store.write(staging, label, write)
        return entries

    def _manifest(self, entries: Sequence[dict[str, FileEntry]], facts: Mapping[str, Any]) -> Manifest:
        return Manifest(
            files={name: entry for of_rank in entries for name, entry in of_rank.items()},
            world_size=self._ranks.size,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            allstep_version=__version__,
            torch_version=torch.__version__,
            **facts,
        )

    def _newest(self) -> Path | None:
        self._store.recover()
        for path in reversed(self._store.checkpoints()):
            problems = self._store.problems(path)
            if not problems:
                self._proven = path
                return path
            hint = "" if (path / "training_args.json").exists() else " To resume from it all the same, pass its path."
            _warn(f"Passed over {path}: {' '.join(problems)}{hint}")
        return None

    def _check(self, path: Path) -> Manifest | None:
        """The manifest of a checkpoint that is whole; None for a folder of Hugging Face's."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder. Pass that of a checkpoint, such as {self.output_dir}/checkpoint-20.")
        manifest = self._store.manifest(path)
        if path == self._proven:
            return manifest
        if manifest is None and not (path / "training_args.json").exists():  # each of our own folders has that file
            _warn(f"{path} has no manifest.json, as folders of Hugging Face's have none: whether it is whole is unknown.")
        elif problems := self._store.problems(path):
            raise CheckpointError(f"{path} is damaged: {' '.join(problems)}")
        self._proven = path
        return manifest

    def _judge_generators(
        self, folder: Path, manifest: Manifest | None, own: GeneratorStates | None, have: Sequence[bool]
    ) -> GeneratorStates | None:
        """This rank's generators, or None, with a warning on rank 0, where the ranks are not those that saved them."""
        missing = [rank for rank, there in enumerate(have) if not there]
        if manifest is not None and manifest.world_size != self._ranks.size:
            reason = f"was saved by {manifest.world_size} ranks and is read by {self._ranks.size}"
        elif missing:
            reason = f"has no {', '.join(rng_file(rank, self._ranks.size) for rank in missing)}"
        else:
            return own
        if self._ranks.rank == 0:
            _warn(f"{folder} {reason}: the random number generators start from the seed, not where they stood.")
        return None

    def _thin_out(self, current: int) -> None:
        """Delete on rank 0. All ranks have met in the commit by now, and none is reading: see `load`."""
        if self._ranks.rank != 0:
            return
        by_step = {step_of(path): path for path in self._store.checkpoints()}
        best = None if self.best is None or self.best.parent.resolve() != self.output_dir.resolve() else step_of(self.best)
        steps = [step for step in by_step if step is not None]
        for step in steps_to_remove(steps, current, self.save_total_limit, () if best is None else (best,)):
            try:
                self._store.remove(by_step[step])
            except OSError as error:
                _warn(f"Old checkpoint {by_step[step]} could not be deleted: {error}.")


def steps_to_remove(steps: Collection[int], current: int, limit: int | None, keep: Collection[int]) -> list[int]:
    """Which checkpoints to delete, oldest first, so that `limit` are left of those up to `current`, the one just written.

    `current` and those in `keep` stay, even if that is more than `limit`. Checkpoints of later steps stay too: they belong
    to another run, and the newest good one may be among them.
    """
    if limit is None or limit <= 0:
        return []
    past = sorted(step for step in steps if step <= current)
    surplus = len(past) - limit
    return [step for step in past if step != current and step not in keep][: max(surplus, 0)]


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and its parents; note in `made` those that were not there, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; output_dir has to be a folder.")
    except OSError as error:
        for path in reversed(made):
            path.rmdir()
        raise CheckpointError(f"The output folder {folder} could not be made: {error.strerror}.") from error


def _probe(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 sees, is not there on rank {rank}. output_dir has to lie on a file system that all "
            f"hosts share."
        )
    probe = folder / f"staging-probe-{rank}"
    try:
        try:
            with probe.open("wb") as file:
                file.write(b"allstep writes here\n")
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"Files in {folder} cannot be written: {error.strerror}.") from error


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)
