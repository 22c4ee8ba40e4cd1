"""The step from measurements to buckets: all ranks agree on times and cost, rank 0 plans, and all lay out alike."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from allstep.comm.communicator import Communicator
from allstep.ddp.buckets import Buckets
from allstep.ddp.layout import BucketLayout
from allstep.ddp.plan import BucketPlan, TransferCost, expected_end, plan_cuts
from allstep.ddp.timing import Backward, ReadyTimes, measure_cost, slowest

__all__ = ["MEASURED_REDUCTIONS", "plan_buckets", "ready_times_for"]

MEASURED_REDUCTIONS = 4
"""Backwards are timed in this many reductions, and buckets are planned before the next one; the first one does not count."""
_LEAST_BYTES = 256 << 10
"""Gradients of fewer bytes are left as they are: their one or two collectives are mostly latency."""

_SLACK = 0.01
"""Share of a backward that a plan may take longer, as measured, to do better where measurements were wrong."""


def ready_times_for(buckets: Buckets) -> ReadyTimes | None:
    """What notes the times of `buckets`; None where their cuts are not to be planned. Equal on all ranks."""
    layout, device = buckets.layout, buckets.riders.numbers.device
    if not buckets.is_to_be_planned or len(buckets.order) < 2 or _nbytes(layout) < _LEAST_BYTES:
        return None
    return ReadyTimes(len(buckets.gradients.parameters), device)


def plan_buckets(buckets: Buckets, communicator: Communicator, times: ReadyTimes) -> BucketPlan | None:
    """Collective. Measure the transport, plan, and lay the buckets out by that plan.

    Returns None, and leaves the buckets as they are, where no rank ran a backward, or some rank has a reason against it: a
    communication hook, which may keep state for each bucket; or deterministic algorithms with more than two ranks, where the
    order of a sum, and so its last bits, depend on the place of a gradient in its bucket, and the plan on times.
    """
    exact = not (communicator.adds_in_order or buckets.in_order) and torch.are_deterministic_algorithms_enabled()
    against = exact or buckets.hook is not None
    told: list[tuple[bool, Backward | None]] = communicator.all_gather_object((against, None if against else times.backward()))
    agreed = None if any(veto for veto, _ in told) else slowest(backward for _, backward in told)
    if agreed is None:
        return None
    largest = max(buckets.layout.buckets, key=lambda bucket: bucket.gradients * bucket.itemsize)
    device = torch.device(largest.device)
    cost = measure_cost(communicator, _nbytes(buckets.layout), getattr(torch, largest.dtype), device)
    chosen = _plan(buckets.layout, agreed, buckets.order, cost) if communicator.rank == 0 else None
    planned: tuple[list[int], BucketPlan] = communicator.broadcast_object(chosen)  # rounding may differ on another machine
    order, plan = planned
    if not buckets.are_cut_at(order, plan.cuts):
        buckets.lay_out(order, plan.cuts)
    return plan


def _plan(layout: BucketLayout, backward: Backward, order: Sequence[int], cost: TransferCost) -> tuple[list[int], BucketPlan]:
    """The order in which buckets take gradients, and the plan: those that never come go last, as they leave at the end."""
    sizes = {slot.parameter: slot.numel * bucket.itemsize for bucket in layout.buckets for slot in bucket.slots}
    ready = {index: backward.end if time is None else time for index, time in enumerate(backward.ready)}
    missing = {index for index, time in enumerate(backward.ready) if time is None}
    before = [index for bucket in layout.buckets for index in bucket.parameters]
    cuts = [*accumulate(len(bucket.slots) for bucket in layout.buckets if bucket.slots)][:-1]
    before_end = expected_end([ready[index] for index in before], [sizes[index] for index in before], cuts, cost)
    planned = sorted(order, key=lambda index: (index in missing, ready[index]))
    plan = plan_cuts(
        [ready[index] for index in planned],
        [sizes[index] for index in planned],
        cost,
        backward.end,
        slack=_SLACK * backward.end,
        before_end=before_end,
    )
    return planned, plan


def _nbytes(layout: BucketLayout) -> int:
    return sum(bucket.gradients * bucket.itemsize for bucket in layout.buckets)
