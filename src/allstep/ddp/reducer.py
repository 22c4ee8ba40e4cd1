"""One backward: gradients come in, full buckets go out in fixed order, and at the end every rank holds the mean.

    forward ──arm──> ARMED ──first gradient──> COLLECTING ──end of backward: finish──> ARMED
    forward under no_sync ──disarm──> LOCAL

A hook on each parameter counts down its bucket. Buckets are launched strictly in layout order, whatever the order in which
they fill, so that ranks can never pair different buckets. What no gradient came for is closed at the end of backward.

Behind the last bucket's gradients ride, summed over ranks by the same collective: which parameters were used, one status a
rank, and two numbers of the caller (a weight and one more). So a rank that ran out of data, that used other parameters, or
that failed, is known to all at no collective more.
"""

import enum
import operator
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from allstep.comm.communicator import Communicator, Pending
from allstep.ddp.alike import Changes, first_difference_in_training, signature
from allstep.ddp.buffers import GradientStorage, WideTransfer
from allstep.ddp.comm_hooks import CommHook, GradBucket, HookedTransfer
from allstep.ddp.layout import Bucket, BucketCaps, BucketLayout, ParameterSpec, plan_layout
from allstep.ddp.second_order import refusing_derivatives
from allstep.ddp.sparse import average_sparse_gradients
from allstep.ddp.unused import reached_from, unused_message
from allstep.errors import CollectiveError, RankFailedError, ReplicaError, UnusedParametersError

__all__ = ["Phase", "Reducer", "Totals"]

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Phase(enum.Enum):
    """Where the reducer stands."""

    LOCAL = "the last forward ran under no_sync: gradients stay on this rank"
    ARMED = "the next backward will be reduced; no gradient of it has come yet"
    COLLECTING = "a backward runs: gradients come in, full buckets are on their way"


class _Status(enum.IntEnum):
    """What a rank says of itself in its rider."""

    WELL = 0
    LACKS_GRADIENTS = 1
    FAILED = 2


@dataclass(frozen=True)
class Totals:
    """What the last reduction summed over ranks beside gradients (0-dim float32 tensors, on the gradients' device)."""

    weight: torch.Tensor
    carried: torch.Tensor


