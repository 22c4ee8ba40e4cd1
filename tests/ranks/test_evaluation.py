"""evaluate() and predict() on one rank and two: each sample once, rows in order, full results on every rank, exact losses."""

import numpy as np
import pytest
import torch
from torch import nn

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.errors import DataError
from allstep.testing.models import IGNORED, Regression, RegressionNet, Tagger, Tokens, pad


class Steps(TrainerCallback):
    def __init__(self):
        self.batches, self.evaluations = 0, []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.batches += 1

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(metrics)


def make(folder, model, batch=2, **more):
    arguments = {"per_device_eval_batch_size": batch, "disable_tqdm": True, "report_to": "none"}
    arguments |= more.pop("arguments", {})
    return Trainer(model, TrainingArguments(str(folder), **arguments), **more)


def exact(metrics):
    """The metrics that do not tell how long it took."""
    return {key: value for key, value in metrics.items() if "second" not in key and "runtime" not in key}


def run_on(ranks, size, function, *arguments):
    return ranks.run(function, *arguments) if size == 2 else [function(0, 1, *arguments)]


# Rows and losses, for data sets smaller and larger than what all ranks see at once.


def every_size(rank, size, folder, batch):
    found = []
    for samples in range(1, 10):
        trainer = make(folder, RegressionNet(0.5), batch)
        output = trainer.predict(Regression(samples))
        found.append((output.predictions, output.label_ids, output.metrics["test_loss"]))
    return found


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_rows_are_those_of_the_dataset_in_order_and_the_loss_is_its_mean(ranks, tmp_path, size, batch):
    results = run_on(ranks, size, every_size, tmp_path, batch)
    model = RegressionNet().eval()
    for samples in range(1, 10):
        rows = [Regression(samples)[index] for index in range(samples)]
        x, labels = torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])
        with torch.no_grad():
            expected = model(x, labels)
        for result in results:
            predictions, label_ids, loss = result[samples - 1]
            assert predictions.shape == (samples,)
            np.testing.assert_allclose(predictions, expected["logits"].numpy(), rtol=1e-5, atol=1e-6)
            assert np.array_equal(label_ids, labels.numpy())
            assert loss == pytest.approx(float(expected["loss"]), rel=1e-6)


def tokens(rank, size, folder, batch):
    trainer = make(folder, Tagger(0.5), batch, data_collator=pad)
    output = trainer.predict(Tokens(9))
    return output.predictions, output.label_ids, output.metrics["test_loss"], trainer.evaluate(Tokens(9))["eval_loss"]


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("error")
def test_the_loss_is_the_mean_over_label_tokens_whatever_batches_and_ranks(ranks, tmp_path, size, batch):
    whole = pad([Tokens(9)[index] for index in range(9)])
    with torch.no_grad():
        expected = Tagger().eval()(**whole)
    for predictions, label_ids, loss, again in run_on(ranks, size, tokens, tmp_path, batch):
        assert loss == again == pytest.approx(float(expected["loss"]), rel=1e-6)
        assert np.array_equal(label_ids, whole["labels"].numpy())
        counts = label_ids != IGNORED
        assert predictions.shape == (9, 6, Tokens.classes)
        np.testing.assert_allclose(predictions[counts], expected["logits"].numpy()[counts], rtol=1e-5, atol=1e-6)


# What compute_metrics gets, and what comes back.


def with_metrics(rank, size, folder, include):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        predictions, labels, *_ = prediction
        return {"error": float(np.abs(predictions - labels).mean()), "eval_rows": len(labels)}

    steps = Steps()
    trainer = make(
        folder,
        RegressionNet(),
        compute_metrics=compute_metrics,
        eval_dataset=Regression(7),
        callbacks=[steps],
        arguments={"include_for_metrics": include},
    )
    metrics = trainer.evaluate()
    (prediction,) = seen
    history = trainer.state.log_history
    return exact(metrics), prediction, steps.batches, steps.evaluations == [metrics], exact(history[-1]), sorted(metrics)


