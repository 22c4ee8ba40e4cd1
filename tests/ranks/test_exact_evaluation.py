"""An evaluation gives what one process gives that sees all rows at once: loss, metrics, rows; on 1, 2 and 3 ranks.

For every number of rows from 1 to 17, in float64. Ranks have one thread, and so has the process that they are compared with
bit for bit: threads divide sums among them.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from allstep import Trainer, TrainingArguments
from allstep.testing.models import IGNORED, Regression, RegressionNet, Tagger, Tokens, pad
from allstep.testing.ranks import RankPool, one_thread

SIZES = range(1, 18)
BATCHES = range(1, 6)


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3) as pool:
        yield pool


class Shifting(Tagger):
    """Compares the labels of a row, from the second on, with what it said one token before, as Hugging Face's decoders do."""

    def forward(self, tokens, labels=None):
        logits = self.head(self.dropout(self.embed(tokens)))
        if labels is None:
            return {"logits": logits}
        shift_logits, shift_labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten())
        return {"loss": loss, "logits": logits}


def pad_to_six(samples):
    """Rows of one length, so that batches of any size compute the same numbers."""
    return {
        key: nn.functional.pad(each, (0, 6 - each.shape[1]), value=IGNORED * (key == "labels"))
        for key, each in pad(samples).items()
    }


class Rows(Regression):
    """In float64, with the index of the row in it."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {"x": sample["x"].double(), "labels": sample["labels"].double() + index}


KINDS = {
    "samples": (RegressionNet, Rows, None),
    "tokens": (Tagger, Tokens, pad_to_six),
    "shifted": (Shifting, Tokens, pad_to_six),
}


def count_and_sum(prediction):
    predictions, labels = prediction
    return {"rows": len(labels), "sum": math.fsum(predictions.flatten().tolist()), "labels": labels.tolist()}


def make(folder, kind, batch=2, **more):
    model, _, collator = KINDS[kind]
    names = {"disable_tqdm": True, "report_to": "none", "per_device_eval_batch_size": batch, **more.pop("arguments", {})}
    return Trainer(model().double(), TrainingArguments(str(folder), **names), data_collator=collator, **more)


def of(metrics):
    return {key: value for key, value in metrics.items() if "second" not in key and "runtime" not in key}


def evaluated(rank, size, folder, kind, rows, batches):
    """By number of rows and batch size: metrics, and what was predicted."""
    found = {}
    with one_thread():
        for batch in batches:
            trainer = make(folder, kind, batch, compute_metrics=count_and_sum)
            for number in rows:
                dataset = KINDS[kind][1](number)
                output = trainer.predict(dataset, metric_key_prefix="eval")
                if batch == 3:
                    assert of(trainer.evaluate(dataset)) == of(output.metrics)
                found[number, batch] = of(output.metrics), output.predictions, output.label_ids
    return found


def all_at_once(kind, number):
    """Loss, logits and labels of one forward over all rows, in float64; None where no label counts."""
    model, dataset, collator = KINDS[kind]
    rows = [dataset(number)[index] for index in range(number)]
    inputs = collator(rows) if collator else {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        outputs = model().double().eval()(**inputs)
    return float(outputs["loss"]), outputs["logits"].numpy(), inputs["labels"].numpy()


@pytest.mark.parametrize("kind", [pytest.param("samples", marks=pytest.mark.long), "tokens", "shifted"])
def test_every_number_of_rows_on_every_number_of_ranks_gives_what_one_forward_gives(ranks, three_ranks, tmp_path, kind):
    alone = evaluated(0, 1, tmp_path, kind, SIZES, BATCHES)
    several = [
        *ranks.run(evaluated, tmp_path, kind, SIZES, BATCHES),
        *three_ranks.run(evaluated, tmp_path, kind, SIZES, BATCHES),
    ]
    for number in SIZES:
        loss, logits, labels = all_at_once(kind, number)
        for batch in BATCHES:
            metrics, predictions, label_ids = alone[number, batch]
            assert metrics.get("eval_loss", math.nan) == pytest.approx(loss, rel=1e-12, abs=1e-12, nan_ok=True)
            assert metrics["eval_rows"] == number
            assert np.array_equal(label_ids, labels)
            np.testing.assert_allclose(predictions, logits, rtol=1e-12, atol=1e-12)
            for found in several:
                assert found[number, batch][0] == metrics  # to the bit
                assert np.array_equal(found[number, batch][1], predictions)
                assert np.array_equal(found[number, batch][2], label_ids)


# Metrics that are kept as a state.


class Mean:
    """As torcheval's are made: a state that is merged with those of other ranks. Keeps the order in which it saw labels."""

    def __init__(self):
        self.error, self.rows, self.seen = 0.0, 0, []

    def update(self, predictions, labels):
        self.error += float((predictions - labels).abs().sum())
        self.rows += len(labels)
        self.seen += labels.tolist()
        return self

    def merge_state(self, others):
        for other in others:
            self.error += other.error
            self.rows += other.rows
            self.seen += other.seen
        return self

    def compute(self):
        return {"error": self.error / self.rows, "rows": self.rows, "seen": self.seen}