class Reducer:
    """Averages the gradients of `parameters` over the ranks of `communicator`, overlapped with backward.

    Args:
        parameters: the trainable parameters, in registration order; the same on every rank.
        specs: what they are, in the same order.
        communicator: the ranks to average over.
        caps: how large buckets may be.
        as_views: leave gradients as views of the flat storage; otherwise copy them back into tensors of their own.
        strict: a parameter without a gradient is an error; otherwise a rank without one takes part with zeros.
        sparse: indices of parameters whose gradients are sparse; those lie in no bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        communicator: Communicator,
        caps: BucketCaps,
        *,
        as_views: bool,
        strict: bool,
        sparse: Collection[int] = (),
    ) -> None:
        self.parameters = list(parameters)
        self._names = [spec.name for spec in specs]
        self._communicator = communicator
        self._as_views = as_views
        self.strict = strict
        self._specs, self._caps = list(specs), caps
        count = len(self.parameters)
        self.layout: BucketLayout
        """Which gradient lies where in which bucket."""
        self.storage: GradientStorage
        """The memory that the layout describes."""
        self.sparse = frozenset(sparse)
        """Parameters whose gradients lie in no bucket."""
        self._lay_out(range(count - 1, -1, -1))  # gradients usually come in reverse registration order
        self._came: list[int] | None = []  # parameters in the order of their gradients, until buckets are rebuilt

        self.phase = Phase.ARMED
        self.reductions = 0
        """Reductions done since the start, each of every bucket once."""
        self.bytes_reduced = 0
        """Of all buckets since the start."""
        self.untouched: list[int] = []
        """Parameters that got no gradient on this rank in its last backward that was reduced."""
        self.under_no_sync = False
        """Whether the wrapper's `no_sync` is entered."""
        self._has_warned = False
        self.changes = Changes()
        """How the model has changed since its parameters were laid out; the wrapper keeps it up to date."""
        self.is_outdated = False
        """Whether all ranks have changed alike, so that the wrapper has to make another reducer."""
        self.hook: tuple[Any, CommHook] | None = None
        """(state, function) that averages buckets in place of an all-reduce."""
        self.totals: Totals | None = None
        """Sums over ranks of the last reduction; None before the first."""

        # of the current window: everything since the last reduction
        self._touched = bytearray(count)  # parameters that got a gradient on this rank
        self._weight: tuple[float, float | torch.Tensor] | None = None  # the caller's numbers; None divides by ranks
        self._aside: tuple[list[torch.Tensor | None], bytearray] | None = None  # gradients and `_touched` of before `join`
        # of the current backward
        self._is_local = False  # the backward of a forward under no_sync runs
        self._forwards = 0  # all since the start whose backward is to be reduced
        self._unanswered: set[int] = set()  # those of them since the last reduction whose outputs no backward has reached
        self._is_armed = False  # a forward whose backward is to be reduced has run
        self._unreached: set[int] = set()  # parameters that the graph does not reach
        self._roots: Sequence[Any] = ()  # graph nodes of the outputs
        self._backward = -1  # autograd's number of it
        self._has_graph = False  # backward(create_graph=True)
        self._lacks: list[int] = []  # parameters that were promised a gradient and got none
        self._pending: list[Pending] = []
        self._unread: tuple[torch.Tensor, torch.Event] | None = None  # statuses on a device, and when they are there
        self._kept: dict[int, torch.Tensor] = {}  # gradients left from before, of parameters this rank did not use
        self._excused = False  # this rank ran no backward, and said so
        self._futures: list[Any] = []  # of hooks on buffers
        self._failure: str | None = None  # why this rank cannot bring its gradients
        self._reset()
        self._nodes: list[Any] = []  # where gradients of parameters are accumulated
        self._hooks: list[Any] = []
        for index, parameter in enumerate(self.parameters):
            self._listen_to(index, parameter)

    def _listen_to(self, index: int, parameter: torch.nn.Parameter) -> None:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # one that is frozen now may be thawed later
        self._nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)
        # Hooks know the reducer weakly, or parameters would keep it alive and at work when its wrapper is long gone
        # (test_wrapping_again.py).
        hook = partial(_on_gradient, weakref.ref(self), index)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(trained)

    def _lay_out(self, order: Sequence[int]) -> None:
        """Plan buckets for gradients that come in `order`, and make their memory."""
        count, size = len(self.parameters), self._communicator.size
        self._order = [index for index in order if index not in self.sparse]
        self.layout = plan_layout(self._specs, self._order, self._caps, riders=count + 3 * size + 2)
        self.storage = GradientStorage(self.layout, self.parameters, self._communicator.allocate)
        self._bucket_of = {slot.parameter: bucket.index for bucket in self.layout.buckets for slot in bucket.slots}
        self._bucket_of |= dict.fromkeys(self.sparse, len(self.layout.buckets) - 1)  # whose riders tell of all parameters
        riders = self.storage.riders
        self._used, self._said, self._numbers = riders[:count], riders[count:-2], riders[-2:]
        self._on_cpu = riders.device.type == "cpu"
        self.launched: list[int] = [0] * len(self.layout.buckets)
        """Per bucket, collectives started since the buckets were laid out."""
        self._await_all()

    def _await_all(self) -> None:
        """No gradient of the coming backward is there yet."""
        self._ready = bytearray(len(self.parameters))  # parameters whose gradient is final
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]  # per bucket, parameters that are not ready
        self._missing[-1] += len(self.sparse)
        if not self._missing[-1]:
            self._missing[-1] = 1  # riders without gradients leave at the end of backward
        self._next = 0  # first bucket that is not launched

    def _rebuild_once(self) -> None:
        """Collective, after the first reduction: lay buckets out in the order in which rank 0's gradients really came."""
        if self._came is None or not self.reductions or self.phase is Phase.COLLECTING or self._communicator.size == 1:
            return
        came, self._came = self._came, None
        order = self._communicator.broadcast_object(list(dict.fromkeys([*came, *self._order])))
        if order == self._order:
            return
        before = self.storage.views
        self._lay_out(order)
        for parameter, old, view in zip(self.parameters, before, self.storage.views, strict=True):
            if parameter.grad is old:
                parameter.grad = view.copy_(old)

    # ---- what the wrapper calls around a forward

    def arm(self, unreached: Collection[int] = (), roots: Sequence[Any] = (), *, in_training: bool = True) -> int:
        """Reduce the next backward; returns the number of the forward that it belongs to.

        Args:
            unreached: parameters that get no gradient in it and need not be waited for.
            roots: the graph nodes of the outputs: an error can then say which parameters the forward used.
            in_training: a backward has to follow on all ranks or on none.
        """
        self.raise_unread()
        self._rebuild_once()
        if self.phase is Phase.COLLECTING:
            self.abandon("its last backward did not come to its end")
        self.phase = Phase.ARMED
        frozen = [index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad]
        known = {*unreached, *frozen}
        # several forwards before one backward: what one of them reaches will get a gradient
        self._unreached = known & self._unreached if self._is_armed else known
        self._is_armed = True
        self._roots = roots if self.strict else ()
        return self.count_forward(in_training and bool(roots))

    def count_forward(self, needs_backward: bool) -> int:
        """Number a forward; one that needs a backward and gets none is told to all ranks, as others may wait in theirs."""
        self._forwards += 1
        if needs_backward:
            self._unanswered.add(self._forwards)
        return self._forwards

    def disarm(self) -> None:
        """Keep the gradients of the next backward on this rank."""
        if self.phase is Phase.COLLECTING:
            self.abandon("its last backward did not come to its end")
        self.phase, self._is_local = Phase.LOCAL, False

    def begin_local(self, *_: object) -> None:
        """A backward has come to an output of a forward under no_sync; one that never does is of another forward."""
        if not self._is_local:
            self._is_local = True
            Variable._execution_engine.queue_callback(self._end_local)

    def _end_local(self) -> None:
        self._is_local = False

    def begin(self, *_: object) -> None:
        """A backward has started; called inside it, so that `finish` runs when autograd has done all of it."""
        if self.phase is Phase.COLLECTING:
            return
        self._warn_of_no_sync()
        self.phase = Phase.COLLECTING  # also from LOCAL: a forward under no_sync came after the one whose backward this is
        self._backward = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self.finish)
        for index in self._unreached:
            self._mark_ready(index)

    def _warn_of_no_sync(self) -> None:
        if self.under_no_sync and self.phase is Phase.ARMED and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Rank {self._communicator.rank}: this backward runs under no_sync(), but its forward did not, so its "
                f"gradients are reduced all the same, as with torch. Put the forward inside `with model.no_sync():` too.",
                stacklevel=2,
            )

    def begin_at_output(self, forward: int, *_: object) -> None:
        """A backward has come to an output of that forward, the outermost one where backwards are nested.

        `torch.autograd.grad` comes there too, for a gradient penalty, but leaves nothing in `.grad` to be reduced.
        """
        self._unanswered.discard(forward)
        if self.phase is Phase.COLLECTING:
            return
        new = [torch.autograd.graph.get_gradient_edge(parameter).node for _, parameter in self.changes.new]
        try:
            accumulates = any(map(torch._C._will_engine_execute_node, (*self._nodes, *new)))
        except RuntimeError:  # what it says where autograd.grad was asked for a parameter
            accumulates = False
        if accumulates:
            self.begin()

    # ---- what a training loop calls

    def weigh(self, weight: float, carried: float | torch.Tensor = 0.0) -> None:
        """Divide the next reduction by the sum over ranks of `weight` instead of by their number.

        Gradients must then be those of a *sum* with that weight. `carried` is one more number to sum over ranks; both sums
        are in `totals` afterwards.
        """
        self._weight = (weight, carried)

    def take_part(self, *, empty: bool = False) -> None:
        """Collective. Reduce now, without a backward, whatever gradients this rank holds: possibly none at all.

        With `empty` none: what it holds is set aside until `bring_back`, and the mean lies in the gradients.
        """
        if empty:
            self.raise_unread()
            self._set_aside()
        self._rebuild_once()
        self.phase = Phase.COLLECTING
        self._excused = True
        self.finish()

    def abandon(self, reason: str) -> None:
        """Collective. Close this rank's part of a reduction that it cannot bring to its end, and tell the others why.

        Where the others weigh theirs, `weigh` this one too, by zero.

        Raises:
            RankFailedError: some other rank did bring its gradients; where all abandoned alike, all may go on.
        """
        self._failure = reason
        self.take_part()

    def _set_aside(self) -> None:
        if self._aside is None:
            views = self.storage.views
            held = [p.grad.clone() if p.grad is view else p.grad for p, view in zip(self.parameters, views, strict=True)]
            self._aside = held, self._touched
        self._touched = bytearray(len(self._touched))
        for parameter in self.parameters:
            parameter.grad = None

    def bring_back(self) -> None:
        """Give the parameters the gradients that they had before this rank took part empty."""
        if self._aside is not None:
            (held, self._touched), self._aside = self._aside, None
            for parameter, gradient in zip(self.parameters, held, strict=True):
                parameter.grad = gradient

    def wait_for(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Also wait for `futures` at the end of the next backward that is reduced."""
        self._futures.extend(futures)

    # ---- inside a backward

    def _on_gradient(self, index: int) -> None:
        self._touched[index] = 1
        if self.phase is Phase.LOCAL and (self.under_no_sync or self._is_local):
            return
        if self.phase is not Phase.COLLECTING:
            self.begin()
        if self._came is not None and not self.reductions:
            self._came.append(index)
        if torch._C._current_graph_task_id() != self._backward and not self._ready[index]:
            return  # from a backward inside of this one (reentrant checkpointing): there may come more, until the end of all
        if self._ready[index]:
            if self._bucket_of[index] < self._next:
                if index in self._unreached:
                    raise UnusedParametersError(self._unexpected_message(index))
                raise RuntimeError(
                    f"Rank {self._communicator.rank}: {self._names[index]!r} got a second gradient in one backward, after "
                    f"its bucket had been sent. It is used both inside and outside of checkpointed blocks: use non-reentrant "
                    f"checkpointing (use_reentrant=False). The optimizer has not moved."
                )
            return
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        self._ready[index] = 1
        self._missing[self._bucket_of[index]] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._launch()

    @torch.no_grad()  # backward(create_graph=True) has gradients enabled
    def _launch(self) -> None:
        bucket = self.layout.buckets[self._next]
        last = bucket.index == len(self.layout.buckets) - 1
        average = self._weight is None and self._communicator.averages_in_flight(self.storage.riders.device)
        self._fill(bucket)
        self.bytes_reduced += bucket.nbytes
        if self.hook is not None:
            self._launch_hooked(bucket, last)
            return
        gradients = self.storage.gradients[bucket.index]
        divide_by = 1 if self._weight is not None or average else self._communicator.size
        if self._on_cpu and self._communicator.size > 2 and gradients.dtype in (torch.float16, torch.bfloat16):
            self._next += 1
            self.launched[bucket.index] += 1
            self._pending.append(WideTransfer(self._communicator, gradients, divide_by))
            return
        if divide_by != 1:
            gradients.mul_(1.0 / divide_by)  # before the sum, so that it stays in the range of fp16
        if last:
            self._write_riders(1.0 * self._communicator.size if average else 1.0)
        self._next += 1
        self.launched[bucket.index] += 1
        self._pending.append(self._communicator.all_reduce(self.storage.buckets[bucket.index], average=average))

    def _launch_hooked(self, bucket: Bucket, last: bool) -> None:
        """Let the hook average the gradients; riders, which are none, travel by themselves."""
        assert self.hook is not None
        state, hook = self.hook
        if bucket.slots:
            indices = [slot.parameter for slot in bucket.slots]
            flat = self.storage.gradients[bucket.index]
            seen = GradBucket(
                bucket.index,
                last or not self.layout.buckets[bucket.index + 1].slots,
                flat,
                [self.storage.views[index] for index in indices],
                [self.parameters[index] for index in indices],
            )
            self._pending.append(HookedTransfer(hook(state, seen), flat))
        if self._on_cpu:
            # Hooks that start collectives from the future of another (PowerSGD) let gloo's threads pair those of different
            # buckets: torch's own class aborts there. One bucket at a time is always right (test_comm_hooks.py).
            self._wait_for_all()
        self._next += 1
        self.launched[bucket.index] += 1
        if last:
            self._write_riders(1.0)
            self._pending.append(self._communicator.all_reduce(self.storage.riders))

    def _fill(self, bucket: Bucket) -> None:
        """Bring the gradients of a bucket into flat storage."""
        views, fresh = [], []
        for slot in bucket.slots:
            parameter, view = self.parameters[slot.parameter], self.storage.views[slot.parameter]
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"The gradient of {slot.name!r} is sparse, but it belongs to no Embedding or EmbeddingBag with "
                        f"sparse=True, by which it would have been known. Use one of these, or sparse=False."
                    )
                views.append(view)
                fresh.append(gradient)
                self._has_graph |= gradient.requires_grad
                if not self._touched[slot.parameter]:
                    self._kept[slot.parameter] = gradient
                if self._as_views:
                    parameter.grad = view
            elif not self._touched[slot.parameter]:
                self._kept[slot.parameter] = view.clone()
        if views:
            torch._foreach_copy_(views, fresh)

    def _write_riders(self, scale: float) -> None:
        if self.strict and not self._excused and not all(self._touched):
            excused = self._unreached | self.changes.gone  # frozen when the forward ran, or not there any more
            self._lacks = [
                index
                for index, parameter in enumerate(self.parameters)
                if parameter.requires_grad and not self._touched[index] and index not in excused
            ]
        said = torch.zeros(3, self._communicator.size)
        said[0, self._communicator.rank] = (
            _Status.FAILED if self._failure else _Status.LACKS_GRADIENTS if self._lacks else _Status.WELL
        )
        said[1, self._communicator.rank] = 0 if self._excused else 1 + len(self._unanswered)
        said[2, self._communicator.rank] = signature(map(_REQUIRES_GRAD, self.parameters), self.changes)
        weight, carried = self._weight or (1.0, 0.0)
        self._used.copy_(torch.frombuffer(self._touched, dtype=torch.uint8))
        self._said.copy_(said.view(-1))
        self._numbers[0] = weight
        self._numbers[1] = carried
        if scale != 1.0:
            self.storage.riders.mul_(scale)

    # ---- at the end of a backward

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what is left, wait for all, and leave the mean in the parameters' gradients.

        Raises:
            UnusedParametersError: `strict`, and some rank had no gradient for some parameter.
            RankFailedError: another rank failed and took part without its gradients.
            CollectiveError: a peer is gone, or the group's timeout ran out.
        """
        if self.phase is not Phase.COLLECTING:
            return
        try:
            while self._next < len(self.layout.buckets):
                self._launch()
            self._wait_for_all()
            numbers = self._numbers.clone()
            self.totals = Totals(numbers[0], numbers[1])
            if self._weight is not None:
                # a hook has divided by ranks already
                scale = torch.where(numbers[0] > 0, (self._communicator.size if self.hook else 1.0) / numbers[0], 0.0)
                for gradients in self.storage.gradients:
                    gradients.mul_(scale)
            self._average_sparse(numbers[0])
            if self._failure is None:
                self._hand_out()
                if self._has_graph:
                    for parameter in self.parameters:
                        if parameter.grad is not None:
                            parameter.grad = refusing_derivatives(parameter.grad, parameter)
            else:
                self._drop_gradients()
            self._raise_what_riders_say()
            self._follow_changes()
        except CollectiveError as error:
            raise CollectiveError(f"{error} It was in reduction {self.reductions}, counted from 0.") from error
        finally:
            self.reductions += 1
            self._reset()

    def _wait_for_all(self) -> None:
        for pending in (*self._pending, *self._futures):
            pending.wait()
        self._pending.clear()
        self._futures.clear()

    def _hand_out(self) -> None:
        """Make each gradient the mean; of a parameter that no rank used, leave what was there before."""
        untouched = [] if all(self._touched) else [index for index, touched in enumerate(self._touched) if not touched]
        if not self._excused:
            self.untouched = untouched
        if self._as_views and not untouched:
            return  # filling the buckets has made every gradient a view
        counts = self._used[untouched].tolist() if untouched else []
        untouched_anywhere = {index for index, count in zip(untouched, counts, strict=True) if not count}
        for index in untouched_anywhere & self._kept.keys():
            self.storage.views[index].copy_(self._kept[index])
        own, reduced = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self.storage.views, strict=True)):
            if index in untouched_anywhere or parameter.grad is view or index in self.sparse:
                continue
            if self._as_views:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                own.append(parameter.grad)
                reduced.append(view)
        if own:
            torch._foreach_copy_([gradient.detach() for gradient in own], reduced)

    def _drop_gradients(self) -> None:
        """Of an abandoned backward nothing may be left for the next one to add to (test_reports_failures.py)."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.storage.views, strict=True)):
            if parameter.grad is not None and self._touched[index]:
                parameter.grad.zero_()
            elif index in self._kept and parameter.grad is view:
                view.copy_(self._kept[index])

    def _average_sparse(self, total_weight: torch.Tensor) -> None:
        if not self.sparse:
            return
        used = self._used.tolist()
        scale: float | torch.Tensor = 1.0 / self._communicator.size
        if self._weight is not None:
            scale = torch.where(total_weight > 0, 1.0 / total_weight, 0.0)
        parameters = [self.parameters[index] for index in sorted(self.sparse) if round(used[index])]
        average_sparse_gradients(self._communicator, parameters, scale)

    def _follow_changes(self) -> None:
        """Collective, where all ranks have changed their models alike: bring the gradients of new parameters together."""
        if not self.changes:
            return
        self.is_outdated = True
        if not self.changes.new:
            return
        parameters = [parameter for _, parameter in self.changes.new]
        specs = [ParameterSpec.of(name, parameter) for name, parameter in self.changes.new]
        late = Reducer(parameters, specs, self._communicator, self._caps, as_views=False, strict=self.strict)
        late._touched = bytearray(parameter.grad is not None for parameter in parameters)
        late._weight, late._excused, late.phase = self._weight, self._excused, Phase.COLLECTING
        try:
            late.finish()
        finally:
            late.remove_hooks()

    def take_over(self, other: "Reducer") -> None:
        """Go on counting where `other` ends, which no longer fits the model."""
        self.reductions, self.totals, self.hook = other.reductions, other.totals, other.hook
        self.bytes_reduced = other.bytes_reduced
        self.untouched, self.under_no_sync, self._has_warned = [], other.under_no_sync, other._has_warned
        self._came, self._forwards = None, other._forwards
        other.remove_hooks()

    def _raise_what_riders_say(self) -> None:
        by_all = all(self._touched) and self._failure is None and not self.changes
        if not self._on_cpu and self._weight is None and by_all:
            # Reading now would make the host wait for the whole backward; a copy is read at the next forward.
            self._unread = self._said.clone(), torch.Event(self._said.device)
            self._unread[1].record()
            return
        self._raise_for(self._said)

    def raise_unread(self) -> None:
        """What the last reduction said, where nobody has read it yet."""
        if self._unread is not None:
            (said, written), self._unread = self._unread, None
            written.synchronize()
            self._raise_for(said)

    def _raise_for(self, said: torch.Tensor) -> None:
        statuses, forwards, signatures = ([round(number) for number in row] for row in said.view(3, -1).tolist())
        failed = [rank for rank, status in enumerate(statuses) if status == _Status.FAILED]
        if failed and len(failed) < len(statuses):
            words = self._communicator.all_gather_object(self._failure)
            told = "; ".join(f"rank {rank}: {words[rank]}" for rank in failed)
            raise RankFailedError(f"Rank {self._communicator.rank} stops because another rank failed: {told}")
        if len(set(filter(None, signatures))) > 1:
            states = self._communicator.all_gather_object(self._states())
            raise ReplicaError(f"The ranks do not train the same parameters: {first_difference_in_training(states)}")
        least = min(filter(None, forwards), default=0)  # a rank that ran none says 0
        skipped = [rank for rank, number in enumerate(forwards) if number > least]
        if skipped and least:
            raise RankFailedError(self._skipped_message(skipped))
        if _Status.LACKS_GRADIENTS in statuses:
            raise UnusedParametersError(unused_message(self._communicator.all_gather_object(self._lacking())))

    def _states(self) -> dict[str, str]:
        """Name of each parameter -> whether this rank trains it."""
        states = {
            name: "not there" if index in self.changes.gone else "trained" if parameter.requires_grad else "frozen"
            for index, (name, parameter) in enumerate(zip(self._names, self.parameters, strict=True))
        }
        return {**states, **self.changes.described()}

    def _skipped_message(self, ranks: list[int]) -> str:
        number = self.reductions - (self.phase is not Phase.COLLECTING)
        return (
            f"Rank {self._communicator.rank} stops in reduction {number}, counted from 0: before it, rank(s) "
            f"{', '.join(map(str, ranks))} ran a forward that no backward followed, and the others did not. Where a batch is "
            f"skipped, all ranks have to skip: ask allstep.all_ranks_agree first. A forward that is only looked at belongs "
            f"under torch.no_grad()."
        )

    def _lacking(self) -> dict[str, bool]:
        """The parameters that lack a gradient here; True where the forward used them."""
        if not self._lacks:
            return {}
        reached = reached_from(self._roots)
        return {self._names[index]: id(self.parameters[index]) in reached for index in self._lacks}

    def _unexpected_message(self, index: int) -> str:
        return (
            f"Rank {self._communicator.rank}: {self._names[index]!r} got a gradient that was not expected, after its bucket "
            f"had been sent. It was frozen when forward ran, and no more in backward; or, with static_graph=True, the first "
            f"backward did not use it, and every backward has to use the same parameters; or, with "
            f"find_unused_parameters=True, an object that forward returns hides tensors: return them in tuples, lists, dicts "
            f"or dataclasses, or set find_unused_parameters=None. The optimizer has not moved."
        )

    def _reset(self) -> None:
        """Ready for the next window; after an error too, so that the next backward is not disturbed by this one."""
        self._touched = bytearray(len(self._touched))
        self._await_all()
        self._pending = []
        self._kept = {}
        self._is_armed = False
        self._unanswered = set()
        self._unreached = set()
        self._roots = ()
        self._has_graph = False
        self._lacks = []
        self._weight = None
        self._excused = False
        self._failure = None
        self.phase = Phase.ARMED

    def remove_hooks(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()


def _on_gradient(reducer: "weakref.ref[Reducer]", index: int, parameter: torch.Tensor) -> None:
    living = reducer()
    if living is not None:
        living._on_gradient(index)
