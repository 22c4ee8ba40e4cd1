"""The mean over label tokens: gradients and losses are those of one process that sees the whole global batch at once."""

import math

import pytest
import torch
from torch import nn

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.data.order import ShuffledOrder
from allstep.testing.models import IGNORED, Tagger, Tokens, pad

BACKENDS = ("gloo", "shm")

SAMPLES = 14
EPOCHS = 2


class Gradients(TrainerCallback):
    """Keeps the reduced gradients of every step, None where there is none."""

    def __init__(self):
        self.of_step = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of_step.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])


def summed(outputs, labels, num_items_in_batch=None):
    """A sum over tokens, divided by the count that is handed in."""
    logits = outputs["logits"].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


class Flat(Tagger):
    """Takes one token a row, with one label a row, some of them ignored."""

    def forward(self, tokens, labels=None):
        return super().forward(tokens[:, None], labels[:, None])


def flat(samples):
    return {key: torch.stack([sample[key][0] for sample in samples]) for key in samples[0]}


KINDS = {
    "mean": (Tagger, pad, None),
    "own loss": (Tagger, pad, summed),
    "one label a row": (Flat, flat, None),
}


def train(rank, size, folder, kind, arguments, without=()):
    model, collator, loss = KINDS[kind]
    callback = Gradients()
    defaults = {"learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0}
    args = TrainingArguments(str(folder), **{**defaults, "num_train_epochs": EPOCHS, **arguments})
    trainer = Trainer(
        model(),
        args,
        data_collator=collator,
        train_dataset=Tokens(SAMPLES, without),
        compute_loss_func=loss,
        callbacks=[callback],
    )
    output = trainer.train()
    return {
        "gradients": callback.of_step,
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "mean": output.training_loss,
        "order": [ShuffledOrder(SAMPLES, args.seed).places(epoch).tolist() for epoch in range(EPOCHS)],
    }


def reference(kind, order, global_batch, without=()):
    """Per step (loss, gradients) and at the end the weights, of one process that sees each global batch in one forward."""
    make, collator, _ = KINDS[kind]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    steps = [ids[at : at + global_batch] for ids in order for at in range(0, len(ids), global_batch)]
    found, total, count = [], 0.0, 0
    for number, ids in enumerate(steps):
        batch = collator([Tokens(SAMPLES, without)[index] for index in ids])
        tokens = int((batch["labels"] != IGNORED).sum())
        optimizer.zero_grad()
        if tokens:
            loss = model(**batch)["loss"]
            loss.backward()
            total, count = total + loss.item() * tokens, count + tokens
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - number / len(steps))
        optimizer.step()
        found.append((loss.item() if tokens else None, [p.grad for p in model.parameters()]))
    return found, [p.detach() for p in model.parameters()], total / count


def check(results, kind, global_batch, without=()):
    steps, weights, mean = reference(kind, results[0]["order"], global_batch, without)
    for result in results:
        assert result["mean"] == pytest.approx(mean, rel=1e-5)
        for number, (loss, gradients) in enumerate(steps):
            assert result["losses"].get(number + 1) == (None if loss is None else pytest.approx(loss, rel=1e-5))
            for mine, expected in zip(result["gradients"][number], gradients, strict=True):
                assert (mine is None) == (expected is None)
                if mine is not None:
                    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
        for mine, expected in zip(result["weights"], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], results[0]["weights"], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "accumulation"), [(3, 1), (1, 3), (2, 2)])
def test_two_ranks_equal_one_process_on_the_whole_batch(ranks, tmp_path, kind, batch, accumulation):
    arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    results = ranks.run(train, tmp_path, kind, arguments)
    check(results, kind, 2 * batch * accumulation)


@pytest.mark.parametrize("kind", ["mean", "one label a row"])
def test_one_process_that_accumulates_equals_one_that_does_not(tmp_path, kind):
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    check([train(0, 1, tmp_path, kind, arguments)], kind, 6)


def places(batch, places_of_labels, global_batch=8):
    """Rows that have to be without labels, so that only these micro-batches of the first step have some."""
    order = ShuffledOrder(SAMPLES, 42).places(0).tolist()
    with_labels = {index for place in places_of_labels for index in order[place * batch : (place + 1) * batch]}
    return tuple(index for index in order[:global_batch] if index not in with_labels)


@pytest.mark.parametrize(
    "labelled",
    [[0, 1, 3], [0, 1, 2], [0, 1], [2, 3], [1], []],
    ids=["a first one", "a last one", "rank 1 has none", "rank 0 has none", "one alone has some", "nobody has any"],
)
def test_micro_batches_without_a_label_that_counts_weigh_nothing(ranks, tmp_path, labelled):
    """Their mean loss would be 0/0: a grid of four micro-batches of two rows, in the first step."""
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    without = places(2, labelled)
    results = ranks.run(train, tmp_path, "mean", arguments, without)
    check(results, "mean", 8, without)
    assert all(math.isfinite(loss) for result in results for loss in result["losses"].values())
