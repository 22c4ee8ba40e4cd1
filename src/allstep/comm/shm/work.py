"""What a caller holds of a collective: torch's `Work`."""

import sys
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.shm.line import Line, Started

__all__ = ["ShmWork"]


class ShmWork(dist.Work):
    """A collective, done or in the line."""

    def __init__(self, result: Any, line: Line | None = None, started: Started | None = None) -> None:
        super().__init__()
        self._result, self._line, self._started = result, line, started
        if line is not None:
            _outlive_python(self)

    def wait(self, timeout: Any = None) -> bool:
        """Return when the result may be read."""
        started, self._started = self._started, None
        if started is not None and self._line is not None:
            self._line.finish(started)
        return True

    def is_completed(self) -> bool:
        """True: asking brings it to its end, since nobody else would."""
        return self.wait()

    def is_success(self) -> bool:
        """Whether it ended well; it raises otherwise."""
        return self.wait()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> Any:
        """Its tensors."""
        self.wait()
        return self._result

    def get_future(self) -> "torch.futures.Future[Any]":
        """One that is done."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


# Where C++ keeps a work that Python lets go of, what it calls is not ours any more but its own `wait`, which never returns:
# torch's class does so with that of its join (test_join_uneven.py). So the last ones stay; what they reduced does not.
_RECENT: "deque[ShmWork]" = deque(maxlen=32)


def _outlive_python(work: ShmWork) -> None:
    for recent in _RECENT:
        if recent._started is None and sys.getrefcount(recent) <= _UNUSED:
            recent._result = None
    _RECENT.append(work)


_UNUSED = 3  # references of a work that nobody else holds: of the deque, the loop, and the call
