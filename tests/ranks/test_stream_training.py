"""Training on streams: each sample once, the same steps and bits on any number of ranks and loader workers."""

import contextlib
import io
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import ArgumentsError, CheckpointError
from allstep.testing.models import RegressionNet
from allstep.testing.ranks import RankPool, one_thread

GLOBAL = 6


def row(index):
    x = torch.randn(4, generator=torch.Generator().manual_seed(index))
    return {"index": torch.tensor(index), "x": x, "labels": x.sum().sin(), "not taken": "by the model"}


class Stream(IterableDataset):
    """Rows from `start` on, without a length; counts what was read in this process."""

    def __init__(self, samples, start=0):
        self.samples, self.start, self.read = samples, start, 0

    def __iter__(self):
        for index in range(self.start, self.start + self.samples):
            self.read += 1
            yield row(index)


class Sized(Stream):
    def __len__(self):
        return self.samples


class NoisyStream(Sized):
    """Drawn from all three generators while it is read, in an order that differs by epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(self.samples).tolist()
        for index in order:
            self.read += 1
            noise = torch.rand(()) + float(np.random.rand()) + random.random()
            made = row(index)
            yield {**made, "x": made["x"] + 0.1 * noise}


class Resumable(NoisyStream):
    """Says where it is."""

    at = begin = 0
    read_anywhere = 0
    """By all of its kind in this process: who goes on from a state may work on a copy."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]

    def __iter__(self):
        begin, self.begin = self.begin, 0
        order = np.random.default_rng(self.epoch).permutation(self.samples).tolist()
        for self.at, index in enumerate(order[begin:], begin + 1):
            self.read += 1
            type(self).read_anywhere += 1
            yield {**row(index), "x": row(index)["x"] + 0.1 * torch.rand(())}


class Forgetful(Resumable):
    """What it says leads elsewhere."""

    def state_dict(self):
        return {"at": max(0, self.at - 1)}


class DealsItself(Stream):
    """Gives each loader worker its part, as torch's documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        for index in range(self.samples):
            if worker is None or index % worker.num_workers == worker.id:
                yield row(index)


class Sharded(IterableDataset):
    """Shards of different lengths; `shard` gives each `num_shards`-th."""

    def __init__(self, shards):
        self.shards = shards

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return Sharded(self.shards[index::num_shards])

    def __iter__(self):
        for shard in self.shards:
            yield from map(row, shard)


class Once(IterableDataset):
    """Can be read once only."""

    def __init__(self, samples):
        self.rows = map(row, range(samples))

    def __iter__(self):
        return self.rows


class Torn(Stream):
    def __iter__(self):
        for made in super().__iter__():
            if made["index"] == 7:
                raise LookupError("row 7 is torn")
            yield made


class Net(RegressionNet):
    """Keeps the rows that it was trained on, by step."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.seen, self.step = [], 0

    def forward(self, index, x, labels=None):
        if self.training:
            self.seen.append((self.step, index.tolist()))
        return super().forward(x, labels)


class Steps(TrainerCallback):
    """Tells the model which step it is; stops after step `stop`."""

    def __init__(self, stop):
        self.stop, self.epochs = stop, []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.stop

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epochs.append((state.global_step, state.epoch))


