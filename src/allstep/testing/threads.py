"""Ranks as threads of one process, for what needs no tensors sent: fast, and a debugger can stop in it."""

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allstep.comm.communicator import Communicator, Pending

__all__ = ["ThreadRank", "on_threads"]

_DEADLINE = 60.0
"""Seconds after which a rank that waits for another gives up."""


class ThreadRank(Communicator):
    """A communicator whose ranks are threads; values travel as bytes, as between processes. It sends no tensors."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, slots: list[bytes]) -> None:
        self.rank, self.size, self._meeting, self._slots = rank, size, meeting, slots

    @classmethod
    def alone(cls) -> "ThreadRank":
        """A world of one."""
        return cls(0, 1, threading.Barrier(1), [b""])

    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        raise NotImplementedError("ranks that are threads send no tensors")

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        raise NotImplementedError("ranks that are threads send no tensors")

    def barrier(self) -> None:
        self._meeting.wait(_DEADLINE)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._slots[self.rank] = pickle.dumps(value)
        self._meeting.wait(_DEADLINE)
        values = [pickle.loads(slot) for slot in self._slots]
        self._meeting.wait(_DEADLINE)
        return values


def on_threads(size: int, body: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `body` returned or raised, by rank. A rank that leaves early breaks the meeting of the others."""
    meeting, slots = threading.Barrier(size), [b""] * size
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(ThreadRank(rank, size, meeting, slots))
        except Exception as error:  # noqa: BLE001 - an error is an outcome
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
