"""Which way a person watches: a bar, lines, both, or neither; it may change while a run goes on."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from allstep.report.record import StepRecord
from allstep.report.sink import Sink
from allstep.report.terminal import LineSink, ProgressSink

__all__ = ["WatchSink"]


class WatchSink(Sink):
    """Hands on to a progress bar or to lines. Messages are shown always: they tell of what nobody asked for, such as a resume.

    Args:
        shows: "ProgressCallback" or "PrinterCallback" -> whether that is wanted now. Progress is a bar where stderr is a
            terminal, and lines on stdout elsewhere; the printer's lines stand above the bar.
    """

    def __init__(self, shows: Callable[[str], bool]) -> None:
        self._shows = shows
        self._opened: tuple[int | None, int] | None = None  # steps in all, and those that are done, while training
        self.sink: LineSink | ProgressSink = self._made()
        """What shows it now."""

    def open(self, total_steps: int | None, first_step: int) -> None:
        self._opened = total_steps, first_step
        self.sink.close()
        self.sink = self._made()
        self.sink.open(total_steps, first_step)

    def step(self, record: StepRecord) -> None:
        self._follow()
        self.sink.step(record)
        if self._opened is not None:
            self._opened = self._opened[0], record.step

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        self._follow()
        if self._shows("PrinterCallback"):
            self.sink.line(values, step, epoch)
        elif self._shows("ProgressCallback"):
            self.sink.log(values, step, epoch)

    def message(self, text: str) -> None:
        self.sink.message(text)

    def close(self) -> None:
        self._opened = None
        self.sink.close()

    def _follow(self) -> None:
        """Change to what is wanted now."""
        if isinstance(self.sink, ProgressSink) is not self._wants_bar():
            self.sink.close()
            self.sink = self._made()
            if self._opened is not None:
                self.sink.open(*self._opened)

    def _made(self) -> LineSink | ProgressSink:
        return ProgressSink(sys.stderr) if self._wants_bar() else LineSink(sys.stdout)

    def _wants_bar(self) -> bool:
        return self._shows("ProgressCallback") and _is_terminal(sys.stderr)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; a pseudo-terminal of no width is a recorder's, on which a bar would be invisible."""
    with contextlib.suppress(ValueError):  # closed
        return stream is not None and stream.isatty() and _columns(stream) != 0
    return False


def _columns(stream: TextIO) -> int | None:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:  # no real file
        return None
