"""Weights that have come apart are found at the step that was asked for, named, and brought together again."""

import pytest

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import ReplicaError
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet

BACKENDS = ("gloo", "shm")


def train(rank, size, folder, fault, action, every, save="no"):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        max_steps=8,
        learning_rate=1e-2,
        ddp_drift_check_steps=every,
        ddp_drift_action=action,
        save_strategy=save,
        save_steps=4,
        logging_strategy="no",
        disable_tqdm=True,
    )
    callbacks = [] if fault is None else [faults.flip_bit(rank=fault, step=3, parameter="net.3.weight", event="on_step_end")]
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(64), callbacks=callbacks)
    try:
        trainer.train()
    except ReplicaError as error:
        return str(error), trainer.state.global_step, sum(each.fired for each in callbacks)
    state = trainer.optimizer.state_dict()["state"]
    moments = digest((f"{i}{key}", each[key]) for i, each in state.items() for key in ("exp_avg", "exp_avg_sq"))
    return digest(trainer.model.named_parameters()), moments, sum(each.fired for each in callbacks)


def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_step_rank_and_tensor(ranks, tmp_path):
    found = ranks.run(train, tmp_path, 1, "raise", 3)
    assert [fired for _, _, fired in found] == [0, 1]
    assert {step for _, step, _ in found} == {3}
    for words, _, _ in found:
        assert "Weights have come apart after step 3: net.3.weight on rank(s) 1 is not as on rank 0" in words
        assert 'ddp_drift_action="repair"' in words


def test_no_checkpoint_is_written_of_weights_that_differ(ranks, tmp_path):
    for words, step, _ in ranks.run(train, tmp_path, 1, "raise", 0, "steps"):
        assert "Weights have come apart after step 4" in words
        assert step == 4
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("bad", [0, 3])
def test_the_majority_gives_all_ranks_its_weights_as_if_nothing_had_been(four_ranks, tmp_path, bad):
    well = four_ranks.run(train, tmp_path, None, "raise", 3)
    repaired = four_ranks.run(train, tmp_path, bad, "repair", 3)
    assert sum(fired for _, _, fired in repaired) == 1
    assert {each[:2] for each in repaired} == {each[:2] for each in well}
    assert len({each[:2] for each in well}) == 1


def test_of_two_ranks_rank_0_counts(ranks, tmp_path):
    well = ranks.run(train, tmp_path, None, "raise", 3)
    assert {each[:2] for each in ranks.run(train, tmp_path, 1, "repair", 3)} == {well[0][:2]}
    repaired = ranks.run(train, tmp_path, 0, "repair", 3)
    assert repaired[0][:2] == repaired[1][:2] != well[0][:2]
