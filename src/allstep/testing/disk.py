"""Checkpoints under a test's control: it hears of each action on disk before it is done, and may refuse it or let it wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from allstep.checkpoint.store import CheckpointStore, Hook

__all__ = ["acting_on_disk"]


@contextmanager
def acting_on_disk(hook: Hook) -> Iterator[None]:
    """Inside, `hook` is called before each action on disk of every store of checkpoints that this process makes."""
    make = CheckpointStore.__init__

    def made(store: CheckpointStore, output_dir: object, given: Hook | None = None) -> None:
        make(store, output_dir, hook)  # type: ignore[arg-type]

    with patch.object(CheckpointStore, "__init__", made):
        yield
