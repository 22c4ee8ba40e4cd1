"""What a failing rank leaves behind for the launcher: its exception, where in the user's code it arose, and when."""

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["FailureRecord", "UserFrame", "user_frames"]

MOST_FRAMES = 20
"""Frames kept in a record; endless recursion has a thousand that are all the same."""
LONGEST_TEXT = 20_000
"""Characters kept of a message or a traceback: some errors print whole tensors."""

_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """One frame of a traceback."""

    file: str
    """Path of the source file, as Python gives it."""
    line: int
    function: str
    """Name of the function; "<module>" on the level of the file."""
    source: str
    """The line itself, without its indent; empty where it cannot be read."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Why one rank failed, in its own words."""

    rank: int
    host: str
    pid: int
    error: str
    """Type of the exception, with its module where it is not a built-in one."""
    message: str
    """Text of the exception, with its notes, if any, on lines of their own."""
    frames: tuple[UserFrame, ...]
    """Frames outside the standard library, installed packages and allstep, outermost first; all where none is outside.
    For a plain exit, by `sys.exit` and argument parsers, only those outside."""
    traceback: str
    """The whole traceback as Python prints it."""
    time: float
    """When the exception reached the top of the script, unix seconds."""
    collateral: bool = False
    """The exception says that its cause lies on another rank."""
    late: tuple[int, ...] = ()
    """Ranks that it says did not come to a collective in which this one waited."""

    @classmethod
    def of(cls, error: BaseException, trace: TracebackType | None, *, rank: int) -> "FailureRecord":
        """The record of `error`, which reached the top of this process with the traceback `trace`."""
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        return cls(
            rank=rank,
            host=os.uname().nodename,
            pid=os.getpid(),
            error=_type_name(type(error)),
            message=_shortened("\n".join([_text(error), *notes])),
            frames=user_frames(error, trace),
            traceback=_shortened("".join(traceback.format_exception(type(error), error, trace))),
            time=time.time(),
            collateral=bool(getattr(error, "collateral", False)),
            late=tuple(getattr(error, "late", None) or ()),
        )

    def to_json(self) -> str:
        """One line of JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FailureRecord":
        """The same object that wrote `text`."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "FailureRecord":
        """The same object of which `fields` is what JSON leaves of it."""
        frames = tuple(UserFrame(**frame) for frame in fields["frames"])
        return cls(**{**fields, "frames": frames, "late": tuple(fields.get("late", ()))})

    def write(self, path: str) -> None:
        """Put the record at `path`: a reader finds all of it or nothing."""
        _put(path, self.to_json())

    def write_for_torch(self, path: str) -> None:
        """Put the record at `path` as torch's elastic agent reads it; its report then shows error and traceback."""
        extra = {"py_callstack": self.traceback, "timestamp": str(int(self.time))}
        _put(path, json.dumps({"message": {"message": f"{self.error}: {self.message}", "extraInfo": extra}}))


def _put(path: str, text: str) -> None:
    aside = f"{path}.{os.getpid()}"
    Path(aside).write_text(text)
    os.replace(aside, path)


def user_frames(error: BaseException, trace: TracebackType | None) -> tuple[UserFrame, ...]:
    """The frames of `trace` that lie in the user's own files; the last ones, where there are many.

    A `SyntaxError` ends with the line that Python could not read.
    """
    frames = [
        UserFrame(file=frame.filename, line=frame.lineno or 0, function=frame.name, source=frame.line or "")
        for frame in traceback.extract_tb(trace)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        source = (error.text or "").strip()
        frames.append(UserFrame(file=error.filename, line=error.lineno or 0, function="<module>", source=source))
    own = [frame for frame in frames if _is_user_file(frame.file)]
    return tuple((own if own or isinstance(error, SystemExit) else frames)[-MOST_FRAMES:])


def _is_user_file(path: str) -> bool:
    folders = path.split(os.sep)
    if path.startswith("<") or "site-packages" in folders or "dist-packages" in folders:
        return False
    return not path.startswith(_LIBRARIES)


def _type_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg  # str() adds file and line, which are the last frame
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - an exception whose text fails must not hide the failure itself
        return f"<no text: its __str__ raised {type(second).__name__}>"


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