def merged(rank, size, folder, number):
    given = Mean()
    trainer = make(folder, "samples", compute_metrics=given)
    first, again = of(trainer.evaluate(Rows(number))), of(trainer.evaluate(Rows(number)))
    assert first == again
    assert not given.rows  # what was given is left as it was
    output = trainer.predict(Rows(number), metric_key_prefix="eval")
    assert of(output.metrics) == first
    assert len(output.predictions) == number
    named = make(folder, "samples", compute_metrics={"one": Mean(), "two": Mean()}).evaluate(Rows(number))
    return first, of(named)


@pytest.mark.parametrize("number", [1, 2, 4, 11])
def test_states_of_metrics_are_merged_over_ranks_in_the_order_of_the_dataset(ranks, three_ranks, tmp_path, number):
    _, logits, labels = all_at_once("samples", number)
    for metrics, named in [
        merged(0, 1, tmp_path, number),
        *ranks.run(merged, tmp_path, number),
        *three_ranks.run(merged, tmp_path, number),
    ]:
        assert metrics["eval_error"] == pytest.approx(float(np.abs(logits - labels).mean()), rel=1e-12)
        assert metrics["eval_rows"] == number
        assert metrics["eval_seen"] == labels.tolist()
        assert named["eval_one_seen"] == named["eval_two_seen"] == metrics["eval_seen"]


class Nameless(Mean):
    def compute(self):
        return self.rows


def nameless(rank, size, folder):
    named = make(folder, "samples", compute_metrics={"rows": Nameless()}).evaluate(Rows(5))
    try:
        make(folder, "samples", compute_metrics=Nameless()).evaluate(Rows(5))
    except ValueError as error:
        return named["eval_rows"], str(error)
    return None


def test_a_number_without_a_name_is_refused_on_every_rank(ranks, tmp_path):
    for rows, words in ranks.run(nameless, tmp_path):
        assert rows == 5
        assert 'compute_metrics={"accuracy": metric}' in words


@pytest.mark.parametrize("wrong", [{"rows": len}, {"rows": 3}, 3], ids=["function in a dict", "number in a dict", "number"])
def test_what_cannot_compute_metrics_is_refused_at_once(tmp_path, wrong):
    with pytest.raises(TypeError, match=r"expected .*update\(predictions, labels\), merge_state\(others\) and compute\(\)"):
        make(tmp_path, "samples", compute_metrics=wrong)


# Metrics that see one batch after the other.


class ByBatch:
    """As people write it for batch_eval_metrics: an object that is called."""

    def __init__(self):
        self.seen, self.calls, self.parts = [], 0, set()

    def __call__(self, prediction, compute_result):
        self.calls += 1
        self.seen += prediction.label_ids.tolist()
        self.parts.add((prediction.inputs is None, prediction.losses is None))
        if not compute_result:
            return {"rows": -1}
        found, self.seen = {"rows": len(self.seen), "seen": self.seen, "calls": self.calls, "parts": sorted(self.parts)}, []
        return found


def by_batch(rank, size, folder, number, include):
    arguments = {"batch_eval_metrics": True, "include_for_metrics": include}
    trainer = make(folder, "samples", compute_metrics=ByBatch(), arguments=arguments)
    metrics = of(trainer.evaluate(Rows(number)))
    output = trainer.predict(Rows(number))
    return metrics, output.metrics["test_seen"], output.label_ids.tolist()


