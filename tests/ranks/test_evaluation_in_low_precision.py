"""bf16_full_eval and fp16_full_eval: the model itself is evaluated low, and training does not notice."""

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Regression, RegressionNet

BACKENDS = ("gloo", "shm")


class Watched(RegressionNet):
    """With statistics; notes what its evaluations see."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.seen = set()

    def forward(self, x, labels=None):
        if not self.training:
            self.seen.add((x.dtype, self.net[0].weight.dtype, self.net[1].running_mean.dtype))
        return super().forward(x, labels)


def trained(rank, size, folder, settings):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    model = Watched()
    trainer = Trainer(model, args, train_dataset=Regression(64), eval_dataset=Regression(10, 1000))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    predicted = trainer.predict(Regression(10, 1000)).predictions
    return digest([*model.named_parameters(), *model.named_buffers()]), model.seen, losses, predicted


@pytest.mark.parametrize(("field", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_evaluations_are_low_and_training_has_the_same_bits(ranks, tmp_path, field, dtype):
    full = ranks.run(trained, tmp_path / "full", {})
    for (weights, _, losses, predicted), (own, seen, own_losses, own_predicted) in zip(
        full, ranks.run(trained, tmp_path / "low", {field: True}), strict=True
    ):
        assert own == weights
        assert seen == {(dtype, dtype, dtype)}
        assert own_losses == pytest.approx(losses, rel=0.05)
        assert own_losses != losses
        assert own_predicted == pytest.approx(predicted, rel=0.05, abs=0.05)
