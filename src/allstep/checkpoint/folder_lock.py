"""Keeps two runs out of one folder: rank 0 holds a lock on it while it trains, which leaves no file and ends with the process.

Several copies of a script that were started at once, and do not know of one another, would each train alone and overwrite
what the others write.
"""

import contextlib
import fcntl
import os
import socket

from allstep.errors import CheckpointError

__all__ = ["FolderLock"]

_HELD: set[int] = set()
"""Descriptors of the locks of this process. A forked process must not keep them: a loader's worker may outlive its rank."""


def _close_inherited() -> None:
    for descriptor in _HELD:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)


class FolderLock:
    """Only one of these is open for a folder, on this machine; on a shared file system that carries locks, on all of them.

    It is released when nobody holds this object any more. Where the file system has no such locks, nothing is locked and
    nothing refused.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Take the lock on `folder`, which must be there.

        Raises:
            CheckpointError: another process holds it. The message says which, as far as it can be known.
        """
        self.folder = os.fspath(folder)
        self._descriptor: int | None = None
        self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.fstat(self._descriptor))
            os.close(self._descriptor)
            self._descriptor = None
            raise CheckpointError(_refusal(self.folder, holder)) from None
        except OSError:
            # NFS wants a descriptor that can be written to, which a folder has not; others have no locks at all
            os.close(self._descriptor)
            self._descriptor = None
        else:
            _HELD.add(self._descriptor)

    @property
    def is_held(self) -> bool:
        """Whether this keeps others out: false after `release`, and on file systems without locks."""
        return self._descriptor in _HELD

    def release(self) -> None:
        """Let others in. More calls do nothing."""
        if self._descriptor is not None and self._descriptor in _HELD:
            _HELD.remove(self._descriptor)
            with contextlib.suppress(OSError):
                # a process forked a moment ago may still have a copy of the descriptor
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._descriptor = None

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _refusal(folder: str, holder: int | None) -> str:
    host = socket.gethostname()
    if holder is None:
        who = f"a process that cannot be seen from {host}: in another container, or on another host"
    else:
        who = f"process {holder} on {host}" + (f" (`{command}`)" if (command := _command(holder)) else "")
    return (
        f"Another run already trains into {folder}: {who}; this one is process {os.getpid()}. Each would overwrite the "
        "other's checkpoints. Copies of one script that a launcher started do not know of one another unless it sets RANK and "
        "WORLD_SIZE: to train them together, start them with `allstep launch --num_processes N SCRIPT`. For two runs, give "
        "each an output_dir of its own."
    )


def _holder(folder: os.stat_result) -> int | None:
    """Process id of the one that holds the lock, as the kernel lists it; None where it is not one of ours to see."""
    place = f"{os.major(folder.st_dev):02x}:{os.minor(folder.st_dev):02x}:{folder.st_ino}"
    try:
        with open("/proc/locks") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    pids = [int(words[4]) for words in lines if words[1:3] == ["FLOCK", "ADVISORY"] and words[5] == place]
    return next((pid for pid in pids if pid > 0), None)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
    return words if len(words) <= 120 else words[:117] + "..."
