"""Where ranks leave word of themselves: keys in the store of the job, over a connection of its own.

The default group's own connection is held while somebody waits in it; this one never waits.
"""

import json
import os
import socket
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from allstep.comm.shm.host import host_key

__all__ = ["Board", "process_state"]


class Board:
    """The words of `size` ranks.

    Args:
        store: that of the group whose ranks they are.
        rank: who writes.
        size: number of ranks.
        name: the same on all ranks, and no other group's in that store.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        self._store = PrefixStore(f"allstep/watchdog/{name}", _another_connection(store))
        self._keys = [f"{each}" for each in range(size)]
        self._rank = rank
        self._known: set[int] = set()
        self._number = 0
        self.who = {"pid": os.getpid(), "host": socket.gethostname(), "key": host_key()}
        """What is part of every word of this rank."""

    def post(self, told: dict[str, Any]) -> None:
        """Leave word; it takes the place of the word before."""
        self._number += 1
        self._store.set(self._keys[self._rank], json.dumps({**told, **self.who, "number": self._number}))

    def read(self) -> dict[int, dict[str, Any]]:
        """The last word of each rank that has left one."""
        self._known |= {rank for rank, key in enumerate(self._keys) if rank not in self._known and self._store.check([key])}
        ranks = sorted(self._known)
        texts = self._store.multi_get([self._keys[rank] for rank in ranks]) if ranks else []
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}


def _another_connection(store: Store) -> Store:
    """To where `store` keeps its keys. Also on the rank that keeps them that of a client, so as not to keep them alive."""
    if isinstance(store, PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    again: Store = store.clone()  # type: ignore[attr-defined]
    return again


def process_state(pid: int, key: str) -> str:
    """What the kernel says of a process: "gone", "stopped" or "alive"; empty where it is not one of this host.

    Args:
        pid: its number.
        key: `host_key()` in that process.
    """
    if key != host_key():
        return ""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "alive")
