"""Why two runs of one script part, as far as their ledgers tell. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allstep.cli.verify.compare import Difference, What
from allstep.report.ledger import LedgerStep

__all__ = ["Evidence", "likely_cause"]

_BEFORE_SUMS = (What.SAMPLES, What.INPUTS, What.WEIGHT, What.RATE)
"""What no sum of floats takes part in."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known beside the difference itself."""

    here: LedgerStep
    """The step of the first run."""
    there: LedgerStep
    """The step of the second run."""
    is_random: bool | None = None
    """Whether two runs alike, on as many ranks as the second, differ too; None where nobody tried."""


def likely_cause(difference: Difference, evidence: Evidence) -> str:
    """One or two sentences: the likely cause, and what to look at."""
    here, there = evidence.here, evidence.there
    if here.threads != there.threads and difference.what not in _BEFORE_SUMS:
        return (
            f"CPU threads: a rank of one run has {here.threads}, of the other {there.threads}. Threads share out the sums "
            f"inside an operation, and so change their order. Run both with the same OMP_NUM_THREADS."
        )
    said = _CAUSES.get(difference.what, _of_step)(difference, evidence)
    differ = evidence.there.ranks_differ or evidence.here.ranks_differ
    if differ and difference.what not in _BEFORE_SUMS:
        said += f" In that step the ranks do not agree among themselves on: {', '.join(differ)}."
    return said


def _of_samples(difference: Difference, evidence: Evidence) -> str:
    sizes = {sum(len(each.samples) for each in step.micro_batches) for step in (evidence.here, evidence.there)}
    if len(sizes) > 1:
        return "The steps have other numbers of samples: the global batch, or the length of the dataset, is not the same."
    return "The samples come in another order: seed, data_seed, or the length of the dataset depends on rank or world size."


def _of_inputs(difference: Difference, evidence: Evidence) -> str:
    if difference.moved_from is not None:
        return (
            f"Samples are swapped: in place of a sample of this micro-batch the second run has what the first has for sample "
            f"{difference.moved_from}. The dataset or collator picks by rank, world size or order of access, not by index."
        )
    return _random_or_not(
        evidence,
        "The data is random, from a generator that is not seeded for each sample: one of its own, or made in __init__. Draw "
        "from the global generators of torch, numpy or random, which are seeded before each sample.",
        "What the dataset or collator gives for these samples depends on rank, world size or the order of access.",
    )


def _of_micro_loss(difference: Difference, evidence: Evidence) -> str:
    return _random_or_not(
        evidence,
        "The model draws random numbers from a generator that is not seeded for each micro-batch, one of its own, or runs a "
        "kernel that is not deterministic. Draw from torch's global generator, which is seeded before each forward.",
        "The model or the loss takes another branch: something in it depends on rank, world size, or on how many micro-batches "
        "this process has seen (a counter, a running statistic, a cache).",
    )


def _of_loss(difference: Difference, evidence: Evidence) -> str:
    return _order_of_sums(evidence) or "The losses of the micro-batches are the same and their mean is not."


def _of_gradient(difference: Difference, evidence: Evidence) -> str:
    return _order_of_sums(evidence) or _random_or_not(
        evidence,
        "Backward is random: a kernel that is not deterministic, or a hook on a gradient that draws random numbers. Try "
        "full_determinism=True.",
        "A backward, or a hook on a gradient, depends on rank or world size; or parameters have half precision, and sums are "
        "rounded on their way.",
    )


def _of_buffer(difference: Difference, evidence: Evidence) -> str:
    return (
        "Buffers are updated in each forward of each rank, and rank 0's are kept: BatchNorm's running statistics are those of "
        "rank 0's micro-batches, and depend on how many ranks share a step. Weights are the same; evaluation is not. Use a "
        "normalisation without statistics over batches (LayerNorm, GroupNorm), or freeze them."
    )


def _of_step(difference: Difference, evidence: Evidence) -> str:
    if difference.what is What.RATE:
        return "The schedule depends on world size: it was made for another number of steps."
    if difference.what is What.WEIGHT:
        return "The weight of a micro-batch, what its mean loss is taken over, depends on rank or world size."
    return "Gradients are the same, the step is not: an optimizer, callback or clipping depends on rank or world size."


def _order_of_sums(evidence: Evidence) -> str:
    for step in (evidence.here, evidence.there):
        if not step.in_order:
            return (
                f"The order of sums: on {step.world_size} rank(s) gradients are added in whatever order the backend has. Set "
                f"deterministic_reduction=True."
            )
        if step.world_size > 1 and step.block & (step.block - 1):
            return (
                f"The order of sums: {step.world_size} rank(s) run blocks of {step.block} micro-batches, no power of two, so "
                f"that they are no subtrees of the tree over all. Choose sizes so that each rank runs 1, 2, 4, … micro-batches."
            )
    return ""


def _random_or_not(evidence: Evidence, random: str, otherwise: str) -> str:
    if evidence.is_random is None:
        return f"Either: {random} Or: {otherwise}"
    return f"Two runs alike differ too. {random}" if evidence.is_random else f"Two runs alike are the same. {otherwise}"


_CAUSES: Mapping[What, Callable[[Difference, Evidence], str]] = {
    What.SAMPLES: _of_samples,
    What.INPUTS: _of_inputs,
    What.MICRO_LOSS: _of_micro_loss,
    What.LOSS: _of_loss,
    What.GRADIENT: _of_gradient,
    What.NORM: _of_gradient,
    What.BUFFER: _of_buffer,
}
