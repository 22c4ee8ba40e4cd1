"""What is changed about a script that is verified: its global batch, and what it writes; nothing of its schedule."""

import pytest

from allstep import TrainingArguments
from allstep.trainer.verification import VARIABLE, Verification


def adapted(asked, **arguments):
    args = TrainingArguments("own", per_device_train_batch_size=4, max_steps=100, eval_strategy="steps", **arguments)
    changed = Verification(output_dir="aside", steps=5, **asked).adapted(args)
    assert (args.output_dir, args.eval_strategy, args.ledger) == ("own", "steps", False)  # the script's own is as it was
    return changed


@pytest.mark.parametrize(
    ("asked", "arguments", "expected"),
    [
        ({"ranks": 4}, {}, 16),
        ({"ranks": 4}, {"gradient_accumulation_steps": 2}, 32),
        ({"ranks": 4}, {"global_batch_size": 8}, 8),
        ({"micro_batches": 6}, {"gradient_accumulation_steps": 2}, 24),  # as recorded, whatever the script has now
        ({"micro_batches": 6}, {"global_batch_size": 8}, 24),
    ],
)
def test_the_global_batch_is_that_of_all_runs(asked, arguments, expected):
    changed = adapted(asked, **arguments)
    assert (changed.global_batch_size, changed.gradient_accumulation_steps) == (expected, 1)


def test_nothing_is_evaluated_or_saved_and_all_is_written_down_beside():
    changed = adapted({"ranks": 2}, save_strategy="steps", load_best_model_at_end=True)
    assert {changed.eval_strategy, changed.save_strategy, changed.logging_strategy} == {"no"}
    assert (changed.output_dir, changed.ledger, changed.ledger_digest_steps) == ("aside", True, 1)
    assert (changed.max_steps, changed.load_best_model_at_end) == (100, False)


def test_it_travels_in_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Verification.asked_for() is None
    asked = Verification(output_dir="aside", steps=5, micro_batches=2, resume_from="checkpoint-3")
    monkeypatch.setenv(VARIABLE, asked.to_json())
    assert Verification.asked_for() == asked
