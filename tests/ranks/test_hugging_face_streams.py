"""Streaming datasets of Hugging Face: shuffled, sharded, resumed from their own state, with the same bits as in one process."""

import threading

import pytest
import torch

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.data.stream_reader import keeps_state
from allstep.testing.models import RegressionNet
from allstep.testing.ranks import one_thread

datasets = pytest.importorskip("datasets")

SAMPLES = 22


def stream(kind):
    """22 rows in 5 shards."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))
    rows = {"x": x.tolist(), "labels": x.sum(1).sin().tolist(), "number": list(range(SAMPLES)), "unused": ["text"] * SAMPLES}
    made = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=5)
    if kind == "mapped":
        made = made.map(lambda row: {"x": [value + 1 for value in row["x"]]}).filter(lambda row: row["number"] % 5 != 4)
    if kind == "batched":
        made = made.map(lambda rows: {"x": rows["x"]}, batched=True, batch_size=3)
    if kind == "torch":
        made = made.with_format("torch")
    return made.shuffle(seed=1, buffer_size=4) if kind == "shuffled" else made


class Net(RegressionNet):
    def __init__(self):
        super().__init__(0.2)
        self.seen = []

    def forward(self, x, labels=None, number=None):
        if self.training:
            self.seen += number.tolist()
        return super().forward(x, labels)


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.at


def train(rank, size, folder, kind, arguments=(), stop=None, resume=None):
    settings = {
        "per_device_train_batch_size": 2,
        "global_batch_size": 4,
        "max_steps": 13,
        "learning_rate": 1e-2,
        "deterministic_reduction": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **{**settings, **dict(arguments)})
    said = []
    with one_thread():
        trainer = Trainer(Net(), args, train_dataset=stream(kind), callbacks=[Stop(stop)])
        trainer.sinks.message = said.append
        trainer.train(resume_from_checkpoint=resume)
        predicted = trainer.predict(stream(kind)).label_ids.tolist()
    for thread in threading.enumerate():  # a shuffled stream that is let go of tells its threads to end, and does not wait
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(30)
    return {
        "weights": digest(trainer.model.named_parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seen": trainer.model.seen,
        "said": said,
        "predicted": predicted,
    }


def assert_same(run, other):
    assert (run["weights"], run["losses"], run["predicted"]) == (other["weights"], other["losses"], other["predicted"])


KINDS = ["plain", "mapped", "batched", "torch", "shuffled"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_and_their_workers_train_as_one_process_does(ranks, tmp_path, kind, workers):
    alone = train(0, 1, tmp_path / "one", kind)
    epoch = sorted(row["number"] for row in stream(kind))
    assert sorted(alone["seen"][: len(epoch)]) == epoch
    for run in ranks.run(train, tmp_path / "two", kind, {"dataloader_num_workers": workers}):
        assert_same(run, alone)


def test_an_epoch_of_a_shuffled_stream_has_an_order_of_its_own(tmp_path):
    seen = train(0, 1, tmp_path, "shuffled")["seen"]
    first, second = seen[:SAMPLES], seen[SAMPLES : 2 * SAMPLES]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SAMPLES))


@pytest.mark.parametrize("stop", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_one_that_never_stopped(ranks, tmp_path, kind, stop):
    whole = train(0, 1, tmp_path / "whole", kind)
    ranks.run(train, tmp_path / "parts", kind, {"save_strategy": "steps", "save_steps": 1}, stop)
    run = train(0, 1, tmp_path / "parts", kind, {}, None, True)
    assert_same(run, whole)
    skipped = [line for line in run["said"] if line.startswith("skipp")]
    assert len(skipped) == (kind == "shuffled")  # what waits in its buffer is not in its state


def test_a_shuffle_buffer_is_seen_wherever_it_lies():
    assert keeps_state(stream("batched"))
    shuffled = stream("shuffled").map(lambda row: row)
    assert not keeps_state(shuffled.take(5))
    assert not keeps_state(datasets.concatenate_datasets([stream("plain"), shuffled]))


def test_each_rank_reads_its_own_shards_where_that_is_asked_for(ranks, tmp_path):
    runs = ranks.run(train, tmp_path, "plain", {"dataloader_split_streams": "shards", "max_steps": 7})
    parts = [[row["number"] for row in stream("plain").shard(num_shards=2, index=rank)] for rank in range(2)]
    assert [run["seen"][: len(part)] for run, part in zip(runs, parts, strict=True)] == parts
    assert sorted(parts[0] + parts[1]) == list(range(SAMPLES))
    assert "by shards: 5 over 2 ranks, which does not divide: 3 on 1 of them, 2 on the others" in runs[0]["said"][0]
