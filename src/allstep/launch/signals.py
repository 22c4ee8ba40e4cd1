"""Signals to the launcher, as things that a loop waits for, and signals from it to its ranks."""

import contextlib
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType

__all__ = ["Signals", "is_request", "signal_group"]

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those by which somebody asks the job to stop. SIGCHLD only wakes."""
_PASSED_ON = signal.SIGUSR2
"""One that is for the ranks alone."""


class Signals:
    """While open, signals to this process are noted instead of acted upon, and wake whoever waits."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_fd = -1

    def __enter__(self) -> "Signals":
        try:
            self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            self._close()
            raise
        # With a handler in place SIGINT has its default effect in the ranks, even where a shell that started this in the
        # background had it ignored. SIGHUP stays ignored where it was: that is what nohup is for.
        for number in (signal.SIGCHLD, _PASSED_ON, *_REQUESTS):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._close()

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float, sockets: Iterable[socket.socket] = ()) -> None:
        """Sleep until a signal comes, or something comes in at one of `sockets`; `seconds` at most."""
        poll = select.poll()  # unlike select(), it takes any descriptor
        for each in (self._reader, *sockets):
            poll.register(each, select.POLLIN)
        poll.poll(max(0, math.ceil(seconds * 1000)))

    def taken(self) -> list[int]:
        """The requests to stop that came since the last call; and SIGUSR2, which is none."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                numbers += chunk
        return [number for number in numbers if is_request(number) or number == _PASSED_ON]


def is_request(number: int) -> bool:
    """Whether by this signal somebody asks the job to stop."""
    return number in _REQUESTS


def signal_group(leader: int, number: int) -> None:
    """Send a signal to all processes of the group that process `leader` leads, if there are any left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
