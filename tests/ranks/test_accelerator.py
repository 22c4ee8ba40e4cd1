"""`Trainer.accelerator`: what scripts do with it by hand, on one rank and on two."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.testing.models import Regression, RegressionNet

BACKENDS = ("gloo", "shm")


def make(folder, **settings):
    return Trainer(RegressionNet(), TrainingArguments(str(folder), disable_tqdm=True, **settings), eval_dataset=Regression(7))


def facts(rank, size, folder):
    trainer = make(folder)
    it = trainer.accelerator
    assert it.device == torch.device("cpu")
    assert (it.process_index, it.num_processes) == (rank, size)
    assert it.is_main_process is it.is_local_main_process is (rank == 0)
    assert it.is_last_process is (rank == size - 1)
    assert it.use_distributed is (size > 1)
    it.print("only rank 0 says so")
    order = []
    with it.main_process_first():
        order.append(rank)
    it.wait_for_everyone()
    wrapped = nn.DataParallel(trainer.model)
    assert it.unwrap_model(wrapped) is trainer.model
    assert it.get_state_dict(wrapped).keys() == trainer.model.state_dict().keys()
    rows = torch.arange(rank + 1.0)
    pair = it.gather({"a": rows, "b": (torch.tensor(rank), "text")})
    mean = it.reduce(torch.tensor([float(rank)]), "mean")
    padded = it.pad_across_processes(rows[None], dim=1, pad_index=-1)
    objects = it.gather_for_metrics([f"of {rank}"], use_gather_object=True)
    return pair["a"].tolist(), pair["b"][0].tolist(), mean.item(), padded.tolist(), objects


@pytest.mark.parametrize("size", [1, 2])
def test_who_and_together(ranks, tmp_path, size, capfd):
    found = ranks.run(facts, tmp_path) if size == 2 else [facts(0, 1, tmp_path)]
    for rank, (rows, numbers, mean, padded, objects) in enumerate(found):
        assert rows == [0.0, 0.0, 1.0][: 1 if size == 1 else 3]
        assert numbers == list(range(size))
        assert mean == (size - 1) / 2
        assert padded == [[0.0, *([-1.0] if size == 2 else [])], [0.0, 1.0]][rank : rank + 1]
        assert objects == [f"of {each}" for each in range(size)]


def evaluate_by_hand(rank, size, folder, batch, samples):
    """The loop that people write with accelerate."""
    trainer = make(folder)
    model = trainer.accelerator.prepare(trainer.model)
    loader, more = trainer.accelerator.prepare(DataLoader(Regression(samples), batch_size=batch), "anything")
    assert more == "anything"
    predictions, labels, rounds = [], [], 0
    model.eval()
    for inputs in loader:
        with torch.no_grad():
            logits = model(**inputs)["logits"]
        said, label = trainer.accelerator.gather_for_metrics((logits, inputs["labels"]))
        predictions.append(said)
        labels.append(label)
        rounds += 1
    assert rounds == len(loader)
    return torch.cat(predictions), torch.cat(labels)


@pytest.mark.parametrize("samples", [1, 3, 7, 8])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_an_evaluation_by_hand_sees_each_sample_once_and_in_order(ranks, tmp_path, batch, samples):
    alone, labels = evaluate_by_hand(0, 1, tmp_path, batch, samples)
    assert torch.equal(labels, torch.stack([Regression(samples)[index]["labels"] for index in range(samples)]))
    for said, label in ranks.run(evaluate_by_hand, tmp_path, batch, samples):
        assert torch.equal(label, labels)
        torch.testing.assert_close(said, alone)


def shares(rank, size, folder):
    trainer = make(folder)
    prepare = trainer.accelerator.prepare
    rows = list(range(20))
    shuffled = prepare(DataLoader(rows, batch_size=3, shuffle=True))
    first, second = [[batch.tolist() for batch in shuffled] for _ in range(2)]
    dropped = [batch.tolist() for batch in prepare(DataLoader(rows, batch_size=3, drop_last=True))]
    batched = prepare(DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 5, drop_last=False)))
    evaluated = [batch["x"].shape[0] for batch in trainer.get_eval_dataloader()]
    return first, second, dropped, [batch.tolist() for batch in batched], evaluated, len(shuffled)


def test_prepared_loaders_share_what_there_is(ranks, tmp_path):
    one, two = ranks.run(shares, tmp_path)
    flat = lambda batches: [index for batch in batches for index in batch]  # noqa: E731
    assert len(one[0]) == len(two[0]) == one[5] == 4
    assert {*flat(one[0]), *flat(two[0])} == {*range(20)}
    assert one[0] != one[1], "epochs differ"
    assert len(flat(one[2])) == len(flat(two[2])) == 9
    assert sorted(flat(one[2]) + flat(two[2])) == list(range(18))
    assert sorted(flat(one[3]) + flat(two[3])) == list(range(20))
    assert one[4] == two[4] == [8], "7 samples, filled up"
    assert [len(batch["x"]) for batch in make(tmp_path).get_eval_dataloader()] == [7]


def test_backward_outside_of_training_is_plain(tmp_path):
    trainer = make(tmp_path)
    x = torch.ones(2, requires_grad=True)
    trainer.accelerator.backward((x * 3).sum())
    assert x.grad.tolist() == [3.0, 3.0]
    assert trainer.accelerator.clip_grad_norm_([x], 1.0) == pytest.approx(18**0.5)
    with trainer.accelerator.accumulate(trainer.model), trainer.accelerator.no_sync(trainer.model):
        pass
    path = tmp_path / "saved.pt"
    trainer.accelerator.save({"a": 1}, path)
    assert torch.load(path) == {"a": 1}
    assert trainer.accelerator.free_memory(x, path) == (None, None)


class Poisoned(Regression):
    """NaN in one sample."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row if index else {**row, "x": row["x"] * float("nan")}


class Notes(TrainerCallback):
    def __init__(self, accelerator):
        self.accelerator, self.skipped = accelerator, []

    def on_step_end(self, args, state, control, **kwargs):
        self.skipped.append(self.accelerator.optimizer_step_was_skipped)


def test_a_step_that_was_left_out_is_known(tmp_path):
    trainer = make(
        tmp_path, nonfinite_gradients="skip", num_train_epochs=1, per_device_train_batch_size=2, save_strategy="no",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer.train_dataset = Poisoned(6)
    notes = Notes(trainer.accelerator)
    trainer.add_callback(notes)
    trainer.train()
    assert notes.skipped == [True, False, False]
    assert trainer.accelerator.mixed_precision == "no"
    assert trainer.accelerator.scaler is None
