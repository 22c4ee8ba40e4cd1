"""Pieces of memory that several processes map: made by one, found by the others through its file descriptor.

A segment is an anonymous file (memfd), which has no name in any folder: it needs no room in /dev/shm, and is gone with the last
process that maps it, however that ends.
"""

import mmap
import os
from dataclasses import dataclass

__all__ = ["Address", "Segment", "map_segment"]

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Address:
    """Where another process finds a segment."""

    pid: int
    fd: int
    inode: int
    nbytes: int


class Segment:
    """Zeroed memory that other processes of this host can map.

    Args:
        nbytes: at least so many; rounded up to whole pages.
        reserve: take all of it from the system now, so that what does not fit is an error here and not a crash later.

    Raises:
        OSError: the system has not so much memory, or no file descriptor left.
    """

    def __init__(self, nbytes: int, *, reserve: bool = False) -> None:
        self.nbytes = max(1, -(-nbytes // _PAGE)) * _PAGE
        fd = os.memfd_create("allstep", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.nbytes)
            if reserve:
                os.posix_fallocate(fd, 0, self.nbytes)
            self.memory = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED | (_POPULATE if reserve else 0))
            self.address = Address(os.getpid(), fd, os.fstat(fd).st_ino, self.nbytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise OSError(f"{self.nbytes / 2**20:.1f} MiB of shared memory: {error}") from error
        self._fd: int | None = fd

    def words(self) -> memoryview:
        """All of it as 64-bit integers."""
        return memoryview(self.memory).cast("q")

    def close(self) -> None:
        """No process can find it any more; those that have mapped it keep it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def map_segment(address: Address) -> mmap.mmap:
    """Map a segment of another process.

    Raises:
        OSError: it is not there, or this process may not look into that one.
    """
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != address.inode:
            raise OSError(f"descriptor {address.fd} of process {address.pid} is another file by now")
        return mmap.mmap(fd, address.nbytes, mmap.MAP_SHARED)
    finally:
        os.close(fd)