@pytest.mark.parametrize("include", [[], ["inputs", "loss"]], ids=["plain", "everything"])
@pytest.mark.parametrize("size", [1, 2])
def test_metrics_are_computed_from_the_whole_dataset_on_every_rank(ranks, tmp_path, size, include):
    rows = [Regression(7)[index] for index in range(7)]
    labels = torch.stack([row["labels"] for row in rows]).numpy()
    x = torch.stack([row["x"] for row in rows])
    with torch.no_grad():
        logits = RegressionNet().eval()(x)["logits"].numpy()
    results = run_on(ranks, size, with_metrics, tmp_path, include)
    assert sum(batches for _, _, batches, *_ in results) == 4
    for metrics, prediction, _, told, logged, names in results:
        assert metrics["eval_error"] == pytest.approx(float(np.abs(logits - labels).mean()), rel=1e-5)
        assert metrics["eval_rows"] == 7
        assert metrics == results[0][0]
        assert np.array_equal(prediction.label_ids, labels)
        assert told
        assert logged == {**metrics, "step": 0}, "there is no epoch before training"
        expected = ["error", "loss", "rows", "runtime", "samples_per_second", "steps_per_second"]
        assert names == [f"eval_{name}" for name in expected]
        if include:
            assert np.array_equal(prediction.inputs["x"], x.numpy())
            assert prediction.losses.shape == (7,)
        else:
            assert prediction.inputs is None
            assert prediction.losses is None


def shrunk(rank, size, folder):
    def preprocess(logits, labels):
        assert logits.shape[:2] == labels.shape
        return logits.argmax(-1)

    trainer = make(
        folder,
        Tagger(),
        data_collator=pad,
        preprocess_logits_for_metrics=preprocess,
        compute_metrics=lambda p: {"shape": p.predictions.shape, "filled": int((p.predictions == IGNORED).sum())},
    )
    return exact(trainer.evaluate(Tokens(5)))


def test_logits_can_be_shrunk_before_they_are_gathered(ranks, tmp_path):
    for metrics in ranks.run(shrunk, tmp_path):
        assert metrics["eval_shape"] == (5, 6)
        assert metrics["eval_filled"] > 0  # batches are narrower than the widest


def only_loss(rank, size, folder):
    def never(prediction):
        raise AssertionError("compute_metrics is not called where only the loss is asked for")

    arguments = {"prediction_loss_only": True}
    trainer = make(folder, RegressionNet(), compute_metrics=never, arguments=arguments)
    output = trainer.predict(Regression(5))
    return exact(trainer.evaluate(Regression(5))), output.predictions, output.label_ids, exact(output.metrics)


def test_where_only_the_loss_is_asked_for_nothing_else_is_gathered(ranks, tmp_path):
    for metrics, predictions, label_ids, tested in ranks.run(only_loss, tmp_path):
        assert list(metrics) == ["eval_loss"]
        assert predictions is None
        assert label_ids is None
        assert list(tested) == ["test_loss"]


def several(rank, size, folder):
    parts = {"near": Regression(3), "far": Regression(4, index_from=100)}
    steps = Steps()
    trainer = make(folder, RegressionNet(), eval_dataset=parts, callbacks=[steps])
    return exact(trainer.evaluate()), len(steps.evaluations), exact(trainer.evaluate(parts["far"], metric_key_prefix="other"))


def test_several_datasets_are_evaluated_under_their_names(ranks, tmp_path):
    for metrics, evaluations, other in ranks.run(several, tmp_path):
        assert sorted(metrics) == ["eval_far_loss", "eval_near_loss"]
        assert metrics["eval_far_loss"] == other["other_loss"] != metrics["eval_near_loss"]
        assert evaluations == 2


class Unlabelled(Regression):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index)["x"]}


def predict_without_labels(rank, size, folder):
    output = make(folder, RegressionNet()).predict(Unlabelled(5))
    return output.predictions, output.label_ids, exact(output.metrics)


def test_without_labels_there_are_predictions_and_no_loss(ranks, tmp_path):
    with torch.no_grad():
        expected = RegressionNet().eval()(torch.stack([Unlabelled(5)[index]["x"] for index in range(5)]))["logits"]
    for predictions, label_ids, metrics in ranks.run(predict_without_labels, tmp_path):
        np.testing.assert_allclose(predictions, expected.numpy(), rtol=1e-5, atol=1e-6)
        assert label_ids is None
        assert metrics == {}


