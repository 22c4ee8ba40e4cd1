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
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from allstep.comm.communicator import Communicator, Pending
from allstep.ddp.buffers import GradientStorage
from allstep.ddp.comm_hooks import CommHook, GradBucket, HookedTransfer
from allstep.ddp.layout import Bucket, BucketCaps, BucketLayout, ParameterSpec, plan_layout
from allstep.errors import RankFailedError, UnusedParametersError

__all__ = ["Phase", "Reducer", "Totals"]


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
    ) -> None:
        self.parameters = list(parameters)
        self._names = [spec.name for spec in specs]
        self._nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self._communicator = communicator
        self._as_views = as_views
        self.strict = strict
        self._specs, self._caps = list(specs), caps
        count = len(self.parameters)
        self.layout: BucketLayout
        """Which gradient lies where in which bucket."""
        self.storage: GradientStorage
        """The memory that the layout describes."""
        self._lay_out(range(count - 1, -1, -1))  # gradients usually come in reverse registration order
        self._came: list[int] | None = []  # parameters in the order of their gradients, until buckets are rebuilt

        self.phase = Phase.ARMED
        self.reductions = 0
        """Reductions done since the start, each of every bucket once."""
        self.untouched: list[int] = []
        """Parameters that got no gradient on this rank in its last backward that was reduced."""
        self.under_no_sync = False
        """Whether the wrapper's `no_sync` is entered."""
        self._has_warned = False
        self.hook: tuple[Any, CommHook] | None = None
        """(state, function) that averages buckets in place of an all-reduce."""
        self.totals: Totals | None = None
        """Sums over ranks of the last reduction; None before the first."""

        # of the current window: everything since the last reduction
        self._touched = bytearray(count)  # parameters that got a gradient on this rank
        self._weight: tuple[float, float | torch.Tensor] | None = None  # the caller's numbers; None divides by ranks
        # of the current backward
        self._unreached: list[int] = []  # parameters that the graph does not reach
        self._pending: list[Pending] = []
        self._unread: tuple[torch.Tensor, torch.Event] | None = None  # statuses on a device, and when they are there
        self._kept: dict[int, torch.Tensor] = {}  # gradients left from before, of parameters this rank did not use
        self._excused = False  # this rank ran no backward, and said so
        self._futures: list[Any] = []  # of hooks on buffers
        self._failure: str | None = None  # why this rank cannot bring its gradients
        self._reset()
        # Hooks know the reducer weakly, or parameters would keep it alive and at work when its wrapper is long gone
        # (test_wrapping_again.py).
        itself = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, itself, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _lay_out(self, order: Sequence[int]) -> None:
        """Plan buckets for gradients that come in `order`, and make their memory."""
        count, size = len(self.parameters), self._communicator.size
        self._order = list(order)
        self.layout = plan_layout(self._specs, self._order, self._caps, riders=count + size + 2)
        self.storage = GradientStorage(self.layout, self.parameters, self._communicator.allocate)
        self._bucket_of = {slot.parameter: bucket.index for bucket in self.layout.buckets for slot in bucket.slots}
        riders = self.storage.riders
        self._used, self._statuses, self._numbers = riders[:count], riders[count : count + size], riders[count + size :]
        self._on_cpu = riders.device.type == "cpu"
        self.launched: list[int] = [0] * len(self.layout.buckets)
        """Per bucket, collectives started since the buckets were laid out."""
        self._await_all()

    def _await_all(self) -> None:
        """No gradient of the coming backward is there yet."""
        self._ready = bytearray(len(self.parameters))  # parameters whose gradient is final
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]  # per bucket, parameters that are not ready
        if not self.layout.buckets[-1].slots:
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

    def arm(self, unreached: Collection[int] = ()) -> None:
        """Reduce the next backward. `unreached` parameters get no gradient in it and need not be waited for."""
        self._raise_unread()
        self._rebuild_once()
        if self.phase is Phase.COLLECTING:
            self.abandon("its last backward did not come to its end")
        self.phase = Phase.ARMED
        self._unreached = list(unreached)

    def disarm(self) -> None:
        """Keep the gradients of the next backward on this rank."""
        if self.phase is Phase.COLLECTING:
            self.abandon("its last backward did not come to its end")
        self.phase = Phase.LOCAL

    def begin(self, *_: object) -> None:
        """A backward has started; called inside it, so that `finish` runs when autograd has done all of it."""
        if self.phase is Phase.COLLECTING:
            return
        self._warn_of_no_sync()
        self.phase = Phase.COLLECTING  # also from LOCAL: a forward under no_sync came after the one whose backward this is
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

    def begin_at_output(self, *_: object) -> None:
        """A backward has come to an output of the module, the outermost one where backwards are nested.

        `torch.autograd.grad` comes there too, for a gradient penalty, but leaves nothing in `.grad` to be reduced.
        """
        if self.phase is Phase.COLLECTING:
            return
        try:
            accumulates = any(map(torch._C._will_engine_execute_node, self._nodes))
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

    def take_part(self) -> None:
        """Collective. Reduce now, without a backward, whatever gradients this rank holds: possibly none at all."""
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

    def wait_for(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Also wait for `futures` at the end of the next backward that is reduced."""
        self._futures.extend(futures)

    # ---- inside a backward

    def _on_gradient(self, index: int) -> None:
        self._touched[index] = 1
        if self.phase is Phase.LOCAL:
            return
        if self.phase is Phase.ARMED:
            self.begin()
        if self._came is not None and not self.reductions:
            self._came.append(index)
        if self._ready[index]:
            if self._bucket_of[index] < self._next:
                raise RuntimeError(
                    f"Rank {self._communicator.rank}: {self._names[index]!r} got a second gradient in one backward, after "
                    f"its bucket had been sent. It is used in several checkpointed blocks, or outside of the wrapper's "
                    f"forward: use non-reentrant checkpointing (use_reentrant=False), or find_unused_parameters=None."
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
        if self.hook is not None:
            self._launch_hooked(bucket, last)
            return
        if self._weight is None and not average:
            # before the sum, so that it stays in the range of fp16
            self.storage.gradients[bucket.index].mul_(1.0 / self._communicator.size)
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
                        f"The gradient of {slot.name!r} is sparse, which is not supported yet: use sparse=False."
                    )
                views.append(view)
                fresh.append(gradient)
                if not self._touched[slot.parameter]:
                    self._kept[slot.parameter] = gradient
                if self._as_views:
                    parameter.grad = view
            elif not self._touched[slot.parameter]:
                self._kept[slot.parameter] = view.clone()
        if views:
            torch._foreach_copy_(views, fresh)

    def _write_riders(self, scale: float) -> None:
        lacking = self.strict and not self._excused and not all(self._touched) and self._lacks_gradients()
        status = _Status.FAILED if self._failure else _Status.LACKS_GRADIENTS if lacking else _Status.WELL
        weight, carried = self._weight or (1.0, 0.0)
        self._used.copy_(torch.frombuffer(self._touched, dtype=torch.uint8))
        self._statuses.zero_()
        self._statuses[self._communicator.rank] = float(status)
        self._numbers[0] = weight
        self._numbers[1] = carried
        if scale != 1.0:
            self.storage.riders.mul_(scale)

    def _lacks_gradients(self) -> bool:
        """Whether a parameter that is not frozen by now got none."""
        return any(p.requires_grad and not touched for p, touched in zip(self.parameters, self._touched, strict=True))

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
            self._hand_out()
            self._raise_what_riders_say()
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
            if index in untouched_anywhere or parameter.grad is view:
                continue
            if self._as_views:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                own.append(parameter.grad)
                reduced.append(view)
        if own:
            torch._foreach_copy_(own, reduced)

    def _raise_what_riders_say(self) -> None:
        if not self._on_cpu and self._weight is None and all(self._touched) and self._failure is None:
            # Reading now would make the host wait for the whole backward; a copy is read at the next forward.
            self._unread = self._statuses.clone(), torch.Event(self._statuses.device)
            self._unread[1].record()
            return
        self._raise_for(self._statuses)

    def _raise_unread(self) -> None:
        """What the last reduction said, where nobody has read it yet."""
        if self._unread is not None:
            (statuses, written), self._unread = self._unread, None
            written.synchronize()
            self._raise_for(statuses)

    def _raise_for(self, riders: torch.Tensor) -> None:
        statuses = [_Status(round(status)) for status in riders.tolist()]
        failed = [rank for rank, status in enumerate(statuses) if status is _Status.FAILED]
        if failed and len(failed) < len(statuses):
            words = self._communicator.all_gather_object(self._failure)
            told = "; ".join(f"rank {rank}: {words[rank]}" for rank in failed)
            raise RankFailedError(f"Rank {self._communicator.rank} stops because another rank failed: {told}")
        lacking = [rank for rank, status in enumerate(statuses) if status is _Status.LACKS_GRADIENTS]
        if lacking:
            raise UnusedParametersError(self._unused_message(lacking))

    def _unused_message(self, ranks: list[int]) -> str:
        size = self._communicator.size
        names = [
            f"{name} ({size - round(count)} of {size} ranks)" if round(count) > 0 else name
            for name, parameter, count in zip(self._names, self.parameters, self._used.tolist(), strict=True)
            if round(count) < size and parameter.requires_grad
        ]
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        return (
            f"{len(names)} parameters got no gradient in this backward on rank(s) {', '.join(map(str, ranks))}: {shown}. They "
            f"were not used in forward, or the outputs that use them did not enter the loss. Set "
            f"find_unused_parameters=None to let ranks without a gradient take part with zeros, or True to find such "
            f"parameters before each backward. The optimizer has not moved."
        )

    def _reset(self) -> None:
        """Ready for the next window; after an error too, so that the next backward is not disturbed by this one."""
        self._touched = bytearray(len(self._touched))
        self._await_all()
        self._pending = []
        self._kept = {}
        self._unreached = []
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
