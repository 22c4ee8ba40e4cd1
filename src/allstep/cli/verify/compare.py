"""Two ledgers, step by step: the first thing that is not the same. Pure."""

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from allstep.report.ledger import LedgerStep, MicroBatchLine

__all__ = ["Difference", "What", "first_difference", "steps_in_both"]


class What(enum.Enum):
    """Things that a ledger holds, in the order in which one follows from the other."""

    SAMPLES = "samples"
    INPUTS = "inputs"
    WEIGHT = "weight"
    MICRO_LOSS = "loss of a micro-batch"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "norm of the gradients"
    RATE = "learning rate"
    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two runs part."""

    step: int
    what: What
    here: str
    """As the first run has it."""
    there: str
    """As the second one has it."""
    micro_batch: int | None = None
    """Place in the grid, where it is about one micro-batch."""
    samples: tuple[int, ...] = ()
    """Samples of that micro-batch."""
    name: str = ""
    """Of the first tensor that differs."""
    count: int = 1
    """Tensors, or micro-batches, that differ in this step."""
    of: int = 1
    """How many there are."""
    moved_from: int | None = None
    """For inputs: the sample whose inputs the second run has where the first has another one's; None: of none."""


def steps_in_both(here: Mapping[int, LedgerStep], there: Mapping[int, LedgerStep]) -> list[int]:
    """Steps that both ledgers hold, in order."""
    return sorted(here.keys() & there.keys())


def first_difference(
    here: Mapping[int, LedgerStep], there: Mapping[int, LedgerStep], tolerance: float = 0.0
) -> Difference | None:
    """The first difference of the first step that has one; None where all steps that both hold are the same.

    Args:
        tolerance: relative; losses and norms within it are the same, and digests of tensors are not compared. 0: to the bit.
    """
    for step in steps_in_both(here, there):
        found = next(_differences(here[step], there[step], tolerance), None)
        if found is not None and found.what is What.INPUTS:
            return replace(found, moved_from=_moved(here, there[step], found))
        if found is not None:
            return found
    return None


def _differences(here: LedgerStep, there: LedgerStep, tolerance: float) -> Iterator[Difference]:
    yield from _of_micro_batches(here, there, tolerance)
    if not _same(here.loss, there.loss, tolerance):
        yield Difference(step=here.step, what=What.LOSS, here=repr(here.loss), there=repr(there.loss))
    if not tolerance:
        yield from _of_tensors(here.step, What.GRADIENT, here.gradients, there.gradients)
    if not _same(here.grad_norm, there.grad_norm, tolerance):
        yield Difference(step=here.step, what=What.NORM, here=repr(here.grad_norm), there=repr(there.grad_norm))
    if not _same(here.learning_rate, there.learning_rate, tolerance):
        yield Difference(step=here.step, what=What.RATE, here=repr(here.learning_rate), there=repr(there.learning_rate))
    if not tolerance:
        yield from _of_tensors(here.step, What.PARAMETER, here.parameters, there.parameters)
        yield from _of_tensors(here.step, What.BUFFER, here.buffers, there.buffers)


def _of_micro_batches(here: LedgerStep, there: LedgerStep, tolerance: float) -> Iterator[Difference]:
    ours, theirs = _by_number(here), _by_number(there)
    numbers = sorted(ours.keys() | theirs.keys())
    empty = MicroBatchLine(number=0, samples=[], weight=0, loss=None)
    pairs = [(number, ours.get(number, empty), theirs.get(number, empty)) for number in numbers]
    for what, same, shown in (
        (What.SAMPLES, lambda a, b: a.samples == b.samples, lambda each: str(each.samples)),
        (What.INPUTS, lambda a, b: not a.rows or not b.rows or a.rows == b.rows, lambda each: " ".join(each.rows)),
        (What.WEIGHT, lambda a, b: a.weight == b.weight, lambda each: repr(each.weight)),
        (What.MICRO_LOSS, lambda a, b: _same(a.loss, b.loss, tolerance), lambda each: repr(each.loss)),
    ):
        apart = [(number, a, b) for number, a, b in pairs if not same(a, b)]
        if apart:
            number, a, b = apart[0]
            yield Difference(
                step=here.step,
                what=what,
                here=shown(a),
                there=shown(b),
                micro_batch=number,
                samples=tuple(a.samples),
                count=len(apart),
                of=len(pairs),
            )


def _moved(here: Mapping[int, LedgerStep], there: LedgerStep, found: Difference) -> int | None:
    """The sample that has, in the first run, the first inputs of the second run that differ."""
    micro_batches = [each for step in here.values() for each in step.micro_batches]
    owner = {row: sample for each in micro_batches for row, sample in zip(each.rows, each.samples, strict=False)}
    theirs = next(each for each in there.micro_batches if each.number == found.micro_batch)
    ours = found.here.split()
    return next((owner.get(row) for own, row in zip(ours, theirs.rows, strict=False) if own != row), None)


def _of_tensors(step: int, what: What, here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[Difference]:
    if not here or not there:
        return  # not written in this step
    names = list(dict.fromkeys((*here, *there)))
    apart = [name for name in names if here.get(name) != there.get(name)]
    if apart:
        first = apart[0]
        ours, theirs = here.get(first, "not there"), there.get(first, "not there")
        yield Difference(step=step, what=what, here=ours, there=theirs, name=first, count=len(apart), of=len(names))


def _by_number(step: LedgerStep) -> dict[int, MicroBatchLine]:
    return {each.number: each for each in step.micro_batches}


def _same(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=tolerance)
