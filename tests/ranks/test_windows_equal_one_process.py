"""The gradient of every window equals one process on the window's samples, in float64: any sizes, 1 to 3 ranks.

The loss is a mean over samples, over label tokens, or over label tokens without the first of each row.
"""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.data.order import ShuffledOrder
from allstep.testing.models import IGNORED, Regression, RegressionNet, Tagger, Tokens, pad
from allstep.testing.ranks import RankPool

EPOCHS = 2
SEED = 3


@pytest.fixture(scope="module")
def pools():
    """Ranks by their number."""
    with RankPool(2) as two, RankPool(3) as three:
        yield {2: two, 3: three}


class Rows(Regression):
    def __getitem__(self, index):
        return {name: value.double() for name, value in super().__getitem__(index).items()}


class Shifting(Tagger):
    def forward(self, tokens, labels=None):
        logits = self.head(self.embed(tokens))
        shift_labels = labels[:, 1:]
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shift_labels.flatten())}


KINDS = {"samples": (RegressionNet, Rows, None), "tokens": (Tagger, Tokens, pad), "shifted": (Shifting, Tokens, pad)}


class Gradients(TrainerCallback):
    def __init__(self):
        self.of_step = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of_step.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])


def gradients(rank, size, folder, kind, samples, batch, accumulation, in_order):
    """Of every step; weights stay as they are, so that every step starts from the same."""
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=EPOCHS,
        deterministic_reduction=in_order,
        learning_rate=0.0,
        max_grad_norm=0.0,
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = Gradients()
    model, dataset, collator = KINDS[kind]
    trainer = Trainer(model().double(), args, data_collator=collator, train_dataset=dataset(samples), callbacks=[callback])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The training dataset has")
        trainer.train()
    return callback.of_step, [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def one_process(kind, samples, global_batch):
    """The same of one forward over the samples of each step; without loss and gradients where no label counts."""
    model, dataset, collator = KINDS[kind]
    model, data, found, losses = model().double(), dataset(samples), [], []
    for epoch in range(EPOCHS):
        order = ShuffledOrder(samples, SEED).places(epoch).tolist()
        for at in range(0, samples, global_batch):
            rows = [data[index] for index in order[at : at + global_batch]]
            inputs = collator(rows) if collator else {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            counted = inputs["labels"][:, 1:] if kind == "shifted" else inputs["labels"]
            model.zero_grad()
            if (counted != IGNORED).any():
                loss = model(**inputs)["loss"]
                loss.backward()
                losses.append((len(found) + 1, float(loss.detach())))
            found.append([p.grad for p in model.parameters()])
    return found, losses


@given(
    kind=st.sampled_from(sorted(KINDS)),
    samples=st.integers(1, 20),
    batch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    size=st.integers(1, 3),
    in_order=st.booleans(),
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_every_window_has_the_gradient_of_one_process_on_its_samples(
    pools, tmp_path_factory, kind, samples, batch, accumulation, size, in_order
):
    arguments = (tmp_path_factory.getbasetemp() / "windows", kind, samples, batch, accumulation, in_order)
    results = [gradients(0, 1, *arguments)] if size == 1 else pools[size].run(gradients, *arguments)
    steps, losses = one_process(kind, samples, batch * accumulation * size)
    for found, logged in results:
        assert len(found) == len(steps) == EPOCHS * -(-samples // (batch * accumulation * size))
        for mine, expected in zip(found, steps, strict=True):
            for own, other in zip(mine, expected, strict=True):
                assert (own is None) == (other is None)
                if own is not None:
                    torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
        assert [step for step, _ in logged] == [step for step, _ in losses]
        torch.testing.assert_close([loss for _, loss in logged], [loss for _, loss in losses], rtol=2e-7, atol=2e-7)
