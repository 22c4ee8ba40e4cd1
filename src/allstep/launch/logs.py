"""The files of one launch: what ranks other than 0 print, and what ranks tell the launcher. Nobody else can read them."""

import contextlib
import os
from collections.abc import Iterator

from allstep.errors import ArgumentsError

__all__ = ["RankFiles"]

TAIL_BYTES = 64 * 1024
"""How far back from the end of a file its last lines are looked for."""


class RankFiles:
    """A private folder for one launch, and beside it the user's folder for the output, where there is one."""

    def __init__(self, log_dir: str | None = None) -> None:
        """Make the folders.

        Raises:
            ArgumentsError: `log_dir` is not a folder that this user can write to.
        """
        if log_dir is not None:
            try:
                os.makedirs(log_dir, mode=0o700, exist_ok=True)
            except OSError as error:
                raise ArgumentsError(f"--log_dir {log_dir} cannot be made: {error.strerror}.") from None
            if not os.access(log_dir, os.W_OK | os.X_OK):
                raise ArgumentsError(f"--log_dir {log_dir} cannot be written to by this user.")
        self._private = _private_folder()
        self._asked = log_dir is not None
        self._logs = os.path.abspath(log_dir) if log_dir is not None else self._private
        self._opened: list[int] = []
        self._shown: dict[int, int] = {}

    @property
    def private(self) -> str:
        """The folder of this launch. No other process than its ranks, and what they start, has it in its environment."""
        return self._private

    def failure(self, rank: int) -> str:
        """Where `rank` writes its failure record."""
        return os.path.join(self._private, f"rank-{rank}.failure.json")

    def stop(self, rank: int) -> str:
        """Where `rank` says that it will stop in order."""
        return os.path.join(self._private, f"rank-{rank}.stop.json")

    def forget(self) -> None:
        """Remove what the ranks of the last generation told. Their output stays, and that of the next goes behind it."""
        for name in os.listdir(self._private):
            if _is_told(name):
                os.unlink(os.path.join(self._private, name))

    def log(self, rank: int) -> str:
        """Where the output of `rank` goes."""
        return os.path.join(self._logs, f"rank-{rank}.log")

    def open_log(self, rank: int) -> int:
        """A descriptor of the file for the output of `rank`, empty the first time; every write goes to its end."""
        fresh = 0 if rank in self._opened else os.O_TRUNC
        descriptor = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | fresh | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if fresh:
            self._opened.append(rank)
        return descriptor

    def unseen(self, last: bool = False) -> Iterator[str]:
        """What the ranks wrote and was not taken from here yet, line by line with the rank in front.

        Args:
            last: nothing will follow, so that a line without an end is one too.
        """
        for rank in self._opened:
            with open(self.log(rank), "rb") as file:
                file.seek(self._shown.get(rank, 0))
                for line in file:
                    if not (last or line.endswith(b"\n")):
                        break
                    self._shown[rank] = self._shown.get(rank, 0) + len(line)
                    text = line.decode(errors="replace").removesuffix("\n")
                    yield f"[rank {rank}] {_as_shown(text)}"

    def tail(self, rank: int, most: int = 30) -> tuple[str, ...]:
        """The last lines that `rank` wrote, at most `most`. Of a progress bar that redraws itself, its last state."""
        if rank not in self._opened:
            return ()
        with open(self.log(rank), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return tuple(_as_shown(line) for line in text.rstrip("\n").split("\n")[-most:]) if text else ()

    def finish(self, keep: bool) -> tuple[str, ...]:
        """Remove what is not needed any more; returns the files kept. A folder that the user named keeps its files."""
        if not keep and not self._asked:
            import shutil  # loads compressors, which nobody needs before the end

            shutil.rmtree(self._private, ignore_errors=True)
            return ()
        self.forget()
        kept = []
        for rank in self._opened:
            path = self.log(rank)
            if self._asked or os.path.getsize(path) > 0:
                kept.append(path)
            else:
                os.unlink(path)
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(self._private)
        return tuple(kept)


def _is_told(name: str) -> bool:
    return ".failure.json" in name or ".stop.json" in name


def _as_shown(line: str) -> str:
    """A line as a terminal leaves it: of a progress bar that redraws itself, its last state."""
    return line.rstrip("\r").rpartition("\r")[2]


def _private_folder() -> str:
    """A new folder for temporary files that only this user can enter."""
    usual = next((place for name in ("TMPDIR", "TEMP", "TMP") if (place := os.environ.get(name))), "/tmp")
    folder = os.path.join(os.path.abspath(usual), f"allstep-{os.urandom(6).hex()}")
    try:
        os.mkdir(folder, mode=0o700)
    except OSError:
        import tempfile  # which knows more places, and whose own imports would hold up the ranks

        return tempfile.mkdtemp(prefix="allstep-")
    return folder