@pytest.mark.parametrize("include", [[], ["inputs", "loss"]], ids=["plain", "everything"])
@pytest.mark.parametrize("number", [1, 3, 4, 5, 11])
def test_metrics_by_batch_see_each_batch_once_in_the_order_of_the_dataset_on_every_rank(
    ranks, three_ranks, tmp_path, number, include
):
    arguments = (tmp_path, number, include)
    loss, _, labels = all_at_once("samples", number)
    for metrics, tested, rows in [
        by_batch(0, 1, *arguments),
        *ranks.run(by_batch, *arguments),
        *three_ranks.run(by_batch, *arguments),
    ]:
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics["eval_rows"] == number
        assert metrics["eval_seen"] == tested == rows == labels.tolist()
        assert metrics["eval_calls"] == -(-number // 2)
        assert metrics["eval_parts"] == [(not include, not include)]


def breaks_by_batch(rank, size, folder):
    def compute_metrics(prediction, compute_result):
        if rank == 1:
            raise LookupError("no such metric")
        return {}

    make(folder, "samples", compute_metrics=compute_metrics, arguments={"batch_eval_metrics": True}).evaluate(Rows(7))


def test_an_error_of_metrics_by_batch_ends_every_rank(ranks, tmp_path):
    first, second = ranks.outcomes(breaks_by_batch, tmp_path)
    assert (first.error, second.error) == ("RankFailedError", "LookupError")
    assert "no such metric" in first.message


# Models that have a loss without labels, and memory.


class Unlabelled(Rows):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index)["x"]}


class Encoder(nn.Module):
    """Compares what it gives back with what it was given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        y = self.net(x)
        return {"loss": (y - x).square().mean(), "logits": y}


def encoded(rank, size, folder):
    args = TrainingArguments(str(folder), disable_tqdm=True, per_device_eval_batch_size=2)
    return Trainer(Encoder().double(), args).evaluate(Unlabelled(7))["eval_loss"]


def test_a_model_that_needs_no_labels_is_evaluated_too(ranks, tmp_path):
    x = torch.stack([Rows(7)[index]["x"] for index in range(7)])
    with torch.no_grad():
        expected = float(Encoder().double()(x)["loss"])
    for loss in [encoded(0, 1, tmp_path), *ranks.run(encoded, tmp_path)]:
        assert loss == pytest.approx(expected, rel=1e-12)


class Wide(Regression):
    """Rows of 32 kB."""

    def __getitem__(self, index):
        return {"x": torch.full((8192,), float(index)), "labels": torch.tensor(float(index))}


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, labels):
        return {"loss": (self.scale * labels).mean(), "logits": x}


def grown(call):
    """Bytes by which this process was larger, at most, while `call` ran; and what it gave."""

    def status(name):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    result = call()
    return status("VmHWM") - before, result


def peak(rank, size, folder, number, kind):
    """Bytes by which the process grew during an evaluation."""
    metrics = {"loss": None, "state": {"rows": Rowcount()}, "batches": lambda prediction, compute_result: {}}[kind]
    args = TrainingArguments(str(folder), disable_tqdm=True, batch_eval_metrics=kind == "batches")
    trainer = Trainer(Echo(), args, compute_metrics=metrics)
    trainer.evaluate(Wide(16))
    return grown(lambda: trainer.evaluate(Wide(number)))[0]


class Rowcount(Nameless):
    def update(self, predictions, labels):
        self.rows += len(predictions)


@pytest.mark.parametrize("kind", ["loss", "state", "batches"])
def test_memory_does_not_grow_with_the_dataset_where_nothing_is_kept(ranks, tmp_path, kind):
    few, many = ranks.run(peak, tmp_path, 64, kind), ranks.run(peak, tmp_path, 4096, kind)
    for small, large in zip(few, many, strict=True):
        assert large < small + (24 << 20)  # what would be kept is 64 MiB and more


def predicted(rank, size, folder):
    args = TrainingArguments(str(folder), disable_tqdm=True)
    trainer = Trainer(Echo(), args)
    trainer.predict(Wide(8))
    held, rows = grown(lambda: trainer.predict(Wide(1024)).predictions)
    assert np.array_equal(rows[:, 5], np.arange(1024))
    return held, rows.nbytes


def test_gathering_holds_the_result_and_little_else(ranks, tmp_path):
    """The result, this rank's batches, which are half of it, and a piece that is on its way; a pickle would be more."""
    for held, size in ranks.run(predicted, tmp_path):
        assert held < 1.9 * size
