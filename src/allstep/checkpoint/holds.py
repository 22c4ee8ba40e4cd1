"""Checkpoints in use: whoever reads one holds it, and no process deletes what another holds.

A hold is a lock of the operating system (flock) on the folder, so it ends with its process, however that ends. Where the file
system has no such locks, nobody holds anything, and checkpoints are deleted as if nobody read them.
"""

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Hold", "held_for_deletion"]

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""What flock says where another has the lock; anything else means that this file system has none."""


class Hold:
    """A checkpoint that this process reads; until `release` no other deletes it.

    Raises:
        FileNotFoundError: it is not there, or another process is deleting it now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """What is held."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._close = weakref.finalize(self, _unlock, descriptor)
        self._close.atexit = False  # the system does that, and better: a forked process ends too
        if not _lock(descriptor, fcntl.LOCK_SH) or not _is(folder, descriptor):
            self.release()
            raise FileNotFoundError(errno.ENOENT, "another process deletes it", str(folder))

    def release(self) -> None:
        """Let go. Again: nothing."""
        self._close()


@contextlib.contextmanager
def held_for_deletion(folder: Path) -> Iterator[bool]:
    """While inside, nobody begins to read `folder`; yields whether that is so: False where somebody reads it already."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        _unlock(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was taken, or there are none here."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    return True


def _unlock(descriptor: int) -> None:
    # Closing is not enough: a process that was forked meanwhile, as loaders of data are, has the descriptor too.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is(folder: Path, descriptor: int) -> bool:
    """Whether the folder of that name is still the one that was opened: another process may have deleted it in between."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    return False
