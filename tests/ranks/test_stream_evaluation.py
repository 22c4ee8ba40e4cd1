"""Evaluating a stream: rows in its order, each once, on any number of ranks and loader workers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from allstep import Trainer, TrainingArguments
from allstep.errors import DataError
from allstep.testing.models import RegressionNet
from allstep.testing.ranks import RankPool


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3) as pool:
        yield pool


def row(index):
    x = torch.randn(4, generator=torch.Generator().manual_seed(index))
    return {"x": x, "labels": x.sum().sin(), "not taken": "by the model"}


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from map(row, range(self.samples))


def evaluate(rank, size, folder, batch, workers):
    arguments = {"per_device_eval_batch_size": batch, "dataloader_num_workers": workers, "disable_tqdm": True}
    trainer = Trainer(RegressionNet(), TrainingArguments(str(folder), **arguments))
    results = []
    for samples in range(1, 9) if not workers else (1, 5):
        output = trainer.predict(Stream(samples))
        results.append((output.predictions, output.label_ids, output.metrics["test_loss"]))
    return results


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (2, 0), (3, 2)])
def test_rows_of_an_evaluated_stream_are_in_its_order_each_once_and_its_loss_is_the_mean(
    ranks, three_ranks, tmp_path, batch, workers
):
    results = [evaluate(0, 1, tmp_path, batch, workers)]
    results += ranks.run(evaluate, tmp_path, batch, workers) + three_ranks.run(evaluate, tmp_path, batch, workers)
    lengths = range(1, 9) if not workers else (1, 5)
    model = RegressionNet().eval()
    for place, samples in enumerate(lengths):
        x, labels = (torch.stack([row(index)[key] for index in range(samples)]) for key in ("x", "labels"))
        with torch.no_grad():
            logits = model(x)["logits"]
        for result in results:
            predictions, label_ids, loss = result[place]
            np.testing.assert_allclose(predictions, logits.numpy(), rtol=1e-5, atol=1e-6)
            assert np.array_equal(label_ids, labels.numpy())
            assert loss == pytest.approx(float(nn.functional.mse_loss(logits, labels)), rel=1e-6)


def evaluate_by_batch(rank, size, folder):
    found = []
    args = TrainingArguments(str(folder), per_device_eval_batch_size=2, batch_eval_metrics=True, disable_tqdm=True)
    for samples in range(1, 8):
        seen = []

        def metrics(prediction, compute_result, seen=seen):
            seen.append((prediction.label_ids.tolist(), compute_result))
            return {"batches": len(seen)} if compute_result else {}

        result = Trainer(RegressionNet(), args, compute_metrics=metrics).evaluate(Stream(samples))
        found.append((seen, result["eval_batches"]))
    return found


def test_metrics_by_batch_see_a_stream_in_its_order_on_every_rank(ranks, tmp_path):
    for run in [*ranks.run(evaluate_by_batch, tmp_path), evaluate_by_batch(0, 1, tmp_path)]:
        for samples, (seen, batches) in enumerate(run, 1):
            labels = [row(number)["labels"].item() for number in range(samples)]
            expected = [labels[at : at + 2] for at in range(0, samples, 2)]
            assert seen == [(each, each is expected[-1]) for each in expected]
            assert batches == len(expected)


def evaluate_nothing(rank, size, folder):
    Trainer(RegressionNet(), TrainingArguments(str(folder), disable_tqdm=True)).evaluate(Stream(0))


def test_evaluating_an_empty_stream_is_an_error_on_every_rank(ranks, tmp_path):
    for outcome in ranks.outcomes(evaluate_nothing, tmp_path):
        assert outcome.error == "DataError"
        assert "the stream Stream is empty" in outcome.message
    with pytest.raises(DataError, match="is empty"):
        evaluate_nothing(0, 1, tmp_path)
