"""What a micro-batch weighs: with models that shift labels, behind wrappers, with a function of the user's."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allstep import Trainer, TrainingArguments
from allstep.trainer.evaluation.exact_sum import ExactSum
from allstep.trainer.models.losses import LossFacts, label_names_of, shifts_labels, takes_count, weight_of

LABELS = torch.tensor([[1, 2, -100, 4], [-100, 5, -100, -100], [7, 8, 9, -100]])
"""7 count; 5 without the first of each row."""


def ForCausalLMLoss(logits, labels):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def ForMaskedLMLoss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return wrapper


class Decoder(nn.Module):
    """As transformers' models are made."""

    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self, is_encoder_decoder=False):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.embed = nn.Embedding(10, 10)

    @decorated
    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        return {"loss": self.loss_function(logits, labels), "logits": logits}


class Masked(Decoder):
    loss_function = staticmethod(ForMaskedLMLoss)


class OwnLoss(Decoder):
    """Is called as if it shifted, and does not."""

    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OwnShift(Decoder):
    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        shift_logits, shift_labels = logits[:, :-1], labels[:, 1:]
        return {"loss": nn.functional.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten()), "logits": logits}


class Handed(Decoder):
    """Is given shifted labels, and hands them on."""

    def forward(self, input_ids, labels=None, shift_labels=None):
        return self.embed(input_ids)


class Adapted(nn.Module):
    """As PEFT's models are made."""

    def __init__(self, base):
        super().__init__()
        self.base, self.peft_config = base, {}

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


