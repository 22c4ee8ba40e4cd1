"""Votes and comparisons: what ranks must agree on before they go on, and what they say when one of them cannot."""

import functools
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from allstep.comm.communicator import Communicator, communicator_for
from allstep.errors import RankFailedError, ReplicaError

__all__ = [
    "all_ranks_agree",
    "any_rank",
    "check_same_replicas",
    "digest",
    "fail_together",
    "failing_together",
    "first_difference",
]


def digest(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256, in hexadecimal, of names, shapes, dtypes and bytes of tensors; equal digests mean equal bits."""
    sha = hashlib.sha256()
    for name, tensor in itertools.chain.from_iterable(itertools.starmap(_parts, named_tensors)):
        flat = tensor.detach().cpu().contiguous()
        sha.update(f"{name}:{tuple(flat.shape)}:{flat.dtype};".encode())
        if flat.numel():
            sha.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor is made of: itself, or what a subclass holds, like 8-bit states (test_agreement.py)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def all_ranks_agree(flag: bool, process_group: dist.ProcessGroup | Communicator | None = None) -> bool:
    """Collective. Whether `flag` is true on every rank: for decisions that all have to take alike, such as to skip a batch.

    `process_group` names the ranks; None is the default group, or a world of one where nobody joined one.
    """
    return all(communicator_for(process_group).all_gather_object(bool(flag)))


def any_rank(communicator: Communicator, bits: int) -> int:
    """Collective. The bits that any rank has set in `bits`, a number below 2**8."""
    if communicator.shares_memory:
        return functools.reduce(operator.or_, map(int, communicator.post_number(float(bits))()))
    flags = torch.tensor([bits >> at & 1 for at in range(8)], dtype=torch.int32)
    communicator.all_reduce(flags).wait()
    return sum(1 << at for at, count in enumerate(flags.tolist()) if count)


def fail_together(communicator: Communicator, error: Exception | None, doing: str) -> None:
    """Collective. Where any rank brings an error, all raise: that rank its own error, the others one that tells it.

    Raises:
        RankFailedError: on the ranks that had no error of their own.
    """
    said = None if error is None else f"{type(error).__name__}: {error}"
    words = communicator.all_gather_object(said)
    if error is not None:
        raise error
    failed = [(rank, text) for rank, text in enumerate(words) if text is not None]
    if failed:
        rank, text = failed[0]
        others = f" ({len(failed)} ranks failed)" if len(failed) > 1 else ""
        raise RankFailedError(f"Rank {rank} failed while {doing}: {text}{others}. Rank {communicator.rank} stops with it.")


@contextmanager
def failing_together(communicator: Communicator, doing: str) -> Iterator[None]:
    """Collective. Run a block that contains no collective; an error on any rank is raised on all (see `fail_together`)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - whatever it is, the peers have to hear of it
        error = caught
    fail_together(communicator, error, doing)


def first_difference(communicator: Communicator, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Collective. What ranks hold differently, in words: the first name at which one differs from rank 0; None if none does.

    Equal means equal bits, shapes, dtypes and names, in order.
    """
    own = [(name, digest([(name, tensor)])) for name, tensor in named_tensors]
    whole = hashlib.sha256(str(own).encode()).hexdigest()
    if len(set(communicator.all_gather_object(whole))) == 1:
        return None
    everyone: list[list[tuple[str, str]]] = communicator.all_gather_object(own)
    reference = everyone[0]
    for at in range(max(map(len, everyone))):
        seen = [ranks[at] if at < len(ranks) else ("nothing", "") for ranks in everyone]
        others = [rank for rank, each in enumerate(seen) if each != seen[0]]
        if others:
            names = {seen[0][0], *(seen[rank][0] for rank in others)}
            count = sum(1 for index, (_, value) in enumerate(reference) if any(_differs(r, index, value) for r in everyone))
            more = f" ({count} of {len(reference)} differ)" if count > 1 else ""
            return f"{' / '.join(sorted(names))} on rank(s) {', '.join(map(str, others))} is not as on rank 0{more}"
    raise AssertionError("digests differ but tensors do not")


def _differs(named_digests: list[tuple[str, str]], index: int, value: str) -> bool:
    return index >= len(named_digests) or named_digests[index][1] != value


def check_same_replicas(communicator: Communicator, described: list[str], arguments: str) -> None:
    """Collective. Compare one line a parameter or buffer ("name: shape, dtype, …"), and `arguments`, with those of rank 0.

    Raises:
        ReplicaError: on every rank, with the first line that differs as both ranks have it, or else the arguments.
    """
    own = hashlib.sha256("\n".join([*described, arguments]).encode()).hexdigest()
    if len(set(communicator.all_gather_object(own))) == 1:
        return
    everyone: list[tuple[list[str], str]] = communicator.all_gather_object((described, arguments))
    reference, reference_arguments = everyone[0]
    for rank, (lines, _) in enumerate(everyone):
        if lines == reference:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(reference, lines, strict=False)) if a != b),
            min(map(len, (reference, lines))),
        )
        here, there = (lines[at] if at < len(lines) else "nothing" for lines in (reference, lines))
        raise ReplicaError(
            f"The ranks hold different models. Rank 0 has {len(reference)} parameters and buffers, rank {rank} has "
            f"{len(lines)}; the first difference is number {at}: rank 0 has {here}, rank {rank} has {there}. Build the same "
            f"model on every rank, with the same parameters frozen, before wrapping it."
        )
    rank = next(rank for rank, (_, others) in enumerate(everyone) if others != reference_arguments)
    raise ReplicaError(
        f"The ranks wrap their models differently: rank 0 with {reference_arguments}, rank {rank} with {everyone[rank][1]}. "
        f"Write the same on every rank."
    )
