"""With `save_in_background` training goes on while a checkpoint is written, and the checkpoint is what it would have been."""

import threading
from pathlib import Path

import pytest

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.checkpoint.manifest import MANIFEST_FILE
from allstep.checkpoint.store import CheckpointStore
from allstep.comm.agreement import digest
from allstep.testing.disk import acting_on_disk
from allstep.testing.models import Noisy, RegressionNet

BACKENDS = ("gloo", "shm")
DEADLINE = 60
"""Seconds after which a write that waits for training gives up."""


class Events(TrainerCallback):
    """What happened on this rank, in order; writes that begin at a step of `held` wait for so many further steps."""

    def __init__(self, held: dict[int, int]):
        self.held, self.seen, self.step, self.moved = held, [], 0, threading.Condition()

    def on_step_end(self, args, state, control, **kwargs):
        with self.moved:
            self.step = state.global_step
            self.seen.append(f"step {state.global_step}")
            self.moved.notify_all()

    def on_save(self, args, state, control, checkpoint, **kwargs):
        assert CheckpointStore(checkpoint.parent).problems(checkpoint) == []
        self.seen.append(f"saved {checkpoint.name} at {state.global_step}")

    def on_disk(self, action, path):
        if action == "write" and path.name == f"rng_state_{self.rank}.pth":
            number = int(path.parent.name.rpartition("-")[2])
            with self.moved:
                assert self.moved.wait_for(lambda: self.step >= number + self.held.get(number, 0), DEADLINE)
                self.seen.append(f"write {number}")


def train(rank, size, folder, beside, held=None, options=None, dropout=0.3):
    events = Events(held or {})
    events.rank = rank
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        max_steps=12,
        learning_rate=1e-2,
        save_steps=4,
        save_in_background=beside,
        disable_tqdm=True,
        **(options or {}),
    )
    trainer = Trainer(RegressionNet(dropout), args, train_dataset=Noisy(50), eval_dataset=Noisy(7), callbacks=[events])
    with acting_on_disk(events.on_disk):
        trainer.train()
    left = [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]
    return {"events": events.seen, "weights": digest(trainer.model.named_parameters()), "left": left}


def content(folder: Path) -> dict[str, bytes]:
    """All files of all checkpoints; the manifest tells the time, and the arguments say how it was saved."""
    files = (path for path in folder.glob("checkpoint-*/*") if path.name not in (MANIFEST_FILE, "training_args.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_checkpoints_have_the_same_bytes_and_training_went_on(ranks, tmp_path):
    """Every write waits until three more steps have been taken: were training to wait for it, neither would go on."""
    waited = ranks.run(train, tmp_path / "waited", False)
    beside = ranks.run(train, tmp_path / "beside", True, {4: 3, 8: 3})
    assert content(tmp_path / "waited") == content(tmp_path / "beside")
    assert len(content(tmp_path / "waited")) == 3 * 6
    assert waited[0]["weights"] == beside[0]["weights"]
    for rank in (0, 1):
        events = beside[rank]["events"]
        in_order = ["step 4", "step 7", "write 4", next(event for event in events if "saved checkpoint-4" in event)]
        assert sorted(in_order, key=events.index) == in_order
        assert [event for event in waited[rank]["events"] if "saved" in event] == [
            f"saved checkpoint-{step} at {step}" for step in (4, 8, 12)
        ]
        assert beside[rank]["left"] == []


@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_bring_it_in_at_one_step_when_the_slowest_has_written(ranks, tmp_path, slow):
    """Its write begins when step 8 has been taken: the save of that step waits for it."""
    outcomes = ranks.run(train_unlike, tmp_path, slow)
    saved = [[event for event in outcome["events"] if "saved" in event] for outcome in outcomes]
    assert saved[0] == saved[1]
    assert saved[0][0] == "saved checkpoint-4 at 8"
    assert saved[0][1].startswith("saved checkpoint-8 at ")
    assert saved[0][2] == "saved checkpoint-12 at 12", "the end of training waits for the last"
    for outcome in outcomes:
        assert outcome["events"].index(saved[0][0]) < outcome["events"].index("write 8")


def train_unlike(rank, size, folder, slow):
    return train(rank, size, folder, True, {4: 4} if rank == slow else {})


class SaveOnce(TrainerCallback):
    """Saves after a step, and ends training when that is on disk."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 4

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


def save_once(rank, size, folder):
    args = TrainingArguments(
        str(folder), max_steps=3000, save_strategy="no", logging_strategy="no", save_in_background=True, disable_tqdm=True
    )
    return Trainer(RegressionNet(), args, train_dataset=Noisy(50), callbacks=[SaveOnce()]).train().global_step


def test_it_comes_in_between_steps_without_waiting_for_another_save_or_the_end(ranks, tmp_path):
    steps = ranks.run(save_once, tmp_path)
    assert steps[0] == steps[1] < 3000


def test_the_best_is_loaded_at_the_end_though_it_was_still_being_written(ranks, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "save_total_limit": 1}
    waited = ranks.run(train, tmp_path / "waited", False, None, options)
    beside = ranks.run(train, tmp_path / "beside", True, None, options)
    assert [outcome["weights"] for outcome in beside] == [outcome["weights"] for outcome in waited]
    names = [sorted(path.name for path in (tmp_path / how).glob("checkpoint-*")) for how in ("waited", "beside")]
    assert names[0] == names[1]


class Torn(Noisy):
    """Its rows cannot be read on rank 1 after `armed`, which also lets a write go on that waits for it."""

    def __init__(self, samples, rank):
        super().__init__(samples)
        self.rank, self.armed, self.raised = rank, False, threading.Event()

    def __getitem__(self, index):
        if self.armed and self.rank == 1:
            self.raised.set()
            raise LookupError("torn")
        return super().__getitem__(index)


def fail(rank, size, folder):
    rows = Torn(50, rank)

    class Arm(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            rows.armed = state.global_step >= 5

    def on_disk(action, path):
        if rank == 1 and action == "write":
            assert rows.raised.wait(DEADLINE)

    args = TrainingArguments(str(folder), max_steps=20, save_steps=4, save_in_background=True, disable_tqdm=True)
    trainer = Trainer(RegressionNet(), args, train_dataset=rows, callbacks=[Arm()])
    with acting_on_disk(on_disk), pytest.raises(Exception, match="torn") as raised:
        trainer.train()
    return type(raised.value).__name__, [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]


def test_a_run_that_fails_lets_go_of_what_was_being_written(ranks, tmp_path):
    assert ranks.run(fail, tmp_path) == [("RankFailedError", []), ("LookupError", [])]
    assert not list(tmp_path.glob("checkpoint-*"))
