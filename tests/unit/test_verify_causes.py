"""The first difference between two ledgers, in the order in which one thing follows from another, and its likely cause."""

from dataclasses import replace

import pytest

from allstep.cli.verify.causes import Evidence, likely_cause
from allstep.cli.verify.compare import What, first_difference
from allstep.cli.verify.words import described, verdict
from allstep.report.ledger import LedgerStep, MicroBatchLine


def micro_batch(number, **changes):
    line = MicroBatchLine(
        number=number, samples=[2 * number, 2 * number + 1], weight=2.0, loss=0.5, rows=[f"a{number}", f"b{number}"]
    )
    return replace(line, **changes)


def step_of(number=1, **changes):
    tensors = {"w": "1", "v": "2"}
    step = LedgerStep(
        step=number,
        epoch=0,
        world_size=2,
        threads=1,
        block=2,
        in_order=True,
        learning_rate=0.1,
        loss=0.5,
        weight=8.0,
        grad_norm=1.0,
        micro_batches=[micro_batch(index) for index in range(4)],
        gradients=tensors,
        parameters=tensors,
        buffers={"mean": "3"},
    )
    return replace(step, **changes)


def with_one(number, **changes):
    return [micro_batch(index, **(changes if index == number else {})) for index in range(4)]


CHANGES = [
    (What.SAMPLES, {"micro_batches": with_one(2, samples=[9, 5])}),
    (What.INPUTS, {"micro_batches": with_one(1, rows=["a1", "zz"])}),
    (What.WEIGHT, {"micro_batches": with_one(1, weight=3.0)}),
    (What.MICRO_LOSS, {"micro_batches": with_one(3, loss=0.25)}),
    (What.LOSS, {"loss": 0.500001}),
    (What.GRADIENT, {"gradients": {"w": "1", "v": "9"}}),
    (What.NORM, {"grad_norm": 1.1}),
    (What.RATE, {"learning_rate": 0.2}),
    (What.PARAMETER, {"parameters": {"w": "9", "v": "2"}}),
    (What.BUFFER, {"buffers": {"mean": "4"}}),
]


@pytest.mark.parametrize(("what", "change"), CHANGES, ids=lambda value: getattr(value, "name", ""))
def test_each_difference_is_found_in_its_step(what, change):
    here = {1: step_of(1), 2: step_of(2), 3: step_of(3)}
    there = {1: step_of(1), 2: step_of(2, **change), 3: step_of(3, loss=7.0)}
    found = first_difference(here, there)
    assert (found.step, found.what) == (2, what)
    assert first_difference(there, here).what is what
    assert first_difference(here, dict(here)) is None


def test_causes_come_before_what_follows_from_them():
    together = {"micro_batches": with_one(3, loss=0.25), "loss": 0.6, "gradients": {"w": "1", "v": "9"}, "buffers": {}}
    found = first_difference({1: step_of()}, {1: step_of(**together)})
    assert (found.what, found.micro_batch, found.samples, found.count, found.of) == (What.MICRO_LOSS, 3, (6, 7), 1, 4)


def test_tensors_that_were_not_written_are_not_compared():
    assert first_difference({1: step_of()}, {1: step_of(gradients={}, parameters={}, buffers={})}) is None


def test_with_a_tolerance_losses_may_differ_and_tensors_are_not_compared():
    other = step_of(loss=0.5000001, grad_norm=1.0000001, gradients={"w": "7"}, parameters={"w": "7"})
    assert first_difference({1: step_of()}, {1: other}, 1e-6) is None
    assert first_difference({1: step_of()}, {1: other}, 1e-8).what is What.LOSS


def cause(change, is_random=None, **of_both):
    here, there = step_of(**of_both), step_of(**{**of_both, **change})
    found = first_difference({1: here}, {1: there})
    return likely_cause(found, Evidence(here=here, there=there, is_random=is_random))


def test_a_sample_that_another_run_has_elsewhere_is_named():
    here = {1: step_of(1), 2: step_of(2, micro_batches=with_one(0, samples=[40, 41], rows=["x", "y"]))}
    there = {1: step_of(1, micro_batches=with_one(2, rows=["a2", "y"])), 2: here[2]}
    found = first_difference(here, there)
    assert found.moved_from == 41
    said = likely_cause(found, Evidence(here=here[1], there=there[1], is_random=False))
    assert said.startswith(
        "Samples are swapped: in place of a sample of this micro-batch the second run has what the first has"
    )
    assert "for sample 41." in said


@pytest.mark.parametrize(
    ("change", "is_random", "said"),
    [
        ({"micro_batches": with_one(1, rows=["q", "r"])}, True, "Two runs alike differ too. The data is random"),
        ({"micro_batches": with_one(1, rows=["q", "r"])}, False, "Two runs alike are the same. What the dataset or collator"),
        ({"micro_batches": with_one(1, loss=9.0)}, True, "The model draws random numbers from a generator that is not seeded"),
        ({"micro_batches": with_one(1, loss=9.0)}, False, "The model or the loss takes another branch"),
        ({"micro_batches": with_one(1, loss=9.0)}, None, "Either: The model draws"),
        ({"micro_batches": with_one(1, samples=[1, 0])}, None, "The samples come in another order"),
        ({"micro_batches": [micro_batch(0)]}, None, "other numbers of samples"),
        ({"threads": 4, "loss": 2.0}, None, "CPU threads: a rank of one run has 1, of the other 4."),
        ({"threads": 4, "micro_batches": with_one(1, samples=[1, 0])}, None, "The samples come in another order"),
        (
            {"in_order": False, "gradients": {"w": "5", "v": "2"}},
            None,
            "whatever order the backend has. Set deterministic_reduct",
        ),
        ({"block": 3, "loss": 0.1}, None, "2 rank(s) run blocks of 3 micro-batches, no power of two"),
        ({"gradients": {"w": "5", "v": "2"}}, True, "Backward is random: a kernel that is not deterministic"),
        ({"gradients": {"w": "5", "v": "2"}}, False, "A backward, or a hook on a gradient, depends on rank"),
        ({"parameters": {"w": "5", "v": "2"}}, None, "Gradients are the same, the step is not"),
        ({"buffers": {"mean": "5"}}, None, "BatchNorm's running statistics are those of rank 0's micro-batches"),
        ({"learning_rate": 7.0}, None, "The schedule depends on world size"),
        (
            {"parameters": {"w": "5", "v": "2"}, "ranks_differ": ["parameters"]},
            None,
            "do not agree among themselves on: parameters",
        ),
    ],
)
def test_the_likely_cause_is_named(change, is_random, said):
    assert said in cause(change, is_random)


def test_what_is_said_of_a_difference_names_place_and_values():
    change = {"parameters": {"w": "5", "v": "2"}}
    found = first_difference({1: step_of()}, {1: step_of(**change)})
    assert described(found, "1 rank(s)", "16 rank(s)").splitlines() == [
        "NOT identical: first difference at step 1, parameter 'w' — 1 of 2 differ",
        "   1 rank(s): 1",
        "  16 rank(s): 5",
    ]


def test_the_verdict_counts_what_was_compared():
    said = verdict({1: step_of(1), 2: step_of(2)}, [1, 2, 4], 0.0)
    assert said.startswith("identical for 2 steps on 1, 2, 4 rank(s), to the bit: 16 samples")
    assert verdict({1: step_of(1)}, [1, 2], 1e-5).startswith("the same within 1e-05 for 1 steps on 1, 2 rank(s)")