@pytest.mark.parametrize(
    ("model", "shifted"),
    [
        (Decoder(), True),
        (Decoder(is_encoder_decoder=True), False),
        (Masked(), False),
        (OwnLoss(), False),
        (OwnShift(), True),
        (Handed(), False),
        (nn.Linear(2, 2), False),
        (Adapted(Decoder()), True),
        (torch.compile(Decoder(), backend="eager"), True),
        (nn.DataParallel(torch.compile(Adapted(Decoder()), backend="eager")), True),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_a_model_that_shifts_labels_is_seen_through_its_wrappers(model, shifted):
    assert shifts_labels(model) is shifted
    assert LossFacts.of(model, None, None).weight({"labels": LABELS}) == (5 if shifted else 7)


@pytest.mark.parametrize("model", [Decoder(), Masked(), OwnLoss(), OwnShift()], ids=lambda model: type(model).__name__)
def test_the_weight_is_what_the_models_mean_was_taken_over(model):
    """The weighted mean of means over rows is the mean over the whole batch."""
    facts = LossFacts.of(model, None, None)
    inputs = {"input_ids": torch.arange(12).reshape(3, 4) % 10, "labels": LABELS}
    rows = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(3)]
    weights = [facts.weight(row) for row in rows]
    parts = [float(model(**row)["loss"].detach()) * weight for row, weight in zip(rows, weights, strict=True) if weight]
    assert sum(parts) / sum(weights) == pytest.approx(float(model(**inputs)["loss"].detach()), rel=1e-6)


def test_labels_that_are_shifted_already_are_counted_as_they_are():
    inputs = {"labels": LABELS, "shift_labels": torch.tensor([[1, -100, -100, 3]])}
    assert weight_of(inputs, ["labels"], shifted=True) == 2
    assert weight_of(inputs, ["labels"]) == 7


def test_class_labels_are_never_shifted():
    assert weight_of({"labels": torch.tensor([0, 1, -100])}, ["labels"], shifted=True) == 2


def test_answers_are_labels_and_weigh_as_samples():
    class Reader(nn.Module):
        def forward(self, input_ids, start_positions=None, end_positions=None):
            return input_ids

    names = label_names_of(Reader(), None)
    assert names == ["start_positions", "end_positions"]
    places = torch.tensor([3, -100, 1])
    inputs = {"input_ids": torch.zeros(3, 8), "start_positions": places, "end_positions": places}
    assert weight_of(inputs, names) == 3
    assert label_names_of(Adapted(Reader()), None) == names


@pytest.mark.parametrize("given", [3, 2.5, 0, True, torch.tensor(3), torch.tensor(0.5)], ids=repr)
def test_a_function_of_ones_own_gives_the_weight(given):
    facts = LossFacts.of(Decoder(), None, lambda inputs: given)
    assert facts.weight({"labels": LABELS}) == float(given)


@pytest.mark.parametrize("given", [-1, float("nan"), float("inf"), torch.ones(2), "3", None, torch.tensor(-2.0)], ids=repr)
def test_what_is_no_weight_is_refused_in_words(given):
    with pytest.raises(ValueError, match=r"loss_weight_func returned .*expected one finite number that is not negative"):
        LossFacts.of(Decoder(), None, lambda inputs: given).weight({"labels": LABELS})


# Who is told the count.


def summed(logits, labels, count):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count


def told(outputs, labels, num_items_in_batch=None):
    return summed(outputs["logits"], labels, num_items_in_batch)


def told_by_keywords(outputs, labels, **kwargs):
    return summed(outputs["logits"], labels, kwargs["num_items_in_batch"])


def not_told(outputs, labels):
    return ForCausalLMLoss(outputs["logits"], labels)


class Bare(Decoder):
    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        return {"logits": logits} if labels is None else {"loss": self.loss_function(logits, labels), "logits": logits}


class Told(Decoder):
    """Needs the count."""

    def forward(self, input_ids, labels, *, num_items_in_batch):
        shift_labels = labels[:, 1:]
        assert num_items_in_batch == (shift_labels != -100).sum()
        return {"loss": summed(self.embed(input_ids), labels, num_items_in_batch)}


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = summed(outputs["logits"], inputs["labels"], kwargs["num_items_in_batch"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("trainer", "model", "loss"),
    [
        (Trainer, Bare, None),
        (Trainer, Bare, told),
        (Trainer, Bare, told_by_keywords),
        (Trainer, Bare, not_told),
        (Trainer, Told, None),
        (OwnTrainer, Bare, None),
    ],
    ids=["model", "told", "told by keywords", "not told", "model that is told", "own trainer"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_whoever_takes_the_mean_the_loss_is_that_of_all_tokens(tmp_path, trainer, model, loss, batch):
    """In training and in evaluation, by any batch; a learning rate of 0 keeps the model as it is."""
    rows = [{"input_ids": torch.arange(4) + 3 * row, "labels": LABELS[row]} for row in range(3)]
    with torch.no_grad():
        whole = float(Bare()(torch.stack([row["input_ids"] for row in rows]), LABELS)["loss"])
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=3 // batch,
        max_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        disable_tqdm=True,
    )
    made = trainer(model(), args, train_dataset=rows, eval_dataset=rows, compute_loss_func=loss)
    assert made.train().training_loss == pytest.approx(whole, rel=1e-6)
    assert made.evaluate()["eval_loss"] == pytest.approx(whole, rel=1e-6)


def test_who_takes_a_count_is_read_from_the_signature():
    assert takes_count(told)
    assert takes_count(told_by_keywords)
    assert not takes_count(not_told)


# Sums whose order does not matter.


def test_a_sum_has_the_same_bits_in_any_order_and_from_any_parts():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -12, 12, (5000,), generator=generator
    )
    totals = set()
    for pieces in (1, 2, 3, 7):
        total = ExactSum()
        for piece in values[torch.randperm(5000, generator=generator)].chunk(pieces):
            part = ExactSum()
            for value in piece.tolist():
                part.add(value)
            assert len(part.parts) <= 65
            for value in part.parts:
                total.add(value)
        totals.add(total.total())
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(float(values.sum()), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "text"), [([1.0, torch.inf], "inf"), ([torch.inf, -torch.inf], "nan"), ([torch.nan] * 200, "nan"), ([], "0.0")]
)
def test_a_sum_that_is_not_finite_says_so(values, text):
    total = ExactSum()
    for value in [*values, *([1.0] * 100 if values else [])]:
        total.add(value)
    assert str(total.total()) == text
