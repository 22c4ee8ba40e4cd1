"""Which checkpoints of a run came in and which could not be written: for what the run says at its end."""

from pathlib import Path

__all__ = ["SaveRecord"]

_NAMED = 5
"""So many are named at the end, the last ones; a long run may have hundreds."""


class SaveRecord:
    """The saves of one run, in order."""

    def __init__(self) -> None:
        self._refused: list[str] = []
        self._last_reason = ""
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

    def refused(self, name: str, error: Exception) -> None:
        """One could not be written."""
        self._last_failed, self._last_reason = True, str(error)
        self._refused.append(name)

    def last_words(self) -> str | None:
        """For the end of the run: what failed, and loudly if it was the last one; None where all came in."""
        if not self._refused:
            return None
        named, more = ", ".join(self._refused[-_NAMED:]), len(self._refused) - _NAMED
        before = f"{more} more and " if more > 0 else ""
        lines = [
            f"{len(self._refused)} of {self._came_in + len(self._refused)} checkpoints could not be written: {before}{named}. "
            f"The last of them: {self._last_reason}"
        ]
        if self._last_failed:
            newest, what = f"NOTHING NEWER THAN {self.newest}", "what was trained since then"
            if self.newest is None:
                newest, what = "NO CHECKPOINT", "all that was trained"
            lines.append(f"{newest} IS ON DISK: {what} is lost when this process ends, unless it is saved")
        return "\n".join(lines)