class Named(nn.Module):
    """Returns more than logits."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        logits = self.net(x).squeeze(-1)
        return {
            "loss": nn.functional.mse_loss(logits, labels),
            "logits": logits,
            "hidden": (x, {"squared": x.square()}),
            "cache": x.sum(),
        }


def more_outputs(rank, size, folder):
    trainer = make(folder, Named())
    return trainer.predict(Regression(5), ignore_keys=["cache"]).predictions


def test_all_that_a_model_returns_is_gathered_but_what_is_ignored(ranks, tmp_path):
    x = torch.stack([Regression(5)[index]["x"] for index in range(5)]).numpy()
    for logits, (plain, named) in ranks.run(more_outputs, tmp_path):
        assert logits.shape == (5,)
        assert np.array_equal(plain, x)
        np.testing.assert_allclose(named["squared"], x**2, rtol=1e-6)


# A loss of the user's own.


def summed(outputs, labels, num_items_in_batch=None):
    """As people write it who divide by the count that they are given."""
    return nn.functional.mse_loss(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def own_loss(rank, size, folder):
    return make(folder, RegressionNet(), compute_loss_func=summed).evaluate(Regression(5))["eval_loss"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_function_of_ones_own_is_given_the_count_in_evaluation_too(ranks, tmp_path, size):
    expected = make(tmp_path, RegressionNet(), batch=5).evaluate(Regression(5))["eval_loss"]
    for loss in run_on(ranks, size, own_loss, tmp_path):
        assert loss == pytest.approx(expected, rel=1e-6)


# Evaluating does not disturb training.


def trained(rank, size, folder, evaluate):
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "eval_strategy": "steps" if evaluate else "no",
        "eval_steps": 2,
        "eval_on_start": evaluate,
    }
    trainer = make(folder, RegressionNet(0.3), train_dataset=Regression(9), eval_dataset=Regression(5), arguments=arguments)
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return [p.detach().clone() for p in trainer.model.parameters()], [entry["step"] for entry in evaluated]


def test_evaluating_during_training_changes_no_bit_of_it(ranks, tmp_path):
    with_evaluation = ranks.run(trained, tmp_path / "with", True)
    without = ranks.run(trained, tmp_path / "without", False)
    for (weights, steps), (expected, none) in zip(with_evaluation, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
        assert steps == [0, 2, 4, 6]
        assert none == []


# What cannot be evaluated.


@pytest.mark.parametrize("dataset", [None, []], ids=["missing", "empty"])
@pytest.mark.parametrize("how", ["evaluate", "predict"])
def test_nothing_to_evaluate_is_an_error_in_words(tmp_path, dataset, how):
    with pytest.raises(DataError, match=r"missing|empty"):
        getattr(make(tmp_path, RegressionNet()), how)(dataset)


def fails(rank, size, folder, where):
    def compute_metrics(prediction):
        if rank == 1:
            raise LookupError("no such metric")
        return {}

    class Broken(Regression):
        def __getitem__(self, index):
            if where == "dataset" and index == 4:
                raise LookupError("row 4 is torn")
            return super().__getitem__(index)

    class BrokenNet(RegressionNet):
        def forward(self, x, labels=None):
            if where == "model" and rank == 1:
                raise LookupError("the model refuses")
            return super().forward(x, labels)

    trainer = make(folder, BrokenNet(), compute_metrics=compute_metrics if where == "metrics" else None)
    try:
        trainer.evaluate(Broken(5))
    except Exception as error:
        return type(error).__name__, str(error), trainer.model.training
    return None


@pytest.mark.parametrize(("where", "words"), [("dataset", "row 4"), ("model", "refuses"), ("metrics", "no such metric")])
def test_an_error_on_one_rank_ends_the_evaluation_on_both_and_names_the_rank(ranks, tmp_path, where, words):
    first, second = ranks.run(fails, tmp_path, where, timeout=30)
    assert second[:2] == ("LookupError", second[1])
    assert words in second[1]
    assert first[0] == "RankFailedError"
    assert "Rank 1 failed while" in first[1]
    assert words in first[1]
    assert first[2]
    assert second[2]
