"""The collectives of a `shm` group, by torch's names and arguments."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions, ReduceScatterOptions

from allstep.comm.shm.calls import DTYPES, pack
from allstep.comm.shm.hosts import AcrossHosts
from allstep.comm.shm.line import Call, Line, Number, SumInPlace
from allstep.comm.shm.peers import SMALL, Peers
from allstep.comm.shm.reduction import COMBINE
from allstep.comm.shm.small import SmallSum
from allstep.comm.shm.staged import Staged
from allstep.comm.shm.tensors import Flat, as_bytes
from allstep.comm.shm.work import ShmWork
from allstep.errors import CollectiveError

__all__ = ["Collectives"]

_SUM = dist.ReduceOp.SUM
_CPU = torch.device("cpu")
_SUPPORTED = frozenset(DTYPES)


class Collectives:
    """What goes over shared memory; tensors that cannot go there, and groups that have none, use gloo."""

    peers: Peers | None = None
    """None where all goes over gloo."""
    across: AcrossHosts | None = None
    staged: Staged
    line: Line
    _gloo: Any
    _rank: int
    _size: int
    _sums: dict[Any, SumInPlace]
    _smalls: dict[Any, SmallSum]

    def sum_in_place(self, tensor: torch.Tensor, op: Any = _SUM, bounds: Sequence[int] | None = None) -> SumInPlace | None:
        """All-reduces of a tensor that `allocate_tensor` gave, or a contiguous piece of one; None where it is another."""
        if self.peers is None or not tensor.is_contiguous():
            return None
        location = self.peers.locate(tensor)
        if location < 0:
            return None
        return SumInPlace(self.peers, self.staged, self.line, location, tensor.dtype, tensor.numel(), op, bounds)

    def post_number(self, value: float) -> Callable[[], list[float]]:
        """Tell all ranks a number; what it returns waits until all have done so, and gives them by rank."""
        return Number(self._peers(), self.line, value).values

    def _can(self, *tensors: torch.Tensor) -> bool:
        return self.peers is not None and all(map(_is_plain, tensors))

    def _do(self, call: int, body: Callable[[int, int], None], opts: Any, result: Any) -> ShmWork:
        """A staged collective: now, or where the caller does not wait, in the line.

        Args:
            call: which it is.
            body: `body(number, call)` is this rank's part, when all have come.
            opts: those of torch.
            result: its tensors.
        """
        peers, waits = self._peers(), opts is not None and not opts.asyncOp
        if waits:
            self.line.drain()
        number = peers.post(call)

        def run() -> None:
            peers.meet(number, call)
            body(number, call)
            peers.done(number)

        if waits:
            run()
            return _DONE
        started = Call(run, number)
        self.line.add(started)
        return ShmWork(result, self.line, started)

    def allreduce(self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Combine `tensors[0]` over ranks, in place; torch's join hands over a tensor alone, where `opts` is the reduction."""
        if isinstance(tensors, torch.Tensor):
            alone = dist.AllreduceOptions()
            alone.reduceOp = dist.ReduceOp(_SUM if opts is None else _op(opts))
            tensors, opts = [tensors], alone
        (tensor,) = tensors
        op = _SUM if opts is None else _op(opts.reduceOp)
        if op not in COMBINE or not self._can(tensor):
            if self.across is not None and op in COMBINE and _is_plain(tensor):
                return self._all_reduce_across(tensor, op, opts, tensors)
            return self._gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        if tensor.requires_grad:
            tensor = tensor.detach()
        if opts is not None and not opts.asyncOp:
            if self.line.is_busy:
                self.line.drain()
            if self._small_sum(tensor, op):
                return _DONE
        in_place = self._known_sum(tensor, op)
        if in_place is not None:
            return self._start_in_place(in_place, opts, tensors)

        def body(number: int, call: int) -> None:
            with Flat(tensor) as flat:
                self.staged.all_reduce(flat, op, number, call)

        return self._do(pack("all_reduce", tensor.dtype, tensor.numel(), op), body, opts, tensors)

    def _all_reduce_across(self, tensor: torch.Tensor, op: Any, opts: Any, result: Any) -> ShmWork:
        assert self.across is not None
        started = Call(self.across.start(tensor, op))
        self.line.add(started)
        if opts is not None and not opts.asyncOp:
            self.line.finish(started)
            return _DONE
        return ShmWork(result, self.line, started)

    def _small_sum(self, tensor: torch.Tensor, op: Any) -> bool:
        """Combine a small tensor at once; False, and nothing done, where it is not small."""
        key = (tensor.shape, tensor.dtype, op)
        small = self._smalls.get(key)
        if small is None:
            if tensor.numel() * tensor.element_size() > SMALL:
                return False
            _make_room(self._smalls)
            small = self._smalls[key] = SmallSum(self._peers(), self.staged, tensor.contiguous(), op)
        if tensor.is_contiguous():
            small(tensor)
        else:
            whole = tensor.contiguous()
            small(whole)
            tensor.copy_(whole)
        return True

    def _known_sum(self, tensor: torch.Tensor, op: Any) -> SumInPlace | None:
        """What sums a tensor that lies in shared memory; None where it does not."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, op)
        in_place = self._sums.get(key)
        if in_place is None and tensor.numel():
            in_place = self.sum_in_place(tensor, op)
            if in_place is not None:
                _make_room(self._sums)
                self._sums[key] = in_place
        return in_place

    def _peers(self) -> Peers:
        assert self.peers is not None
        return self.peers

    def _start_in_place(self, in_place: SumInPlace, opts: Any, result: Any) -> ShmWork:
        started = in_place.start(kept=result)
        if opts is not None and not opts.asyncOp:
            self.line.finish(started)
            return _DONE
        return ShmWork(result, self.line, started)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Combine each of `tensors` over ranks, in place."""
        if not self._can(*tensors):
            return self._gloo.allreduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions())
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        return _all_of(tensors, [self.allreduce([tensor], options) for tensor in tensors])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """`tensors[0]` of rank `opts.rootRank` to all."""
        (tensor,), root = tensors, opts.rootRank
        if not self._can(tensor):
            return self._gloo.broadcast(tensors, opts)

        def body(number: int, call: int) -> None:
            with Flat(tensor, is_written=root != self._rank) as flat:
                self.staged.broadcast(as_bytes(flat), root, number, call)

        return self._do(pack("broadcast", tensor.dtype, tensor.numel(), root=root), body, opts, tensors)

    def _gather(
        self, call: int, outputs: Sequence[torch.Tensor] | None, source: torch.Tensor, opts: Any, result: Any
    ) -> ShmWork:
        def body(number: int, call: int) -> None:
            with ExitStack() as stack:
                flat = stack.enter_context(Flat(source, is_written=False))
                wanted = None if outputs is None else [as_bytes(stack.enter_context(Flat(each))) for each in outputs]
                self.staged.gather(wanted, as_bytes(flat), number, call)

        return self._do(call, body, opts, result)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Every rank's `inputs[0]` into `outputs[0]`, by rank."""
        (wanted,), (source,) = outputs, inputs
        if not self._can(source, *wanted) or _differ(source, wanted):
            return self._gloo.allgather(outputs, inputs, opts or AllgatherOptions())
        return self._gather(pack("all_gather", source.dtype, source.numel()), wanted, source, opts, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        """Every rank's `source` into `output`, one behind the other."""
        if not self._can(source, output) or output.dtype != source.dtype or output.numel() != source.numel() * self._size:
            return self._gloo._allgather_base(output, source, opts or AllgatherOptions())

        def body(number: int, call: int) -> None:
            with Flat(output) as flat, Flat(source, is_written=False) as given:
                self.staged.gather(_equal_parts(as_bytes(flat), self._size), as_bytes(given), number, call)

        return self._do(pack("all_gather", source.dtype, source.numel()), body, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """`all_gather_single` of several."""
        return _all_of(outputs, [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        """Every rank's `inputs[0]` into `outputs[0]`, by rank, of rank `opts.rootRank`."""
        (source,), wanted = inputs, outputs[0] if outputs else None
        if not self._can(source, *(wanted or ())) or _differ(source, wanted or ()):
            return self._gloo.gather(outputs, inputs, opts)
        return self._gather(pack("gather", source.dtype, source.numel(), root=opts.rootRank), wanted, source, opts, outputs)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """`tensors[0]` of all ranks, combined, into that of rank `opts.rootRank`."""
        (tensor,), op, root = tensors, _op(opts.reduceOp), opts.rootRank
        if op not in COMBINE or not self._can(tensor):
            return self._gloo.reduce(tensors, opts)

        def body(number: int, call: int) -> None:
            with Flat(tensor, is_written=root == self._rank) as flat:
                self.staged.reduce(flat, op, root, number, call)

        return self._do(pack("reduce", tensor.dtype, tensor.numel(), op, root), body, opts, tensors)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        """`inputs[0][r]` of rank `opts.rootRank` into `outputs[0]` of rank r."""
        (output,), given = outputs, inputs[0] if inputs else None
        if not self._can(output, *(given or ())) or _differ(output, given or ()):
            return self._gloo.scatter(outputs, inputs, opts)
        root = opts.rootRank

        def body(number: int, call: int) -> None:
            with ExitStack() as stack:
                flat = stack.enter_context(Flat(output))
                pieces = None if given is None else [stack.enter_context(Flat(each, is_written=False)) for each in given]
                self.staged.scatter(flat, pieces, None, root, number, call)

        return self._do(pack("scatter", output.dtype, output.numel(), root=root), body, opts, outputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        """`inputs[0][r]` of all ranks, combined, into `outputs[0]` of rank r."""
        (output,), (given,), op = outputs, inputs, _SUM if opts is None else _op(opts.reduceOp)
        if op not in COMBINE or not self._can(output, *given) or _differ(output, given):
            return self._gloo.reduce_scatter(outputs, inputs, opts or ReduceScatterOptions())

        def body(number: int, call: int) -> None:
            with ExitStack() as stack:
                flat = stack.enter_context(Flat(output))
                pieces = [stack.enter_context(Flat(each, is_written=False)) for each in given]
                self.staged.scatter(flat, pieces, op, None, number, call)

        return self._do(pack("reduce_scatter", output.dtype, output.numel(), op), body, opts, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        """The r-th part of `source` of all ranks, combined, into `output` of rank r."""
        op = _SUM if opts is None else _op(opts.reduceOp)
        fits = output.dtype == source.dtype and source.numel() == output.numel() * self._size
        if op not in COMBINE or not self._can(output, source) or not fits:
            return self._gloo._reduce_scatter_base(output, source, opts or ReduceScatterOptions())

        def body(number: int, call: int) -> None:
            with Flat(output) as flat, Flat(source, is_written=False) as given:
                self.staged.scatter(flat, _equal_parts(given, self._size), op, None, number, call)

        return self._do(pack("reduce_scatter", output.dtype, output.numel(), op), body, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """`reduce_scatter_single` of several."""
        return _all_of(outputs, [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """`inputs[r]` to rank r, and `outputs[r]` from it; their sizes may differ."""
        if not self._can(*outputs, *inputs):
            return self._gloo.alltoall(outputs, inputs, opts or AllToAllOptions())

        def body(number: int, call: int) -> None:
            with ExitStack() as stack:
                wanted = [as_bytes(stack.enter_context(Flat(each))) for each in outputs]
                given = [as_bytes(stack.enter_context(Flat(each, is_written=False))) for each in inputs]
                self._all_to_all(wanted, given, number, call)

        return self._do(pack("all_to_all", outputs[0].dtype, 0), body, opts, outputs)

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int, call: int) -> None:
        wrong = self.staged.all_to_all(outputs, inputs, number, call)
        if wrong:
            self._peers().done(number)
            raise CollectiveError(
                f"Rank {self._rank} of {self._size}: all_to_all: {wrong}. What a rank sends must be what the other expects."
            )

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Parts of `source` to all ranks, and of `output` from them; without splits, equal parts along the first dimension."""
        if not self._can(output, source):
            return self._gloo.alltoall_base(output, source, output_splits, input_splits, opts or AllToAllOptions())

        def body(number: int, call: int) -> None:
            with Flat(output) as wanted, Flat(source, is_written=False) as given:
                into = _parts(wanted, output, output_splits, self._size)
                parts = _parts(given, source, input_splits, self._size)
                self._all_to_all(list(map(as_bytes, into)), list(map(as_bytes, parts)), number, call)

        return self._do(pack("all_to_all", output.dtype, 0), body, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Return when all ranks have come here."""
        if self.peers is None:
            return self._gloo.barrier(opts or BarrierOptions())

        return self._do(pack("barrier", torch.float32, 0), lambda *_: None, opts, [])


_DONE = ShmWork(None)


def _make_room(cache: dict[Any, Any]) -> None:
    if len(cache) >= 256:
        cache.clear()


def _op(op: Any) -> Any:
    """The kind of a reduction, which can be looked up."""
    return getattr(op, "op", op)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _SUPPORTED and tensor.layout is torch.strided and tensor.device == _CPU


def _differ(one: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether some tensor has another dtype or number of elements: gloo then says what is wrong."""
    return any(other.dtype != one.dtype or other.numel() != one.numel() for other in others)


def _all_of(result: list[torch.Tensor], works: list[Any]) -> Any:
    """One work for several: they are in the line, where the last one done means that all are; gloo's are waited for."""
    for work in works[:-1]:
        if not isinstance(work, ShmWork):
            work.wait()
    return works[-1] if works else ShmWork(result)


def _equal_parts(flat: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    return flat.split(flat.numel() // size) if flat.numel() else [flat] * size


def _parts(flat: torch.Tensor, shaped: torch.Tensor, splits: Sequence[int], size: int) -> Sequence[torch.Tensor]:
    """`flat` cut for the ranks: by `splits` along the first dimension of `shaped`, or into equal parts."""
    if not splits:
        return _equal_parts(flat, size)
    row = math.prod(shaped.shape[1:])
    return list(flat.split([split * row for split in splits]))
