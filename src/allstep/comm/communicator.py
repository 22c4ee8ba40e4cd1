"""The seam to the network: the collectives that the engine and the trainer use, and nothing else.

Everything above `comm` is handed a `Communicator`. There are two: `GroupCommunicator` over a torch process group, and
`SoloCommunicator` for a world of one, where each collective has nothing to do, so that one rank and many run the same lines.
A test hands the engine a third, which records, delays or fails what is asked of it.
"""

import pickle
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Its functions keep whatever default group there is when it is first imported, as the default of their arguments; torch.optim
# imports it. Imported here, before a group is made, it keeps none (test_clean_exit.py).
import torch.distributed.nn.functional
from torch._C._distributed_c10d import AllgatherOptions

from allstep.comm.channels import can_have_channel, channel_of, let_go_of_channels, opened_channel
from allstep.comm.missing import missing_ranks
from allstep.comm.ordered import OrderedSum
from allstep.comm.shm import ShmProcessGroup
from allstep.comm.watchdog import HERE, told
from allstep.errors import CollectiveError

__all__ = [
    "Communicator",
    "GroupCommunicator",
    "Pending",
    "PendingInOrder",
    "SharedSum",
    "SoloCommunicator",
    "communicator_for",
    "let_go_of_groups",
]

_COALESCE_BYTES = 25 << 20
"""Tensors are broadcast in flat messages of about this many bytes."""


_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")
"""Where in its own C++ source a library raised."""

