"""What an evaluation gathers: rows of all batches in order, whatever the model returns, and the weighted mean loss."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from allstep.comm.communicator import SoloCommunicator
from allstep.data.grid import MicroBatch
from allstep.data.loader import Feed
from allstep.trainer.evaluation.evaluate import EvalPrediction, Prediction, evaluate
from allstep.trainer.evaluation.gathering import PADDING
from allstep.trainer.models.losses import weight_of

EVERYTHING = frozenset({"predictions", "label_ids", "inputs", "loss"})


def feed(number, inputs, samples):
    micro_batch = MicroBatch(epoch=0, step=0, number=number, start=0, stop=samples)
    return Feed(micro_batch, list(range(samples)), inputs)


def gather(batches, *, losses=None, labels=None, inputs=None, keep=EVERYTHING, model=None, **options):
    """Evaluate with a model that says `batches`, one after the other; everything else may be given too."""
    count = len(batches)
    sizes = [len(first(batch)) for batch in batches]
    losses, labels = losses or [None] * count, labels or [None] * count
    inputs = inputs or [{"x": torch.zeros(size, 1)} for size in sizes]
    said = iter([Prediction(*parts) for parts in zip(losses, batches, labels, strict=True)])
    return evaluate(
        [feed(number, *pair) for number, pair in enumerate(zip(inputs, sizes, strict=True))],
        lambda given: next(said),
        model or nn.Identity(),
        SoloCommunicator(),
        weigh=lambda given: weight_of(given, ["labels"]),
        device=torch.device("cpu"),
        seed=1,
        keep=keep,
        **options,
    )


def first(batch):
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return torch.atleast_1d(batch)


def test_rows_stand_in_the_order_of_the_batches():
    result = gather([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])])
    assert result.predictions.tolist() == [[1], [2], [3]]
    assert result.samples == 3
    assert result.label_ids is None
    assert result.loss is None


def test_rows_of_unequal_width_are_filled_with_what_counts_nowhere():
    result = gather([torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[9]])])
    assert result.predictions.tolist() == [[1, 2, PADDING], [3, 4, 5], [6, 7, 8], [9, PADDING, PADDING]]
    assert PADDING == -100


def test_all_but_the_first_dimension_may_be_unequal():
    result = gather([torch.ones(2, 1, 3), torch.ones(1, 2, 2)])
    assert result.predictions.shape == (3, 2, 3)
    assert (result.predictions == PADDING).sum() == 3 * 2 * 3 - 2 * 3 - 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_filling_keeps_the_dtype_and_never_invents_a_true(dtype):
    result = gather([torch.ones(1, 1, dtype=dtype), torch.ones(1, 3, dtype=dtype)])
    assert result.predictions.dtype == torch.empty(0, dtype=dtype).numpy().dtype
    filler = 0 if dtype in (torch.bool, torch.uint8) else PADDING
    assert result.predictions[0].tolist() == [1, filler, filler]


def test_bfloat16_becomes_float32():
    result = gather([torch.ones(2, 2, dtype=torch.bfloat16)])
    assert result.predictions.dtype == np.float32


def test_tuples_and_dicts_of_outputs_are_gathered_part_by_part():
    batches = [
        ({"a": torch.tensor([1, 2])}, [torch.tensor([[3.0], [4.0]])]),
        ({"a": torch.tensor([5])}, [torch.tensor([[6.0]])]),
    ]
    predictions = gather(batches).predictions
    assert predictions[0]["a"].tolist() == [1, 2, 5]
    assert predictions[1][0].tolist() == [[3], [4], [6]]


def test_one_number_a_batch_becomes_one_row_a_batch():
    result = gather([(torch.zeros(2, 1), torch.tensor(0.5)), (torch.zeros(1, 1), torch.tensor(0.25))])
    assert result.predictions[1].tolist() == [0.5, 0.25]


def test_the_loss_is_weighted_by_samples_or_by_label_tokens_that_count():
    batches, losses = [torch.zeros(3, 1), torch.zeros(1, 1)], [torch.tensor(1.0), torch.tensor(5.0)]
    assert gather(batches, losses=losses).loss == (3 * 1 + 1 * 5) / 4
    tokens = [{"labels": torch.tensor([[1, -100], [-100, -100], [-100, 2]])}, {"labels": torch.tensor([[1, 1, 1]])}]
    assert gather(batches, losses=losses, inputs=tokens).loss == (2 * 1 + 3 * 5) / 5


def test_a_batch_in_which_no_label_counts_does_not_make_the_loss_nan():
    inputs = [{"labels": torch.tensor([[-100]])}, {"labels": torch.tensor([[1]])}]
    result = gather([torch.zeros(1, 1)] * 2, losses=[torch.tensor(torch.nan), torch.tensor(2.0)], inputs=inputs)
    assert result.loss == 2.0


def test_a_loss_that_is_nan_is_told_as_nan():
    assert np.isnan(gather([torch.zeros(1, 1)], losses=[torch.tensor(torch.nan)]).loss)


def test_labels_inputs_and_losses_are_kept_where_asked_for():
    batches = [torch.zeros(2, 1), torch.zeros(1, 1)]
    labels = [torch.tensor([1, 2]), torch.tensor([3])]
    losses = [torch.tensor(0.5), torch.tensor(1.0)]
    result = gather(batches, losses=losses, labels=labels)
    assert result.label_ids.tolist() == [1, 2, 3]
    assert result.inputs["x"].shape == (3, 1)
    assert result.losses.tolist() == [0.5, 0.5, 1.0]
    bare = gather(batches, losses=losses, labels=labels, keep=frozenset())
    assert (bare.predictions, bare.label_ids, bare.inputs, bare.losses) == (None, None, None, None)
    assert bare.loss == result.loss


def test_every_forward_is_in_eval_mode_without_gradients_in_its_context_and_told():
    events = []

    model = nn.Identity()

    @contextmanager
    def context():
        events.append("in")
        yield
        events.append("out")

    def predict(inputs):
        events.append((model.training, torch.is_grad_enabled()))
        return Prediction(None, torch.zeros(1, 1), None)

    model.train()
    evaluate(
        [feed(0, {"x": torch.zeros(1, 1)}, 1)] * 2,
        predict,
        model,
        SoloCommunicator(),
        weigh=lambda given: 1,
        device=torch.device("cpu"),
        seed=1,
        keep=EVERYTHING,
        forward_context=context,
        on_batch=lambda said: events.append("batch"),
    )
    assert events == ["in", (False, False), "out", "batch"] * 2
    assert model.training


def test_generators_and_mode_are_given_back_also_after_an_error():
    def fail(said):
        torch.rand(3)
        random.random()
        raise LookupError

    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = nn.Identity().train()
    with pytest.raises(LookupError):
        gather([torch.zeros(1, 1)], model=model, on_batch=fail)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert model.training


def test_what_compute_metrics_gets_unpacks_as_people_write_it():
    predictions, labels = EvalPrediction([1], [2])
    assert (predictions, labels) == ([1], [2])
    both = EvalPrediction([1], [2], losses=[4])
    assert (both[0], both[1], both[-1]) == ([1], [2], [4])
    assert list(EvalPrediction([1], [2], inputs=[3], losses=[4])) == [[1], [2], [3], [4]]
