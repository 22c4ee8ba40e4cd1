"""Which gradient lies where in which bucket. Pure: descriptions in, `BucketLayout` out, equal on every rank.

A bucket is the unit of reduction: the gradients in it lie side by side in flat storage and travel in one collective. Buckets
are numbered in the order in which they are expected to fill, and are always launched in that order.

Behind the gradients of the last bucket ride a few numbers more (`riders`): which parameters were used, and whatever the caller
wants summed over ranks. They cost no collective of their own.
"""

import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

__all__ = ["Bucket", "BucketCaps", "BucketLayout", "ParameterSpec", "Slot", "plan_layout"]

MIB = 1 << 20
BUCKET_ALIGNMENT = 64
"""Buckets start at multiples of this many bytes: a cache line, and what NCCL and vector units like."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the layout must know of one trainable parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """For example "float32"."""
    itemsize: int
    """Bytes of one element."""
    device: str
    """For example "cpu" or "cuda:0"."""

    @classmethod
    def of(cls, name: str, parameter: Any) -> "ParameterSpec":
        """That of a tensor."""
        return cls(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize=parameter.element_size(),
            device=str(parameter.device),
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter's gradient in its bucket."""

    parameter: int
    """Index of the parameter, in registration order."""
    name: str
    offset: int
    """Elements from the start of the bucket."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced by one collective."""

    index: int
    dtype: str
    itemsize: int
    device: str
    start: int
    """Elements from the start of the flat storage of this dtype and device."""
    slots: tuple[Slot, ...]
    riders: int = 0
    """Elements behind the gradients that carry numbers of the reducer and its caller."""

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters, in the order of their gradients' places."""
        return tuple(slot.parameter for slot in self.slots)

    @cached_property
    def gradients(self) -> int:
        """Elements that are gradients."""
        return sum(slot.numel for slot in self.slots)

    @property
    def numel(self) -> int:
        """Elements reduced by the collective."""
        return self.gradients + self.riders

    @property
    def nbytes(self) -> int:
        """Bytes reduced by the collective."""
        return self.numel * self.itemsize

    def __str__(self) -> str:
        names = ", ".join(slot.name for slot in self.slots) or "riders only"
        return f"bucket {self.index}: {self.nbytes:,} bytes, {self.dtype} on {self.device}: {names}"


