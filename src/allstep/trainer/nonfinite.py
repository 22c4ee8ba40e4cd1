"""Gradients that are NaN or infinite: found before the optimizer moves, and traced to rank, parameter and samples.

After the reduction every rank holds the same sum, so all find out alike, but nobody can see any more where it came from. Each
rank then runs its own micro-batches again: what was random is seeded by micro-batch, and the weights have not moved, so the
same gradients come out, one micro-batch at a time. A step that is well costs one look at a norm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.data.collate import to_device
from allstep.data.grid import MicroBatch
from allstep.data.loader import Feed
from allstep.data.seeding import mixed, seed_generators
from allstep.errors import NonFiniteGradientsError
from allstep.trainer.models.precision import autocast
from allstep.trainer.run import Run

__all__ = ["BufferCopies", "Finding", "report_nonfinite", "save_batch", "trace"]

FOLDER = "nonfinite"
"""Below the output folder: the micro-batches whose gradients were not finite."""
MOST_IDS = 16
MOST_IN_A_ROW = 20
"""Steps that are left out one after the other; then nothing is learnt any more, and the next one is an error."""
MOST_SAVED = 8
"""Micro-batches that a rank writes down in one run."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A micro-batch whose own gradients are not finite."""

    rank: int
    micro_batch: int
    """Its number in the step's grid."""
    sample_ids: list[int]
    """Indices of its samples in the dataset."""
    loss: float
    parameters: list[str]
    """Parameters whose gradients are not finite, in registration order; empty where they could not be computed again."""
    bad_inputs: dict[str, list[int]]
    """Name of an input -> ids of the samples whose values are not finite there."""
    file: str = ""
    """Where the micro-batch was saved."""

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.sample_ids[:MOST_IDS])) + (" …" if len(self.sample_ids) > MOST_IDS else "")
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        first = f"{self.parameters[0]!r}{more}" if self.parameters else "no single parameter"
        text = f"rank {self.rank}: {first}, from micro-batch {self.micro_batch}, samples {ids}, with loss {self.loss:g}"
        for name, bad in self.bad_inputs.items():
            text += f"; input {name!r} of sample(s) {', '.join(map(str, bad[:MOST_IDS]))} is not finite itself"
        return text + (f"; saved as {self.file}" if self.file else "")


class BufferCopies:
    """The buffers of a model, None for no copies, to be put back where a step is left out or taken again."""

    def __init__(self, model: nn.Module | None) -> None:
        self._copies = [] if model is None else [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were."""
        for buffer, copy in self._copies:
            buffer.copy_(copy)


def report_nonfinite(run: Run, counted: Sequence[tuple[MicroBatch, float]]) -> str:
    """Collective. Trace what is not finite, save those micro-batches, and give one text for all ranks.

    Args:
        run: its gradients have been reduced, and are not finite.
        counted: this rank's micro-batches of the step, with their weights.

    Raises:
        NonFiniteGradientsError: where the arguments say "raise", or too many steps in a row were left out.
    """
    found = trace(run, counted)
    everyone: list[list[Finding]] = run.communicator.all_gather_object(found)
    step, policy = run.callbacks.state.global_step + 1, run.args.nonfinite_gradients
    lines = [str(finding) for of_rank in everyone for finding in of_rank]
    if not lines:
        lines = ["each rank's own gradients are finite: their sum or norm is too large for the dtype"]
    text = f"Gradients of step {step} are not finite; the optimizer has not moved.\n" + "\n".join(f"  {line}" for line in lines)
    if policy == "skip" and run.skipped_in_a_row < MOST_IN_A_ROW:
        return text
    advice = '\n  nonfinite_gradients="skip" leaves such steps out; "ignore" does not look.'
    if policy == "skip":
        advice = (
            f"\n  {run.skipped_in_a_row} steps before it were left out, with none taken in between: the weights themselves are "
            f"no good any more, or all the data. Go on from an older checkpoint, with a lower learning rate."
        )
    error = NonFiniteGradientsError(text + advice)
    error.collateral = not found and any(everyone)
    raise error


def trace(run: Run, counted: Sequence[tuple[MicroBatch, float]]) -> list[Finding]:
    """Run this rank's micro-batches again, one by one, and find those whose gradients are not finite."""
    copies = BufferCopies(run.bare_model)
    try:
        found = [each for place, weight in counted if (each := _trace_one(run, run.feeds.again(place), weight)) is not None]
    finally:
        copies.put_back()
    return found


def _trace_one(run: Run, feed: Feed, weight: float) -> Finding | None:
    number = feed.micro_batch.number
    seed_generators(mixed(run.args.seed, run.callbacks.state.global_step, number))
    inputs = to_device(feed.inputs, run.device)
    with autocast(run.args, run.device):
        loss = run.compute_loss(run.bare_model, inputs, weight)
    value, names = float(loss.detach()), _nonfinite_gradients(run.bare_model, loss)
    bad = _bad_inputs(feed)
    if math.isfinite(value) and not names:
        return None
    finding = Finding(
        rank=run.communicator.rank, micro_batch=number, sample_ids=feed.sample_ids, loss=value, parameters=names, bad_inputs=bad
    )
    return save_batch(run, finding, feed)


def _nonfinite_gradients(model: nn.Module, loss: torch.Tensor) -> list[str]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    except RuntimeError:  # reentrant checkpointing allows backward() alone
        return []
    return [
        name
        for (name, _), gradient in zip(named, gradients, strict=True)
        if gradient is not None
        and not bool(torch.isfinite(gradient.coalesce().values() if gradient.is_sparse else gradient).all())
    ]


def _bad_inputs(feed: Feed) -> dict[str, list[int]]:
    """Which samples bring values that are not finite, in which input; where inputs are rows of samples."""
    inputs = feed.inputs
    items = (
        inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs if isinstance(inputs, (tuple, list)) else [inputs])
    )
    bad: dict[str, list[int]] = {}
    for name, value in items:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim and len(value) == len(feed.sample_ids):
            rows = (~torch.isfinite(value)).reshape(len(value), -1).any(dim=1).tolist()
            if any(rows):
                bad[str(name)] = [sample for sample, is_bad in zip(feed.sample_ids, rows, strict=True) if is_bad]
    return bad


def save_batch(run: Run, finding: Finding, feed: Feed) -> Finding:
    """Write a micro-batch, so that it can be looked at: `torch.load(path, weights_only=True)` reads it.

    The finding with its path; as it was where it cannot be written, for what is told of it is worth more than the file.
    """
    if run.batches_saved >= MOST_SAVED:
        return finding
    step = run.callbacks.state.global_step + 1
    folder = Path(run.args.output_dir or ".") / FOLDER
    path = folder / f"step-{step}-micro-batch-{finding.micro_batch}.pt"
    seed = mixed(run.args.seed, run.callbacks.state.global_step, finding.micro_batch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({**asdict(finding), "step": step, "seed": seed, "inputs": _plain(feed.inputs)}, path)
    except (OSError, RuntimeError):
        return finding
    run.batches_saved += 1
    return Finding(**{**asdict(finding), "file": str(path)})


def _plain(value: Any) -> Any:
    """`value` in types that are read without unpickling classes; text for any other."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
