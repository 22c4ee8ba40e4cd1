"""Where this rank is: the one object that the engine, the trainer and every collective keep up to date, and anyone may read.

Writing it costs a few assignments, so it is written always. What the others make of it is in `story`.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

__all__ = ["HERE", "Place", "user_frames_of"]

MOST_FRAMES = 6
"""Frames of the main thread that others are told, innermost last."""

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class Place:
    """What one process does now."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As at the start of a process."""
        self.phase = ""
        """What the rank is at: "data", "forward", "backward", "optimizer", "evaluate", "predict", "save", "callbacks", …"""
        self.phase_since = time.monotonic()
        self.step: int | None = None
        """The optimizer step that is being taken, from 1; None outside of training."""
        self.micro_batch: int | None = None
        """Number of the micro-batch in the step's grid."""
        self.waiting: str | None = None
        """The collective that is waited for; None while the rank works."""
        self.waiting_since = 0.0
        self.detail: Callable[[], str] | None = None
        """Says more about what is waited for, such as the bucket; asked for only when a wait is long."""
        self.waited = 0.0
        """Seconds spent in waits that are over."""
        self.spent: dict[str, float] = {}
        """Seconds in each phase that is over, waits included."""
        self.left = ""
        """Why this rank comes to no further collective: it has finished, failed, or left; empty while it takes part."""

    def enter(self, phase: str) -> None:
        """This rank begins with something else."""
        now = time.monotonic()
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self.phase_since
        self.phase, self.phase_since = phase, now

    @contextmanager
    def within(self, phase: str) -> Any:
        """This rank is at `phase` inside, and then at what it was at before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def wait(self, what: str, detail: Callable[[], str] | None = None) -> "_Wait":
        """A context in which this rank waits for a collective. Inside another wait, the outer one is what counts."""
        return _Wait(self, what, detail)

    def told(self) -> dict[str, Any]:
        """What the other ranks are told; goes through JSON. Times are ages in seconds: clocks of hosts differ."""
        now, waiting, detail = time.monotonic(), self.waiting, self.detail
        told: dict[str, Any] = {
            "phase": self.phase,
            "phase_age": now - self.phase_since,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "waiting": waiting,
            "waited": now - self.waiting_since if waiting is not None else 0.0,
            "detail": "",
            "waits": self.waited,
            "spent": dict(self.spent),
            "left": self.left,
            "frames": user_frames_of(threading.main_thread().ident),
        }
        if waiting is not None and detail is not None:
            with suppress(Exception):  # what it looks at may change meanwhile
                told["detail"] = detail()
        return told


class _Wait:
    __slots__ = ("_detail", "_is_outer", "_place", "_what")

    def __init__(self, place: Place, what: str, detail: Callable[[], str] | None) -> None:
        self._place, self._what, self._detail, self._is_outer = place, what, detail, False

    def __enter__(self) -> None:
        place = self._place
        if place.waiting is None:
            self._is_outer = True
            place.waiting_since, place.detail = time.monotonic(), self._detail
            place.waiting = self._what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_outer:
            place = self._place
            place.waiting = place.detail = None
            place.waited += time.monotonic() - place.waiting_since


HERE = Place()
"""The place of this process."""


def user_frames_of(thread: int | None) -> list[str]:
    """Where a thread is in the user's own files, "file:line in function", innermost last; where in any, if in none of those."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return []
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    stack.reverse()
    own = [index for index, each in enumerate(stack) if _is_users(each.filename)]
    chosen = [stack[index] for index in own] or stack[-1:]
    below = stack[own[-1] + 1 :] if own else []
    if below and not below[0].filename.startswith(_OWN):
        chosen.append(below[-1])  # the user's line has called a library
    return [f"{each.filename}:{each.lineno} in {each.name}" for each in chosen[-MOST_FRAMES:]]


def _is_users(path: str) -> bool:
    return not (path.startswith(("<", _LIBRARY, _OWN)) or f"{os.sep}site-packages{os.sep}" in path)


os.register_at_fork(after_in_child=HERE.forget)