@dataclass(frozen=True, kw_only=True)
class BucketCaps:
    """How large buckets may grow, in bytes. A parameter larger than the cap gets a bucket of its own."""

    first: int
    """Of the first bucket to fill: small, so that the first collective starts early."""
    middle: int
    last: int
    """Of the last bucket to fill: small, because no backward is left that could hide its collective."""
    given: tuple[int, ...] = ()
    """Caps of the first buckets one by one, where somebody chose them."""
    is_planned: bool = field(default=False, compare=False)
    """Nobody chose them: they hold until cuts are planned from measurements."""
    are_floors: bool = False
    """A bucket is closed when it has so many bytes, and not before it would have more."""

    @classmethod
    def in_turn(cls, sizes_mb: Sequence[float]) -> "BucketCaps":
        """A cap (MiB) for each bucket in the order in which they fill; the last one is for all that follow."""
        sizes = tuple(int(size * MIB) for size in sizes_mb)
        return cls(first=sizes[0], middle=sizes[-1], last=0, given=sizes)

    @classmethod
    def unlimited(cls) -> "BucketCaps":
        """Everything of one dtype and device in one bucket."""
        return cls(first=sys.maxsize, middle=sys.maxsize, last=0)

    def of_bucket(self, index: int) -> int:
        """The cap of a bucket, by its number in the order in which they fill, where it is not the last."""
        if index < len(self.given):
            return self.given[index]
        return self.middle if index else self.first

    @classmethod
    def of(cls, bucket_cap_mb: float | None, *, default_mb: float) -> "BucketCaps":
        """`bucket_cap_mb` (MiB) for every bucket as asked; where None, `default_mb` with a small first and last bucket."""
        if bucket_cap_mb is not None:
            cap = int(bucket_cap_mb * MIB)
            return cls(first=cap, middle=cap, last=cap)
        small, middle = min(MIB, int(default_mb * MIB)), int(default_mb * MIB)
        return cls(first=small, middle=middle, last=small, is_planned=True)

    @classmethod
    def in_shared_memory(cls) -> "BucketCaps":
        """For ranks that sum what still lies in their caches: 1 MiB or somewhat more, so that a bias goes with its weight.

        No collective is under way while backward computes, so there is nothing to plan.
        """
        return cls(first=MIB, middle=MIB, last=0, are_floors=True)

    def would_close(self, cap: int, nbytes: int, more: int) -> bool:
        """Whether a bucket of `nbytes` takes no parameter of `more` bytes in."""
        return nbytes >= cap if self.are_floors else nbytes + more > cap


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """All buckets of a model, in launch order."""

    buckets: tuple[Bucket, ...]
    """The last one carries the riders; it is of dtype float32, if need be without any gradient."""

    def storage_sizes(self) -> dict[tuple[str, str], int]:
        """(dtype, device) -> elements of the flat storage that holds its buckets."""
        sizes: dict[tuple[str, str], int] = {}
        for bucket in self.buckets:
            key = (bucket.dtype, bucket.device)
            sizes[key] = max(sizes.get(key, 0), bucket.start + bucket.numel)
        return sizes

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def digest(self) -> str:
        """Equal layouts have equal digests; compared over ranks when a model is wrapped."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(map(str, self.buckets))


def plan_layout(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    riders: int,
    delayed: Collection[int] = (),
    cuts: Sequence[int] | None = None,
) -> BucketLayout:
    """Cut parameters into buckets.

    Args:
        specs: the trainable parameters, in registration order.
        order: indices into `specs` in the order in which gradients are expected.
        caps: sizes of the buckets.
        riders: float32 elements to carry behind the gradients of the last bucket.
        delayed: parameters to keep together, behind all others, whatever their size: one bucket for each dtype and device.
        cuts: in place of `caps`, how many parameters of `order`, of those not delayed, lie before each cut, ascending. What
            lies between two cuts is one bucket for each dtype and device.
    """
    expected = {parameter: place for place, parameter in enumerate(order)}
    prompt = [i for i in order if i not in delayed]
    groups = _cut(specs, prompt, caps) if cuts is None else _cut_at(specs, prompt, cuts)
    groups.sort(key=lambda group: max(expected[i] for i in group))
    groups += _cut(specs, [i for i in order if i in delayed], BucketCaps.unlimited())
    if not groups or specs[groups[-1][0]].dtype != "float32":
        groups.append([])  # riders count exactly, so they need a bucket of float32
    ends: dict[tuple[str, str], int] = {}
    buckets = []
    for index, group in enumerate(groups):
        slots, offset = [], 0
        for i in group:
            slots.append(Slot(parameter=i, name=specs[i].name, offset=offset, numel=specs[i].numel))
            offset += specs[i].numel
        dtype, itemsize = (specs[group[0]].dtype, specs[group[0]].itemsize) if group else ("float32", 4)
        device = specs[group[0] if group else 0].device
        unit = max(1, BUCKET_ALIGNMENT // itemsize)
        start = -(-ends.get((dtype, device), 0) // unit) * unit
        bucket = Bucket(
            index=index,
            dtype=dtype,
            itemsize=itemsize,
            device=device,
            start=start,
            slots=tuple(slots),
            riders=riders if index == len(groups) - 1 else 0,
        )
        ends[dtype, device] = start + bucket.numel
        buckets.append(bucket)
    return BucketLayout(buckets=tuple(buckets))


def _cut(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Groups of parameters of one dtype and device, each within its cap where more than one parameter is in it."""
    tail = _tail(specs, order, caps.last)
    open_groups: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    closed: list[list[int]] = []
    for i in order[: len(order) - len(tail)]:
        kind = (specs[i].dtype, specs[i].device)
        cap = caps.of_bucket(len(closed))
        if kind in open_groups and caps.would_close(cap, sizes[kind], specs[i].nbytes):
            closed.append(open_groups.pop(kind))
        open_groups.setdefault(kind, []).append(i)
        sizes[kind] = specs[i].nbytes + (sizes[kind] if len(open_groups[kind]) > 1 else 0)
    return [*closed, *open_groups.values(), *([tail] if tail else [])]


def _cut_at(specs: Sequence[ParameterSpec], order: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Groups of parameters of one dtype and device, between cuts."""
    pieces = [order[first:last] for first, last in pairwise([0, *cuts, len(order)])]
    return [group for piece in pieces for group in _cut(specs, piece, BucketCaps.unlimited())]


def _tail(specs: Sequence[ParameterSpec], order: Sequence[int], cap: int) -> list[int]:
    """The last parameters to become ready that fit into `cap` bytes and are of one dtype and device."""
    size, count = 0, 0
    for i in reversed(order):
        same_kind = (specs[i].dtype, specs[i].device) == (specs[order[-1]].dtype, specs[order[-1]].device)
        if size + specs[i].nbytes > cap or not same_kind:
            break
        size, count = size + specs[i].nbytes, count + 1
    return list(order[len(order) - count :])
