"""The output folder: made, and proven to be one that can be written, before a run depends on it."""

import os
from collections.abc import Sequence
from pathlib import Path

from allstep.errors import CheckpointError

__all__ = ["make", "probe", "sync"]


def make(folder: Path, made: list[Path]) -> None:
    """Make a folder and its parents; note in `made` those that were not there, outermost first.

    Raises:
        CheckpointError: that cannot be done; what was made is gone again.
    """
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


def probe(folder: Path, rank: int) -> None:
    """Write a file and delete it.

    Raises:
        CheckpointError: the folder is not there on this rank, or cannot be written.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 sees, is not there on rank {rank}. output_dir has to lie on a file system that all "
            f"hosts share."
        )
    written = folder / f"staging-probe-{rank}"
    try:
        try:
            with written.open("wb") as file:
                file.write(b"allstep writes here\n")
                file.flush()
                os.fsync(file.fileno())
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"Files in {folder} cannot be written: {error.strerror}.") from error


def sync(made: Sequence[Path]) -> None:
    """Bring the names of folders that `make` made to the disk: a checkpoint is of no use in a folder that is lost."""
    for path in made:
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