_LIVE: "weakref.WeakSet[GroupCommunicator]" = weakref.WeakSet()


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Return when the result may be read: on the CPU at once, on a device by work queued after this call."""


class PendingInOrder(Pending, Protocol):
    """A collective of two parts."""

    def go_on(self) -> None:
        """Start the second part; where it has not been called, `wait` does. All ranks do so in the same order."""


class SharedSum(Protocol):
    """All-reduces of one tensor that all ranks have in memory that they share."""

    def own_slices(self) -> list[tuple[int, int]]:
        """By section, first and last element of the slice that this rank sums."""

    def start(
        self,
        fresh: Mapping[int, torch.Tensor] | None = None,
        scale: float | Callable[[], float] = 1.0,
        scaled: int | None = None,
        kept: object = None,
    ) -> Pending:
        """Start one.

        Args:
            fresh: section -> this rank's values of its own slice, where they do not lie in the tensor.
            scale: what to multiply sums by; a function is called when all ranks have come.
            scaled: sections to scale, the first ones; None: all.
            kept: what holds the memory, which must not be given back before the sum is done.
        """


class Communicator(ABC):
    """Collectives among `size` ranks. All ranks make the same calls in the same order."""

    rank: int
    """This rank's number in the group, 0 to size - 1."""
    size: int
    """Number of ranks in the group."""
    backend: str = "none"
    """Name of the backend that carries the collectives, as torch has it."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        """Start to sum `tensor` over ranks, in place; with `average`, where `averages_in_flight`, to average it."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy the values of rank `source` into every rank's `tensors`; returns when they may be read."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on every rank. For small things: it pickles."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def channel(self, *, at_once: bool = True) -> "Communicator":
        """Collective, the first time. The same ranks, by a line whose collectives never pair with those of this one.

        All who ask share it. Where there can be none it is this communicator itself.

        Args:
            at_once: connect the ranks now; False: when the first collective goes over it, which all have to begin alike.
        """
        return self

    @property
    def adds_in_order(self) -> bool:
        """Whether `all_reduce` adds in a tree by rank, so that what 1, 2 and 4 ranks sum has the same bits."""
        return self.size <= 2

    def all_reduce_in_order(self, tensor: torch.Tensor) -> "PendingInOrder":
        """Start to sum `tensor`, flat and contiguous, in a tree by rank, where `all_reduce` does not."""
        raise NotImplementedError

    def averages_in_flight(self, device: torch.device) -> bool:
        """Whether the backend can average tensors of `device`, and not only sum them."""
        return False

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` on every rank. For small things: it pickles."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat zeroed tensor of `numel` elements; a backend may hand out memory that it reduces without a copy."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def post_number(self, value: float) -> Callable[[], list[float]]:
        """Only where ranks share memory: tell them a number, at no wait; the function gives all ranks', when all have come."""
        raise NotImplementedError

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks share memory, so that `allocate` gives what `shared_sum` takes."""
        return False

    def shared_sum(self, tensor: torch.Tensor, bounds: Sequence[int]) -> SharedSum | None:
        """What sums a tensor without a copy, where `allocate` gave memory that all ranks share; else None.

        Args:
            tensor: contiguous, of one dimension.
            bounds: (0, ..., numel): its sections, the same on all ranks.
        """
        return None


class _Done:
    def wait(self) -> None:
        return None


class SoloCommunicator(Communicator):
    """A world of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        return _Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        return None

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None

    def averages_in_flight(self, device: torch.device) -> bool:
        return True


class GroupCommunicator(Communicator):
    """The ranks of a torch process group, on any backend, made by torch's functions or by hand.

    Errors of the backend become `CollectiveError`s that say on which rank and in what.

    Raises:
        ValueError: this rank is not one of the group.
        CollectiveError: the default group is asked for, and there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if isinstance(group, int):  # what torch's functions return on ranks that are not in the group
            raise ValueError(
                "Invalid process group specified: this rank is not one of those that it was made for. Use it on its own ranks."
            )
        # The default group is named by None and never held: gloo's threads end when the last reference goes, and one that
        # outlives the interpreter aborts the process, in a quarter of all runs (test_clean_exit.py).
        self.group = group
        carrier = self.carrier
        self.rank = carrier.rank()
        self.size = carrier.size()
        self.backend = _backend_of(carrier)
        _LIVE.add(self)

    @property
    def carrier(self) -> dist.ProcessGroup:
        """The torch group that carries the collectives. Not to be kept.

        Raises:
            CollectiveError: it is the default group, and there is none.
        """
        return self._named()

    def _named(self) -> dist.ProcessGroup:
        group = self.group or dist.group.WORLD
        if group is None:
            raise CollectiveError(
                "The default process group does not exist: nobody joined it, or it has been left or destroyed. Join it first."
            )
        return group

    def channel(self, *, at_once: bool = True) -> Communicator:
        group = self._named()
        if not can_have_channel(group):
            return self
        channel = _Channel(self)
        if at_once and channel.carrier is group:
            return self
        return channel

    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        assert not average or self.averages_in_flight(tensor.device)
        what = f"all_reduce of {tensor.numel()} {tensor.dtype}"
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        # Called on the group: torch's function, when it logs an error, does not find a group that was made by hand.
        carrier = self.carrier
        try:
            work = carrier.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)
        except RuntimeError as error:
            raise self.broken(what, error) from error
        return _Waiting(work, self, what)

    @property
    def adds_in_order(self) -> bool:
        return self.size <= 2 or self.shares_memory

    def all_reduce_in_order(self, tensor: torch.Tensor) -> PendingInOrder:
        what = f"all_reduce in order of {tensor.numel()} {tensor.dtype}"
        try:
            pending = OrderedSum(self.carrier, torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor)
        except RuntimeError as error:
            raise self.broken(what, error) from error
        return _WaitingInOrder(pending, self, what)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        if not tensors:
            return
        carrier, what = self.carrier, f"broadcast of {len(tensors)} tensors"
        with HERE.wait(self._awaited(what)):
            try:
                for same_device in _by_device(tensors):
                    dist._broadcast_coalesced(carrier, same_device, _COALESCE_BYTES, source)  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise self.broken(what, error) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        try:
            pickled = pickle.dumps(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TypeError(f"Rank {self.rank} cannot send a {type(value).__name__} to its peers: {error}") from error
        carrier, what = self.carrier, "all_gather of an object"
        with HERE.wait(self._awaited(what)):
            try:
                everyone = _all_gather_bytes(carrier, pickled)
            except RuntimeError as error:
                raise self.broken(what, error) from error
        return [pickle.loads(each) for each in everyone]

    def barrier(self) -> None:
        self.all_gather_object(None)  # torch's own barrier guesses a device where a group has several

    def _sharing(self) -> ShmProcessGroup | None:
        """What carries the collectives, where its ranks share memory. Not to be kept."""
        carrier = self.carrier
        return carrier if isinstance(carrier, ShmProcessGroup) and carrier.peers is not None else None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sharing = self._sharing()
        if sharing is None:
            return super().allocate(numel, dtype, device)
        return sharing.allocate_tensor(numel, dtype=dtype, device=device)

    @property
    def shares_memory(self) -> bool:
        return self._sharing() is not None

    def shared_sum(self, tensor: torch.Tensor, bounds: Sequence[int]) -> SharedSum | None:
        sharing = self._sharing()
        return None if sharing is None else sharing.sum_in_place(tensor, bounds=bounds)

    def post_number(self, value: float) -> Callable[[], list[float]]:
        sharing = self._sharing()
        assert sharing is not None
        return partial(self._numbers, sharing.post_number(value))

    def _numbers(self, numbers: Callable[[], list[float]]) -> list[float]:
        with HERE.wait("exchange of numbers"):
            try:
                return numbers()
            except CollectiveError as error:
                raise told(error) from error.__cause__

    def averages_in_flight(self, device: torch.device) -> bool:
        return device.type == "cuda"  # NCCL has an averaging sum; gloo does not

    def broken(self, what: str, error: BaseException) -> CollectiveError:
        """The error that tells a person that `what` broke off because of `error`."""
        if isinstance(error, CollectiveError):
            return told(error)  # of a backend that knows who is missing
        said = _SOURCE_PLACE.sub("", str(error).strip()) or type(error).__name__
        reason = said.splitlines()[0].rstrip(".")
        broke_off = f"Rank {self.rank} of {self.size}: {what} broke off: {reason}."
        if self.group is None:
            explained = told(CollectiveError(broke_off))
            if explained.late is not None:
                return explained
        missing = missing_ranks(self.group)
        who = f"Rank(s) {', '.join(map(str, missing))}" if missing else "Another rank"
        return told(
            CollectiveError(
                f"{broke_off} {who} failed, left, or did not come within the timeout; what was printed there says why."
            )
        )

    def _awaited(self, what: str) -> str:
        """What others read of this rank while it waits."""
        return what if self.group is None else f"{what}, in a group of its own"


class _Channel(GroupCommunicator):
    """The ranks of `base`, by a line of their own; made again where the group of `base` has been replaced."""

    def __init__(self, base: GroupCommunicator) -> None:
        self.group, self.rank, self.size, self.backend = base.group, base.rank, base.size, base.backend
        _LIVE.add(self)

    @property
    def carrier(self) -> dist.ProcessGroup:
        group = self._named()
        opened = opened_channel(group)
        return opened if opened is not None else channel_of(group, GroupCommunicator(self.group).all_gather_object)

    def _sharing(self) -> ShmProcessGroup | None:
        # to open it is collective, and memory is also asked for where a wrapper is copied on one rank (test_copies.py)
        opened = opened_channel(self._named())
        return opened if isinstance(opened, ShmProcessGroup) and opened.peers is not None else None

    def channel(self, *, at_once: bool = True) -> Communicator:
        return self


class _Waiting:
    """Waits for a torch Work and turns its errors into ours."""

    def __init__(self, work: Any, by: GroupCommunicator, what: str) -> None:
        self._work, self._by, self._what = work, by, what

    def wait(self) -> None:
        with HERE.wait(self._by._awaited(self._what)):
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._by.broken(self._what, error) from error


class _WaitingInOrder(_Waiting):
    """The same, for a collective of two parts."""

    def go_on(self) -> None:
        try:
            self._work.go_on()
        except RuntimeError as error:
            raise self._by.broken(self._what, error) from error


def communicator_for(group: "dist.ProcessGroup | Communicator | None") -> Communicator:
    """The communicator of `group`; of the default group where that is None; of a world of one where nobody joined one."""
    if isinstance(group, Communicator):
        return group
    if group is not None:
        return GroupCommunicator(group)
    joined = dist.is_available() and dist.is_initialized()
    return GroupCommunicator() if joined else SoloCommunicator()


def let_go_of_groups() -> None:
    """Make every communicator forget its group, so that the group's threads can end; before the interpreter does."""
    for communicator in list(_LIVE):
        communicator.group = None
    let_go_of_channels()


def _backend_of(group: dist.ProcessGroup) -> str:
    """Name of the backend of `group`, as torch has it; of those of its devices, where torch does not know the group."""
    if isinstance(group, ShmProcessGroup):
        return "shm" if group.peers is not None else "gloo"
    with suppress(ValueError):
        return str(dist.get_backend(group))
    names = dict.fromkeys(group._get_backend(device).name() for device in group._device_types)
    return ",".join(names) or group._get_backend_name()


def _all_gather_bytes(group: dist.ProcessGroup, sent: bytes) -> list[bytes]:
    """Every rank's bytes, by rank: first how many, then all of them, filled up to the longest."""
    kinds = {device.type for device in group._device_types}
    device = torch.device("cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])
    lengths = [int(length) for length in _all_gather(group, torch.tensor([len(sent)], device=device))]
    padded = torch.frombuffer(bytearray(sent.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(device)
    everyone = _all_gather(group, padded)
    return [bytes(each.cpu().numpy())[:length] for each, length in zip(everyone, lengths, strict=True)]


def _all_gather(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([gathered], [tensor], AllgatherOptions()).wait()
    return gathered


def _by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors grouped by device, in order; `_broadcast_coalesced` takes one device and contiguous memory of each dtype."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())
