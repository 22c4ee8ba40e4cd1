"""Which checkpoints of a run came in and which could not be written: for what the run says at its end."""

from pathlib import Path

__all__ = ["SaveRecord"]


class SaveRecord:
    """The saves of one run, in order."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        """What the file system refused, in words."""
        self._came_in = 0
        self.newest: Path | None = None
        """The one that came in last, or that the run has gone on from."""
        self._last_failed = False

    def resumed_from(self, checkpoint: Path) -> None:
        """The run goes on from one that is on disk."""
        self.newest = checkpoint

    def came_in(self, checkpoint: Path) -> None:
        """One is on disk."""
        self.newest, self._last_failed = checkpoint, False
        self._came_in += 1

    def refused(self, error: Exception) -> None:
        """One could not be written."""
        self._last_failed = True
        self.failures.append(str(error))

    def last_words(self) -> str | None:
        """For the end of the run: what failed, and loudly if it was the last one; None where all came in."""
        if not self.failures:
            return None
        lines = [f"{len(self.failures)} of {self._came_in + len(self.failures)} checkpoints could not be written:"]
        lines += [f"  {failure}" for failure in self.failures]
        if self._last_failed:
            newest = "NO CHECKPOINT" if self.newest is None else f"NOTHING NEWER THAN {self.newest}"
            lines.append(f"{newest} IS ON DISK: what was trained since then is lost when this process ends, unless it is saved")
        return "\n".join(lines)
