"""One checkpoint on its way to the disk: staged, written by every rank, brought in by rank 0. Training waits, or goes on."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from allstep import __version__
from allstep.checkpoint.job import job_name
from allstep.checkpoint.manifest import FileEntry, Manifest
from allstep.checkpoint.state import TrainState, copied_files, live_files
from allstep.checkpoint.store import CheckpointStore, WriteFiles, checkpoint_name
from allstep.checkpoint.votes import Communicator, Votes

__all__ = ["Save"]

Entries = dict[str, FileEntry]


class Save:
    """A save that has begun. Of every save exactly one of `finish` and `abandon` is called.

    Collective. Makes the staging folder. In the background, what is to be written is copied now, and a thread of each rank
    writes it; no collective runs in there. Else it is written in `finish`.

    Raises:
        CheckpointError: on every rank; names the rank, the file and the reason. No debris is left.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Communicator,
        state: TrainState,
        facts: Mapping[str, Any],
        *,
        in_background: bool,
    ) -> None:
        self.step: int = facts["global_step"]
        """Optimizer steps done when it began."""
        self._store, self._ranks, self._state, self._facts = store, ranks, state, facts
        self._votes = Votes(ranks)
        self._name = checkpoint_name(self.step)
        self._advice = f"No checkpoint is in {store.output_dir} yet."
        if store.checkpoints():
            self._advice = (
                f"Older checkpoints in {store.output_dir} are untouched; resume_from_checkpoint=True goes on from the newest."
            )
        self._given_up = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[Entries] | None = None
        self._staging: Path = self._votes.on_first(lambda: store.stage(self.step), f"begin {self._name}", self._advice)
        if in_background:
            self._begin_writing()

    @property
    def is_written(self) -> bool:
        """Whether this rank need not wait for its own files in `finish`."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> Path:
        """Collective. Wait until every rank's files are on its disk, and bring the checkpoint in; its folder.

        Raises:
            CheckpointError: on every rank; names the rank, the file and the reason. Older checkpoints are untouched.
        """
        try:
            entries = self._votes.on_all(self._written, f"write {self._name}", self._advice, undo=self._discard)
            path: Path = self._votes.on_first(
                lambda: self._store.commit(self._staging, self._manifest(entries)), f"finish {self._name}", self._advice
            )
        except BaseException:  # a peer that died, a Ctrl-C: whatever broke off the save leaves no debris
            self.abandon()
            raise
        return path

    def abandon(self) -> None:
        """Not collective. Stop writing after the file at hand, and leave no debris."""
        self._given_up.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._discard()

    def _begin_writing(self) -> None:
        copies: dict[str, WriteFiles] = {}

        def copy() -> None:
            copies.update(copied_files(self._state, self._ranks.rank, self._ranks.size, self._staging))

        try:
            self._votes.on_all(copy, f"copy what {self._name} is made of", self._advice, undo=self._discard)
        except BaseException:
            self._discard()
            raise
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"allstep-{self._name}")
        self._writing = self._pool.submit(self._write, copies)

    def _written(self) -> Entries:
        if self._pool is not None and self._writing is not None:
            self._pool.shutdown()  # waits, and its thread ends
            return self._writing.result()
        return self._write(live_files(self._state, self._ranks.rank, self._ranks.size))

    def _write(self, files: dict[str, WriteFiles]) -> Entries:
        entries: Entries = {}
        for label in list(files):
            if not self._given_up.is_set():
                entries |= self._store.write(self._staging, label, files.pop(label))  # popped, so that its copy is let go of
        return entries

    def _discard(self) -> None:
        if self._ranks.rank == 0:
            self._store.leave(self._staging)

    def _manifest(self, entries: Sequence[Entries]) -> Manifest:
        return Manifest(
            files={name: entry for of_rank in entries for name, entry in of_rank.items()},
            world_size=self._ranks.size,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            allstep_version=__version__,
            torch_version=torch.__version__,
            job=job_name(),
            **self._facts,
        )
