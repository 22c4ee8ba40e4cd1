"""`shm` as torch knows it: a process group whose collectives go over memory that its ranks share.

`import allstep.comm.shm` registers it; then `torch.distributed.init_process_group("shm")` or `new_group(backend="shm")` works
in any program. Point-to-point messages and what is rare go over gloo, and so does everything where the ranks cannot share
memory: the first rank then says why, in one line.
"""

import json
import logging
import uuid
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from allstep.comm.shm.collectives import Collectives
from allstep.comm.shm.hosts import AcrossHosts, ranks_of_hosts
from allstep.comm.shm.line import Line
from allstep.comm.shm.peers import Offer, Peers
from allstep.comm.shm.staged import Staged

__all__ = ["ShmProcessGroup"]

_LOG = logging.getLogger("allstep")
_CPU = torch.device("cpu")


class ShmProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """Ranks of one host, by shared memory; see `peers` for how they find each other.

    Args:
        store: where ranks meet.
        rank: this one's number in the group.
        size: number of ranks.
        timeout: for each collective.
        base: a group of the same ranks whose gloo to use too; see `open_channel`.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, *, base: "ShmProcessGroup | None" = None
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg] # torch lets no class of Python's have a store
        self._store, self._rank, self._size = store, rank, size
        self._gloo: Any = base._gloo if base else dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        if base is None:
            self._gloo._set_sequence_number_for_group()
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)  # for what is not defined here
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.opened_channel: ShmProcessGroup | None = None
        """What `open_channel` has made."""
        self.peers: Peers | None = None
        """None where all goes over gloo."""
        self.across: AcrossHosts | None = None
        """Where they are on several hosts, some on each; then all-reduces go over it, and all else over gloo."""
        self.refusal = ""
        """Why the ranks do not share memory; empty where they do."""
        if size > 1:
            self._meet()

    def _meet(self) -> None:
        """Collective, over gloo: a store may still hold what an earlier group of the same name left there."""
        offer, told = self._offer()
        refusals = [f"rank {rank}: {each['refusal']}" for rank, each in enumerate(told) if each["refusal"]]
        hosts = ranks_of_hosts([each.get("host", "") for each in told])
        if refusals:
            self.refusal = "; ".join(refusals)
        elif not hosts:
            count = len({each["host"] for each in told})
            self.refusal = f"they are on {count} hosts, or in containers of their own"
        elif len(hosts) == 1:
            (peers,) = self._mapped([(offer, told)], hosts[0]) or (None,)
            if peers is not None:
                self.peers, self.staged, self.line = peers, Staged(peers), Line(peers)
                self._sums, self._smalls = {}, {}
                peers.forget.append(weakref.WeakMethod(self._forget))
        else:
            ours = next(ranks for ranks in hosts if self._rank in ranks)
            both = self._mapped([(offer, told), self._offer()], ours)
            if both:
                self._join_hosts(both[0], both[1], hosts)
        if self.peers is None and self.across is None and offer.segment is not None:
            offer.segment.close()
        if self.refusal and self._rank == 0:
            _LOG.warning(
                "shm: the %d ranks of this group cannot share memory, so gloo carries it: %s", self._size, self.refusal
            )

    def _offer(self) -> tuple[Offer, list[dict[str, Any]]]:
        """Collective. What this rank offers, and what all do."""
        offer = Offer()
        return offer, [json.loads(each) for each in _tell(self._gloo, json.dumps(offer.told))]

    def _mapped(self, offers: list[tuple[Offer, list[dict[str, Any]]]], ours: list[int]) -> list[Peers]:
        """Collective. The ranks `ours` joined in each memory that was offered; none where that failed on some rank."""
        joined: list[Peers] = []
        reason = ""
        seconds = partial(_seconds_of, weakref.ref(self))  # gloo's threads end with this group: nothing in it may hold it
        try:
            for offer, told in offers:
                joined.append(Peers(ours.index(self._rank), offer, [told[rank] for rank in ours], seconds))
        except (OSError, ValueError) as error:
            reason = f"rank {self._rank}: {error}"
        self.refusal = "; ".join(each for each in _tell(self._gloo, reason) if each)
        for peers in joined:
            if self.refusal:
                peers.leave()
            else:
                peers.close_control()
        return [] if self.refusal else joined

    def _join_hosts(self, first: Peers, last: Peers, hosts: list[list[int]]) -> None:
        """Collective. One gloo group for the first ranks of all hosts, one for the second ones, and so on."""
        number = next(index for index, ranks in enumerate(hosts) if self._rank in ranks)
        name = _tell(self._gloo, uuid.uuid4().hex)[0]
        store = PrefixStore(f"across/{name}/{first.rank}", self._store)
        across = dist.ProcessGroupGloo(store, number, len(hosts), timedelta(seconds=self._seconds()))
        self.across, self.line = AcrossHosts(first, last, across, self._size), Line(last)

    def _forget(self, index: int) -> None:
        self._sums = {key: each for key, each in self._sums.items() if each.location >> 56 != index}

    def _seconds(self) -> float:
        return float(self._gloo.options._timeout.total_seconds())

    def open_channel(self) -> "ShmProcessGroup":
        """Collective. The same ranks with numbers of their own: what goes over the one never pairs with the other's."""
        seconds = timedelta(seconds=self._seconds())
        self.opened_channel = ShmProcessGroup(self._store, self._rank, self._size, seconds, base=self)
        return self.opened_channel

    def get_group_store(self) -> Store:
        """Where the ranks have met."""
        return self._store

    # ---- memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives memory that is reduced without a copy."""
        return self.peers is not None and torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """(size,) zeros that `all_reduce` reduces without a copy, on the ranks that all give such a tensor.

        Ordinary memory where ranks do not share any, or where the system has none to share.
        """
        if self.peers is not None and torch.device(device).type == "cpu" and size:
            try:
                shared = self.peers.allocate(size, dtype)
            except OSError as error:
                shared = None
                _LOG.warning("shm: rank %d gets ordinary memory, which costs copies: %s", self._rank, error)
            if shared is not None:
                return shared
        return torch.zeros(size, dtype=dtype, device=device)

    # ---- the end

    def shutdown(self) -> None:
        """Leave: let go of the others' memory, and tell them."""
        if self.opened_channel is not None:
            self.opened_channel.shutdown()
            self.opened_channel = None
        if self.across is not None:
            self.line.clear()
            self.across.leave()
            self.across = None
            del self.line
        if self.peers is not None:
            self.line.clear()
            self.peers.leave()
            self.peers = None
            del self.line, self.staged, self._sums, self._smalls

    abort = shutdown


def _seconds_of(group: "weakref.ref[ShmProcessGroup]") -> float:
    living = group()
    return 0.0 if living is None else living._seconds()


def _tell(gloo: Any, text: str) -> list[str]:
    """Every rank's text, by rank."""
    sent = text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(gloo.size())]
    gloo.allgather([lengths], [torch.tensor([len(sent)])], AllgatherOptions()).wait()
    longest = max(int(length) for length in lengths) + 1  # not empty
    padded = torch.frombuffer(bytearray(sent.ljust(longest, b"\0")), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in lengths]
    gloo.allgather([texts], [padded], AllgatherOptions()).wait()
    return [bytes(each.numpy())[: int(length)].decode() for each, length in zip(texts, lengths, strict=True)]
