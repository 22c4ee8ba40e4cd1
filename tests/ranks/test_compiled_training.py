"""torch_compile in a Trainer: the same training, checkpoints with plain names, evaluation compiled as well."""

import pytest
import torch
from safetensors import safe_open

from allstep import Trainer, TrainingArguments
from allstep.testing.models import Regression, RegressionNet
from allstep.trainer.models.losses import accepted_columns

COMPILED = []
"""Graphs that the backend was given in this process."""


@torch._dynamo.register_backend
def counting(graph, inputs):
    """Runs graphs as they are, and counts them."""
    COMPILED.append(graph)
    return graph.forward


def trained(rank, size, folder, settings):
    torch._dynamo.reset()
    COMPILED.clear()
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    model = RegressionNet()
    trainer = Trainer(model, args, train_dataset=Regression(64), eval_dataset=Regression(8, 1000))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.model is model
    assert accepted_columns(model, ["labels"]) >= {"x", "labels"}
    torch._dynamo.reset()
    return [each.detach() for each in model.parameters()], loss, len(COMPILED), list(model.state_dict())


def test_a_compiled_model_trains_and_is_saved_like_any_other(ranks, tmp_path):
    plain = ranks.run(trained, tmp_path / "plain", {}, timeout=120)
    compiled = ranks.run(trained, tmp_path / "compiled", {"torch_compile_backend": "counting"}, timeout=120)
    for (weights, loss, none, names), (ours, own_loss, graphs, own_names) in zip(plain, compiled, strict=True):
        assert none == 0
        assert 1 <= graphs <= 4  # in training and in evaluation, and once more where the number of rows changes
        assert names == own_names
        assert own_loss == pytest.approx(loss)
        for one, other in zip(weights, ours, strict=True):
            torch.testing.assert_close(one, other)
    with safe_open(tmp_path / "compiled" / "checkpoint-4" / "model.safetensors", "pt") as saved:
        assert sorted(saved.keys()) == sorted(plain[0][3])


@pytest.mark.long
def test_the_default_backend_trains_alike(ranks, tmp_path):
    plain = ranks.run(trained, tmp_path / "plain", {}, timeout=120)
    compiled = ranks.run(trained, tmp_path / "compiled", {"torch_compile": True, "torch_compile_mode": "default"}, timeout=300)
    for one, other in zip(plain[0][0], compiled[1][0], strict=True):
        torch.testing.assert_close(one, other)
