"""What a callback wishes on one rank becomes the decision of all, at that very step."""

import pytest

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.testing.models import Regression, RegressionNet
from allstep.trainer import decisions

BACKENDS = ("gloo", "shm")


class Wishes(TrainerCallback):
    """Sets one flag of `control`, at one event of one step."""

    def __init__(self, event, step, flag):
        self.step, self.flag = step, flag
        setattr(self, event, self.at)

    def at(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            setattr(control, self.flag, True)


class Notes(TrainerCallback):
    decides_alike = True

    def __init__(self):
        self.seen = []

    def on_evaluate(self, args, state, control, **kwargs):
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("save", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen.append(("log", state.global_step))


def train(rank, size, folder, event, step, flag, who, everywhere=False):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="epoch",
        disable_tqdm=True,
    )
    notes = Notes()
    callbacks = [notes] + ([Wishes(event, step, flag)] if rank == who or everywhere else [])
    trainer = Trainer(
        RegressionNet(), args, train_dataset=Regression(24), eval_dataset=Regression(5, index_from=99), callbacks=callbacks
    )
    trainer.train()
    return trainer.state.global_step, notes.seen


EPOCH = 6
"""Steps of an epoch: 24 samples, 2 ranks x 2."""


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("event", "flag", "expected"),
    [
        ("on_step_end", "should_training_stop", (4, [("evaluate", 4)])),
        ("on_step_begin", "should_training_stop", (5, [("evaluate", 5)])),
        ("on_step_end", "should_epoch_stop", (4 + EPOCH, [("evaluate", 4), ("evaluate", 4 + EPOCH)])),
        ("on_step_end", "should_save", (12, [("save", 4), ("evaluate", 6), ("evaluate", 12)])),
        ("on_step_end", "should_evaluate", (12, [("evaluate", 4), ("evaluate", 6), ("evaluate", 12)])),
        ("on_step_end", "should_log", (12, [("log", 4), ("evaluate", 6), ("evaluate", 12)])),
    ],
)
def test_a_wish_of_one_rank_is_done_by_all_at_that_step(ranks, tmp_path, event, flag, expected, who):
    assert ranks.run(train, tmp_path, event, 4, flag, who) == [expected] * 2


@pytest.mark.parametrize("flag", ["should_training_stop", "should_save"])
def test_a_wish_at_an_evaluation_is_done_by_all(ranks, tmp_path, flag):
    steps, seen = zip(*ranks.run(train, tmp_path, "on_evaluate", EPOCH, flag, 1), strict=True)
    assert set(steps) == {EPOCH if flag == "should_training_stop" else 2 * EPOCH}
    assert seen[0] == seen[1]
    assert (("save", EPOCH) in seen[0]) == (flag == "should_save")


def count_collectives(rank, size, folder, alike):
    """The exchanges of wishes in a run."""
    asked = []
    exchange = decisions.any_rank
    decisions.any_rank = lambda communicator, bits: (asked.append(bits), exchange(communicator, bits))[1]
    Wishes.decides_alike = alike
    try:
        train(rank, size, folder, "on_step_end", -1, "should_save", rank, everywhere=True)
    finally:
        del Wishes.decides_alike
        decisions.any_rank = exchange
    return len(asked)


def test_callbacks_that_decide_alike_cost_no_collective(ranks, tmp_path):
    assert ranks.run(count_collectives, tmp_path, True) == [1, 1]  # at the end, for signals
    assert ranks.run(count_collectives, tmp_path, False) == [13, 13]  # and behind each of 12 steps


def test_one_rank_alone_stops_where_it_wishes(tmp_path):
    steps, _ = train(0, 1, tmp_path, "on_step_end", 4, "should_training_stop", 0)
    assert steps == 4


def wish_before_the_first_step(rank, size, folder):
    args = TrainingArguments(
        str(folder), max_steps=5, eval_on_start=True, save_strategy="no", logging_strategy="no", disable_tqdm=True
    )
    callbacks = [Wishes("on_evaluate", 0, "should_training_stop")] if rank == 1 else []
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(99), eval_dataset=Regression(5), callbacks=callbacks)
    trainer.train()
    return trainer.state.global_step


def test_a_wish_at_the_evaluation_before_the_first_step_is_done_by_all(ranks, tmp_path):
    assert ranks.run(wish_before_the_first_step, tmp_path) == [0, 0]