def drawing(samples):
    """A collator that draws."""
    return {
        "index": torch.stack([sample["index"] for sample in samples]),
        "x": torch.stack([sample["x"] for sample in samples]) + 0.01 * random.random() + 0.01 * torch.rand(()),
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def train(rank, size, folder, dataset, stop=None, resume=None, collator=None, **arguments):
    settings = {
        "per_device_train_batch_size": 1,
        "global_batch_size": GLOBAL,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "deterministic_reduction": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    steps = Steps(stop)
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    with one_thread(), contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = Trainer(Net(0.2), args, collator, dataset, callbacks=[steps])
        output = trainer.train(resume_from_checkpoint=resume)
    return {
        "seen": trainer.model.seen,
        "weights": digest(trainer.model.named_parameters()),
        "losses": [(each["step"], each["epoch"], each["loss"]) for each in trainer.state.log_history if "loss" in each],
        "epochs": steps.epochs,
        "samples": output.report.samples,
        "said": said.getvalue(),
    }


def train_with(rank, size, folder, make, samples, stop=None, resume=None, collator=None, arguments=()):
    return train(rank, size, folder, make(samples), stop, resume, collator, **dict(arguments))


def by_step(runs):
    """Step -> the rows of all ranks, sorted."""
    steps = {}
    for run in runs:
        for step, rows in run["seen"]:
            steps.setdefault(step, []).extend(rows)
    return {step: sorted(steps[step]) for step in sorted(steps)}


def same(run):
    return {key: run[key] for key in ("weights", "losses", "epochs")}


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3) as pool:
        yield pool


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_is_the_next_samples_of_the_stream_each_once_on_any_number_of_ranks_and_workers(
    ranks, three_ranks, tmp_path, workers
):
    arguments = {"dataloader_num_workers": workers}
    runs = {1: [train_with(0, 1, tmp_path / "1", Stream, 11, arguments=arguments)]}
    for pool, size in ((ranks, 2), (three_ranks, 3)):
        runs[size] = pool.run(train_with, tmp_path / str(size), Stream, 11, None, None, None, arguments)
    first, rest = list(range(6)), list(range(6, 11))
    for of_ranks in runs.values():
        assert by_step(of_ranks) == {0: first, 1: rest, 2: first, 3: rest}
        assert of_ranks[0]["samples"] == 22
        assert of_ranks[0]["epochs"][0] == (2, 1.0)
    for number, run in enumerate(runs[3]):  # a rank has a contiguous block
        assert run["seen"][:2] == [(0, [2 * number]), (0, [2 * number + 1])]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_weights_and_losses_are_the_same_bits_on_one_rank_and_two(ranks, tmp_path, workers):
    """Noise from three generators while the stream is read, an order by epoch, a collator that draws, dropout, a tail."""
    arguments = {"per_device_train_batch_size": 3, "num_train_epochs": 2, "max_steps": -1}
    alone = train_with(0, 1, tmp_path / "1", NoisyStream, 14, None, None, drawing, arguments)
    assert [step for step, _ in alone["epochs"]] == [3, 6]
    arguments["dataloader_num_workers"] = workers
    for run in ranks.run(train_with, tmp_path / "2", NoisyStream, 14, None, None, drawing, arguments):
        assert same(run) == same(alone)


@pytest.mark.parametrize("samples", [1, 2, 5, 6, 7, 12, 13])
def test_every_length_ends_at_the_same_step_on_all_ranks(ranks, three_ranks, tmp_path, samples):
    alone = train_with(0, 1, tmp_path / "1", Stream, samples)
    assert Counter(index for step, rows in alone["seen"] for index in rows if step < -(-samples // GLOBAL)) == Counter(
        range(samples)
    )
    for pool in (ranks, three_ranks):
        runs = pool.run(train_with, tmp_path / str(len(runs_of(pool))), Stream, samples)
        assert by_step(runs) == by_step([alone])
        assert all(run["epochs"] == alone["epochs"] for run in runs)
        if pool is ranks and samples > 0:
            assert runs[0]["losses"][0] == runs[1]["losses"][0]


def runs_of(pool):
    return range(pool.size)


def test_drop_last_leaves_out_what_fills_no_step(ranks, tmp_path):
    runs = ranks.run(train_with, tmp_path, Stream, 11, None, None, None, {"dataloader_drop_last": True, "max_steps": 2})
    assert by_step(runs) == {0: list(range(6)), 1: list(range(6))}
    for outcome in ranks.outcomes(train_with, tmp_path, Stream, 5, None, None, None, {"dataloader_drop_last": True}):
        assert outcome.error == "DataError"
        assert "gave no samples that fill a global batch of 6 in epoch 0" in outcome.message


def test_without_a_length_max_steps_has_to_be_given_on_every_rank(ranks, tmp_path):
    for outcome in ranks.outcomes(train_with, tmp_path, Stream, 5, None, None, None, {"max_steps": -1}):
        assert outcome.error == "ArgumentsError"
        assert "has no length" in outcome.message
        assert "Give max_steps" in outcome.message


def test_a_length_that_is_not_kept_is_told_and_the_epoch_ends_where_the_stream_does(tmp_path):
    class Boasting(Stream):
        def __len__(self):
            return 18

    with pytest.warns(UserWarning, match=r"gave 7 samples, but its len\(\) is 18"):
        run = train(0, 1, tmp_path, Boasting(7), num_train_epochs=1, max_steps=-1)
    assert list(by_step([run])) == [0, 1, 2]  # 18 were planned for


@pytest.mark.parametrize("split", ["samples", "shards"])
def test_an_empty_stream_is_an_error_in_words_on_every_rank(ranks, tmp_path, split):
    arguments = {"dataloader_split_streams": split}
    for outcome in ranks.outcomes(train_with, tmp_path, Sharded, [[], []], None, None, None, arguments):
        assert outcome.error == "DataError"
        assert "gave no samples in epoch 0" in outcome.message


def test_a_stream_that_can_be_read_once_only_is_told_so_at_its_second_epoch(ranks, tmp_path):
    for outcome in ranks.outcomes(train_with, tmp_path, Once, 7):
        assert outcome.error == "DataError"
        assert "has to begin anew for each epoch" in outcome.message


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_ends_all_ranks_with_its_error(ranks, tmp_path, workers):
    arguments = {"dataloader_num_workers": workers}
    outcomes = ranks.outcomes(train_with, tmp_path, Torn, 11, None, None, None, arguments)
    assert {outcome.error for outcome in outcomes} <= {"LookupError", "RankFailedError"}
    assert all("row 7 is torn" in outcome.message for outcome in outcomes)


@pytest.mark.long
def test_a_stream_that_splits_itself_among_workers_is_read_whole(ranks, tmp_path):
    runs = ranks.run(train_with, tmp_path, DealsItself, 12, None, None, None, {"dataloader_num_workers": 2, "max_steps": 2})
    assert by_step(runs) == {0: list(range(6)), 1: list(range(6, 12))}


# ---- resuming

SAVING = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3, "num_train_epochs": 2, "max_steps": -1}


@pytest.mark.parametrize("make", [NoisyStream, Resumable, Forgetful])
def test_a_run_that_stops_and_moves_ends_as_one_that_never_stopped(ranks, tmp_path, make):
    """Stopped within an epoch, at its end, and within the next, on 1 and 2 ranks in turn."""
    whole = train_with(0, 1, tmp_path / "whole", make, 14, None, None, drawing, SAVING)
    moved = tmp_path / "moved"
    train_with(0, 1, moved, make, 14, 2, None, drawing, SAVING)
    ranks.run(train_with, moved, make, 14, 3, True, drawing, SAVING)
    train_with(0, 1, moved, make, 14, 5, True, drawing, SAVING)
    for run in ranks.run(train_with, moved, make, 14, None, True, drawing, SAVING):
        assert run["weights"] == whole["weights"]
        assert run["losses"] == whole["losses"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_without_a_length_a_run_goes_on_where_it_stood_also_after_the_last_step_of_an_epoch(ranks, tmp_path, stop):
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "per_device_train_batch_size": 3}
    whole = train_with(0, 1, tmp_path / "whole", Stream, 12, arguments=arguments)
    train_with(0, 1, tmp_path, Stream, 12, stop, arguments=arguments)
    runs = ranks.run(train_with, tmp_path, Stream, 12, None, True, None, arguments)
    for run in runs:
        assert (run["weights"], run["losses"]) == (whole["weights"], whole["losses"])
    assert by_step(runs) == {step: rows for step, rows in by_step([whole]).items() if step >= stop}


def read_again(rank, size, folder, make, arguments):
    before = make.read_anywhere
    run = train_with(rank, size, folder, make, 60, 9, True, None, arguments)
    return make.read_anywhere - before, run["said"]


def test_a_state_of_the_dataset_saves_the_reading_and_is_believed_only_if_it_leads_to_the_next_sample(ranks, tmp_path):
    arguments = {**SAVING, "max_steps": 12}
    for make, read in ((Resumable, 12), (Forgetful, 6 * 8 + 12)):
        folder = tmp_path / make.__name__
        train_with(0, 1, folder, make, 60, 8, None, None, arguments)
        runs = ranks.run(read_again, folder, make, arguments)
        assert max(number for number, _ in runs) <= read
        assert ("skipped 48 samples of the training stream by reading them" in runs[0][1]) == (make is Forgetful)
    assert min(number for number, _ in runs) > 48


def test_workers_read_ahead_so_that_a_run_with_them_skips(ranks, tmp_path):
    arguments = {**SAVING, "dataloader_num_workers": 1}
    whole = train_with(0, 1, tmp_path / "whole", Resumable, 14, None, None, None, SAVING)
    ranks.run(train_with, tmp_path, Resumable, 14, 2, None, None, arguments)
    runs = ranks.run(train_with, tmp_path, Resumable, 14, None, True, None, arguments)
    assert [run["weights"] for run in runs] == [whole["weights"]] * 2
    assert "skipping 12 samples of the training stream" in runs[0]["said"]


# ---- shards

SHARDS = [list(range(9)), [9], [10, 11], [12, 13, 14]]  # rank 0 has 11 rows, rank 1 has 4


@pytest.mark.parametrize("workers", [0, 2])
def test_by_shards_each_sample_is_read_once_by_one_rank_and_the_others_wait_with_weight_zero(ranks, tmp_path, workers):
    arguments = {"dataloader_split_streams": "shards", "dataloader_num_workers": workers, "max_steps": 8}
    runs = ranks.run(train_with, tmp_path, Sharded, SHARDS, None, None, None, arguments)
    assert "by shards: 4 over 2 ranks, 2 each" in runs[0]["said"]
    for rank, run in enumerate(runs):
        own = [index for shard in SHARDS[rank::2] for index in shard]
        assert [index for step, rows in run["seen"] for index in rows] == own * 2
        assert run["epochs"] == runs[0]["epochs"]
        assert run["weights"] == runs[0]["weights"]
    assert runs[0]["epochs"][0] == (4, 1.0)  # 11 rows in steps of 3
    assert runs[0]["samples"] == 30


def test_shards_that_do_not_divide_are_told_and_too_few_are_split_by_samples(ranks, four_ranks, tmp_path):
    arguments = {"dataloader_split_streams": "shards", "max_steps": 2, "global_batch_size": 4}
    runs = ranks.run(train_with, tmp_path, Sharded, SHARDS[:3], None, None, None, arguments)
    assert "by shards: 3 over 2 ranks, which does not divide: 2 on 1 of them, 1 on the others" in runs[0]["said"]
    assert runs[0]["weights"] == runs[1]["weights"]
    runs = four_ranks.run(train_with, tmp_path, Sharded, SHARDS[:3], None, None, None, arguments)
    assert "by samples, not by shards: 3 shard(s) do not give each of 4 ranks one" in runs[0]["said"]
    assert by_step(runs) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def test_within_shards_a_run_resumes_on_as_many_ranks_only(ranks, tmp_path):
    arguments = {"dataloader_split_streams": "shards", "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    whole = ranks.run(train_with, tmp_path / "whole", Sharded, SHARDS, None, None, None, arguments)
    ranks.run(train_with, tmp_path, Sharded, SHARDS, 2, None, None, arguments)
    with pytest.raises(CheckpointError, match="split by shards over 2 rank"):
        train_with(0, 1, tmp_path, Sharded, SHARDS, 3, True, None, arguments)
    for run, other in zip(ranks.run(train_with, tmp_path, Sharded, SHARDS, None, True, None, arguments), whole, strict=True):
        assert same(run)["weights"] == other["weights"]


# ---- words


def test_a_word_that_is_no_policy_is_refused():
    with pytest.raises(ArgumentsError, match="dataloader_split_streams"):
        TrainingArguments(dataloader_split_streams="rows")


# ---- Hugging Face's streams


class HuggingFace:
    """Makes a stream of rows in `shards` shards, when and where it is called."""

    def __init__(self, shards=4, buffer=None):
        self.shards, self.buffer = shards, buffer

    def __call__(self, samples):
        datasets = pytest.importorskip("datasets")
        rows = [
            {"index": index, "x": row(index)["x"].tolist(), "labels": float(row(index)["labels"])} for index in range(samples)
        ]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=self.shards)
        return stream if self.buffer is None else stream.shuffle(seed=3, buffer_size=self.buffer)


def train_on_hugging_face(rank, size, folder, kind, samples, stop=None, resume=None, arguments=()):
    stream = HuggingFace(*kind)(samples)
    run = train(rank, size, folder, stop=stop, resume=resume, dataset=stream, **dict(arguments))
    return {**run, "epoch of the stream": int(stream.epoch)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_stream_of_hugging_face_is_the_same_on_any_number_of_ranks_and_workers(ranks, tmp_path, workers):
    pytest.importorskip("datasets")
    arguments = {"per_device_train_batch_size": 3}  # one a rank: sums in order are then equal to the bit
    alone = train_on_hugging_face(0, 1, tmp_path / "1", (4, 5), 11, None, None, arguments)
    steps = list(by_step([alone]).values())
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(11))
    assert steps[0] != steps[2]  # another order in the second epoch
    arguments["dataloader_num_workers"] = workers
    for run in ranks.run(train_on_hugging_face, tmp_path / "2", (4, 5), 11, None, None, arguments):
        assert same(run) == same(alone)
        # Workers keep the epoch to themselves: they share its memory, and one may already be in the next epoch.
        assert run["epoch of the stream"] == (0 if workers else 1)


@pytest.mark.parametrize(("kind", "skips"), [((4, None), False), ((4, 5), True)])
def test_a_stream_of_hugging_face_goes_on_from_its_state_unless_a_shuffle_buffer_would_be_lost(ranks, tmp_path, kind, skips):
    pytest.importorskip("datasets")
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8, "per_device_train_batch_size": 3}
    whole = train_on_hugging_face(0, 1, tmp_path / "whole", kind, 23, arguments=arguments)
    train_on_hugging_face(0, 1, tmp_path, kind, 23, 2, None, arguments)
    runs = ranks.run(train_on_hugging_face, tmp_path, kind, 23, 7, True, arguments)
    assert ("skipping 12 samples" in runs[0]["said"]) == skips
    for run in ranks.run(train_on_hugging_face, tmp_path, kind, 23, None, True, arguments):
        assert (run["weights"], run["losses"]) == (whole["weights"], whole["losses"])


