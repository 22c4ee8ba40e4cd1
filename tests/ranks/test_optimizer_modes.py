"""Optimizers that train other weights than they are for (schedule-free ones) show these in evaluations and checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.testing.models import Regression, RegressionNet


class ScheduleFree(torch.optim.SGD):
    """Trains weights that are one larger than those it is for."""

    is_training = False

    def train(self):
        self.move(not self.is_training, 1.0)
        self.is_training = True

    def eval(self):
        self.move(self.is_training, -1.0)
        self.is_training = False

    @torch.no_grad()
    def move(self, moves, by):
        for group in self.param_groups if moves else ():
            torch._foreach_add_(group["params"], by)


class Watch(TrainerCallback):
    """What the weights are in the middle of a step."""

    def on_pre_optimizer_step(self, args, state, control, model, **others):
        self.in_step = float(model.net[0].bias.detach()[0])

    def on_evaluate(self, args, state, control, model, **others):
        self.after = float(model.net[0].bias.detach()[0])


def trained(rank, size, folder, first):
    args = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=first,
        save_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    model, watch = RegressionNet(), Watch()
    optimizer = ScheduleFree(model.parameters(), lr=0.0)
    trainer = Trainer(
        model,
        args,
        train_dataset=Regression(32),
        eval_dataset=Regression(8),
        callbacks=[watch],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    start = float(model.net[0].bias.detach()[0])
    trainer.train()
    return start, watch.in_step, watch.after, float(model.net[0].bias.detach()[0])


@pytest.mark.parametrize("first", [False, True])
def test_weights_are_those_of_use_outside_of_steps(ranks, tmp_path, first):
    for start, in_step, after, end in ranks.run(trained, tmp_path, first):
        assert in_step == torch.tensor(start).add(1.0)
        assert [after, end] == [start, start]
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors")["net.0.bias"][0] == start
