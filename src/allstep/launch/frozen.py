"""Ranks that a signal has stopped: they are there, do nothing, and say nothing. Seen in the kernel's own list."""

from collections.abc import Mapping

__all__ = ["FrozenRanks", "is_frozen"]

AFTER = 2.0
"""Seconds in which nothing is said: a debugger stops a process for a moment too."""


class FrozenRanks:
    """Which ranks are stopped, and since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self, processes: Mapping[int, int], now: float) -> list[str]:
        """A sentence for each rank that has been stopped for a while, once each time.

        Args:
            processes: rank -> process, of those that run.
            now: seconds.
        """
        frozen = {rank for rank, pid in processes.items() if is_frozen(pid)}
        self._since = {rank: self._since.get(rank, now) for rank in frozen}
        self._told &= frozen
        news = [rank for rank in sorted(frozen - self._told) if now - self._since[rank] >= AFTER]
        self._told.update(news)
        return [
            f"rank {rank} (process {processes[rank]}) is stopped by a signal (SIGSTOP, Ctrl-Z or a debugger), so the others "
            f"wait for it; kill -CONT {processes[rank]} lets it go on"
            for rank in news
        ]


def is_frozen(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