def test_shards_of_hugging_face_are_split_among_ranks(ranks, tmp_path):
    pytest.importorskip("datasets")
    arguments = {"dataloader_split_streams": "shards", "dataloader_num_workers": 1}
    runs = ranks.run(train_on_hugging_face, tmp_path, (3, 4), 14, None, None, arguments)
    assert "by shards: 3 over 2 ranks, which does not divide: 2 on 1 of them" in runs[0]["said"]
    first_epoch = [index for run in runs for step, rows in run["seen"] if step < runs[0]["epochs"][0][0] for index in rows]
    assert sorted(first_epoch) == list(range(14))


def train_twice(rank, size, folder):
    stream = HuggingFace()(14)
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    train(rank, size, folder, stream, 1, None, **arguments)
    on = train(rank, size, folder, stream, None, True, **arguments)
    again = train(rank, size, folder, stream, None, None, **arguments)
    return on["seen"], again["seen"]


def test_a_state_that_was_loaded_does_not_count_for_the_next_run_on_the_same_object(tmp_path):
    pytest.importorskip("datasets")
    on, again = train_twice(0, 1, tmp_path)
    assert [rows for _, rows in on] == [[6], [7], [8], [9], [10], [11]]
    assert [rows for _, rows in again] == [[index] for index in range(12)]
