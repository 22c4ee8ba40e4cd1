"""The buckets of one model: laid out, filled as gradients come, sent in fixed order, and waited for."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import torch

from allstep.comm.communicator import Communicator, Pending, PendingInOrder
from allstep.comm.watchdog import HERE, told
from allstep.ddp.buffers import GradientStorage
from allstep.ddp.comm_hooks import CommHook
from allstep.ddp.countdown import Countdown
from allstep.ddp.gradients import Gradients
from allstep.ddp.layout import Bucket, BucketCaps, BucketLayout, ParameterSpec, plan_layout
from allstep.ddp.riders import Riders
from allstep.ddp.shared import SharedBucket
from allstep.ddp.sparse import average_sparse_gradients
from allstep.ddp.transfers import start_hooked_transfer, start_ordered_transfer, start_transfer
from allstep.ddp.window import Window
from allstep.errors import CollectiveError

__all__ = ["Buckets"]


class Buckets:
    """Gradients of some parameters, and the collectives that average them.

    Args:
        named: name and parameter of all that can be trained, in registration order; the same on every rank.
        communicator: the ranks to average over.
        caps: how large buckets may be.
        as_views: leave gradients as views of the flat storage; otherwise copy them back into tensors of their own.
        sparse: indices of parameters whose gradients are sparse; those lie in no bucket.
        delayed: indices of parameters to reduce behind all others, in buckets of their own.
        trigger: index of a parameter; the delayed ones are not reduced before its gradient has come.
        in_order: add in a tree by rank, whatever the backend's own order is.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        communicator: Communicator,
        caps: BucketCaps,
        *,
        as_views: bool,
        sparse: Collection[int] = (),
        delayed: Collection[int] = (),
        trigger: int | None = None,
        in_order: bool = False,
    ) -> None:
        self.gradients = Gradients([parameter for _, parameter in named], as_views=as_views, sparse=sparse)
        self.caps = caps
        self._specs, self._communicator = [ParameterSpec.of(name, parameter) for name, parameter in named], communicator
        self.write_riders: Callable[[float], None]
        """Puts this rank's numbers behind the last bucket, times a scale, just before that is sent; the reducer's."""
        self._delayed, self._trigger = frozenset(delayed), trigger
        self.in_order = in_order
        """Whether sums are a tree by rank."""
        self.bytes_reduced = 0
        """Of all buckets since the start."""
        self.hook: tuple[Any, CommHook] | None = None
        """(state, function) that averages buckets in place of an all-reduce."""
        self.layout: BucketLayout
        """Which gradient lies where in which bucket."""
        self.riders: Riders
        """The numbers behind the last bucket."""
        self._pending: list[Pending] = []
        self._in_two_parts: PendingInOrder | None = None  # the last one that was started
        self._undivided: list[torch.Tensor] = []  # sums that `divide` has to divide by weights
        self._scale: Callable[[], float] | None = None
        self.lay_out(range(len(named) - 1, -1, -1))  # gradients usually come in reverse registration order

    def lay_out(self, order: Sequence[int], cuts: Sequence[int] | None = None) -> None:
        """Make buckets for gradients that come in `order`, by the caps or at `cuts`, and their memory."""
        count, sparse = len(self._specs), self.gradients.sparse
        self.order = [index for index in order if index not in sparse]
        riders = Riders.count(count, self._communicator.size)
        self.layout = plan_layout(self._specs, self.order, self.caps, riders, self._delayed, cuts)
        self._allocate()
        self.countdown = Countdown(self.layout, count, self._delayed, self._trigger)
        self.launched: list[int] = [0] * len(self.layout.buckets)
        """Per bucket, collectives started since the buckets were laid out."""

    @property
    def is_to_be_planned(self) -> bool:
        """Whether nobody has chosen how these buckets are cut, and there is something to choose."""
        return self.caps.is_planned and not self._delayed and self._communicator.size > 1

    def are_cut_at(self, order: Sequence[int], cuts: Sequence[int]) -> bool:
        """Whether `lay_out` would put the same gradients together, in the same order of buckets."""
        other = plan_layout(self._specs, order, self.caps, len(self.riders.numbers), self._delayed, cuts)
        return [{*bucket.parameters} for bucket in other.buckets] == [{*bucket.parameters} for bucket in self.layout.buckets]

    def _allocate(self) -> None:
        """Make the memory that the layout describes."""
        parameters = self.gradients.parameters
        if not self.gradients.are_in_storage():  # then the memory of before goes first (test_rebuild.py)
            self._shared, self._undivided = [], []
            self.__dict__.pop("riders", None)
            self.gradients.drop_storage()
        self.gradients.storage = GradientStorage(self.layout, parameters, self._communicator.allocate)
        self.riders = Riders(self.gradients.storage.riders, len(parameters), self._communicator)
        self._shared = [SharedBucket(self._communicator, self.gradients.storage, bucket) for bucket in self.layout.buckets]
        self.on_cpu = self.riders.numbers.device.type == "cpu"
        self.gradients.storage.note_users()

    def leave_to_others(self) -> None:
        """Before gradients come: what somebody still holds of those of before is not written over."""
        if not self.gradients.let_others_keep():
            self._allocate()

    def restart(self) -> None:
        """No gradient of the coming backward is there yet."""
        self.countdown.restart()
        self._pending, self._in_two_parts = [], None
        self._undivided, self._scale = [], None
        self.gradients.forget()

    def send_full(self, window: Window) -> None:
        """The next bucket is full: send it, and those behind it that are."""
        while self._send_next(window):
            pass

    def send_rest(self, window: Window) -> None:
        """Send what has not gone out, whatever it lacks, and wait for all."""
        while not self.countdown.is_done:
            self._send_next(window)
        self._wait()

    @torch.no_grad()  # backward(create_graph=True) has gradients enabled
    def _send_next(self, window: Window) -> bool:
        """Send the next bucket, whatever it lacks; whether the one behind it is full."""
        bucket = self.layout.buckets[self.countdown.next]
        is_last = bucket is self.layout.buckets[-1]
        if self.gradients.tree:
            self.gradients.tree.give_back(bucket.parameters)
        indices, views, fresh = self.gradients.collect(bucket, window.touched, self.countdown.is_ready, window.unreached)
        if self.hook is None and self._communicator.shares_memory:
            shared = self._shared[bucket.index]
            held, views, fresh = shared.take(indices, views, fresh)
            self.gradients.copy_in(bucket, views, fresh)
            if is_last:
                self.write_riders(1)
            self._pending.append(shared.start(held, self._scale_of(window)))
        else:
            self.gradients.copy_in(bucket, views, fresh)
            self._send_copied(bucket, window, is_last)
        self.bytes_reduced += bucket.nbytes
        self.launched[bucket.index] += 1
        return self.countdown.advance()

    def _scale_of(self, window: Window) -> Callable[[], float]:
        """What sums are multiplied by, known when all ranks have posted their weights; the ranks that weigh count."""
        if self._scale is None:
            numbers = self._communicator.post_number(math.nan if window.weight is None else window.weight[0])
            self._scale = cache(partial(_scale, numbers))
        return self._scale

    def _send_copied(self, bucket: Bucket, window: Window, is_last: bool) -> None:
        """By an all-reduce of any backend, or by a hook."""
        storage = self.gradients.storage
        in_order = self.in_order and not self._communicator.adds_in_order
        average = self._communicator.averages_in_flight(self.riders.numbers.device) and not in_order
        divide_by = 1 if window.weight is not None else 0 if average else self._communicator.size
        if is_last:
            self.write_riders(self._communicator.size if self.hook is None and not divide_by else 1)
        self._undivided.append(storage.gradients[bucket.index])
        if self.hook is None and in_order:
            if self._in_two_parts is not None:
                self._in_two_parts.go_on()  # before the next one starts, so that all ranks do so in one order
            self._in_two_parts = start_ordered_transfer(self._communicator, storage, bucket, divide_by)
            self._pending.append(self._in_two_parts)
        elif self.hook is None:
            self._pending.append(start_transfer(self._communicator, storage, bucket, divide_by))
        else:
            if bucket.slots:
                is_last_seen = is_last or not self.layout.buckets[bucket.index + 1].slots
                transfer = start_hooked_transfer(self.hook, storage, bucket, is_last_seen, self.gradients.parameters)
                self._pending.append(transfer)
            if self.on_cpu:
                # Hooks that start collectives from the future of another (PowerSGD) let gloo's threads pair those of different
                # buckets: torch's own class aborts there. One bucket at a time is always right (test_comm_hooks.py).
                self._wait()
            if is_last:
                self._pending.append(self._communicator.all_reduce(self.riders.numbers))

    def _wait(self) -> None:
        with HERE.wait("all_reduce of gradients", self._awaited):
            try:
                while self._pending:
                    self._pending[0].wait()
                    del self._pending[0]
            except CollectiveError as error:
                raise told(error) from error.__cause__

    def _awaited(self) -> str:
        """The bucket that is waited for, in words."""
        buckets, sent = self.layout.buckets, self.countdown.next
        bucket = buckets[max(0, sent - len(self._pending))]
        names = [self._specs[index].name for index in bucket.parameters]
        which = "no parameters" if not names else names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"bucket {bucket.index + 1} of {len(buckets)}: {which}"

    def divide(self, window: Window, weight: torch.Tensor) -> None:
        """Collective. Where the caller weighs: divide the sums by `weight`, that of all ranks; and average sparse gradients."""
        scale: float | torch.Tensor = 1.0 / self._communicator.size
        if window.weight is not None:
            divided = self._communicator.size if self.hook else 1.0  # a hook has divided by ranks already
            for gradients in self._undivided:
                # float32 has no exact 1/3: double gradients would lose half of their digits (test_windows_equal_one_process.py)
                exact = weight.double() if gradients.dtype in (torch.float64, torch.complex128) else weight
                gradients.mul_(torch.where(weight > 0, divided / exact, 0.0))
            scale = torch.where(weight > 0, 1.0 / weight, 0.0)
        if self.gradients.sparse:
            used = self.riders.used.tolist()
            sparse = [self.gradients.parameters[index] for index in sorted(self.gradients.sparse) if round(used[index])]
            average_sparse_gradients(self._communicator, sparse, scale)


def _scale(numbers: Callable[[], list[float]]) -> float:
    """1 / the sum of all weights; NaN is that of a rank that does not weigh."""
    weights = [number for number in numbers() if not math.isnan(number)]
    if not weights:
        return 1.0 / len(numbers())
    total = sum(weights)
    return 1.0 / total if total > 0 else 0.0
