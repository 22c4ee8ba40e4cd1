"""What `allstep verify` says. Pure."""

from collections.abc import Mapping, Sequence

from allstep.cli.verify.compare import Difference, What
from allstep.report.ledger import LedgerStep

__all__ = ["described", "replayed", "verdict"]

_MOST = 100  # characters of a value that are shown


def verdict(steps: Mapping[int, LedgerStep], sizes: Sequence[int], tolerance: float) -> str:
    """Where all runs were the same."""
    last = steps[max(steps)]
    ranks = ", ".join(map(str, sizes))
    if tolerance:
        return f"the same within {tolerance:g} for {len(steps)} steps on {ranks} rank(s): losses and norms of gradients"
    samples = sum(len(each.samples) for step in steps.values() for each in step.micro_batches)
    return (
        f"identical for {len(steps)} steps on {ranks} rank(s), to the bit: {samples} samples, every loss, gradient and weight\n"
        f"(global batch of {len(last.micro_batches)} micro-batches in step {last.step}, loss {last.loss:.6g})"
    )


def replayed(recorded: LedgerStep, replay: LedgerStep) -> str:
    """Where a step that was run again gave what was recorded."""
    compared = f"{len(recorded.micro_batches)} micro-batches, their losses" + (
        "" if recorded.grad_norm is None else ", norm of gradients"
    )
    tensors = (
        "" if not recorded.parameters else f", {len(recorded.gradients)} gradients and {len(recorded.parameters)} parameters"
    )
    on = f"{recorded.world_size} rank(s) then, {replay.world_size} now"
    return f"identical: step {recorded.step} ({on}): {compared}{tensors}"


def described(difference: Difference, here: str, there: str) -> str:
    """Where two runs part, in a few lines."""
    where = [f"step {difference.step}", difference.what.value]
    if difference.micro_batch is not None:
        where[1] = {What.MICRO_LOSS: "loss", What.SAMPLES: "samples", What.INPUTS: "inputs"}.get(difference.what, where[1])
        shown = ", ".join(map(str, difference.samples[:8])) + (" …" if len(difference.samples) > 8 else "")
        where.append(f"of micro-batch {difference.micro_batch} (samples {shown})")
    if difference.name:
        where.append(repr(difference.name))
    if difference.of > 1:
        where.append(f"— {difference.count} of {difference.of} differ")
    width = max(len(here), len(there))
    return (
        f"NOT identical: first difference at {', '.join(where[:2])} {' '.join(where[2:])}".rstrip()
        + f"\n  {here.rjust(width)}: {_cut(difference.here)}\n  {there.rjust(width)}: {_cut(difference.there)}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]} …"
