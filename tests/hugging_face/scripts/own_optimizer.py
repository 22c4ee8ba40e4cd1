"""A plain torch model and dataset, with an optimizer and a schedule of one's own."""

import argparse
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import get_cosine_schedule_with_warmup, set_seed
from transformers import Trainer, TrainingArguments


class Waves(Dataset):
    """Points of a curve, in order."""

    def __init__(self, samples):
        self.x = torch.linspace(-3, 3, samples).unsqueeze(1)
        self.y = torch.sin(2 * self.x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels=None):
        prediction = self.layers(x)
        loss = None if labels is None else nn.functional.mse_loss(prediction, labels)
        return {"loss": loss, "prediction": prediction}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    cli = parser.parse_args(argv)
    set_seed(3)
    model, train, held_out = Net(), Waves(64), Waves(25)
    args = TrainingArguments(
        output_dir=cli.output_dir,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=cli.gradient_accumulation_steps,
        max_steps=40,
        logging_steps=10,
        save_steps=20,
        eval_steps=20,
        eval_strategy="steps",
        seed=3,
    )
    head, body = [], []
    for name, parameter in model.named_parameters():
        (head if name.startswith("layers.2") else body).append(parameter)
    optimizer = torch.optim.AdamW([{"params": body, "lr": 2e-2}, {"params": head, "lr": 5e-3}], weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out, optimizers=(optimizer, scheduler))
    trainer.train()
    if trainer.is_world_process_zero():
        entries = trainer.state.log_history
        found = {
            "losses": [entry["loss"] for entry in entries if "loss" in entry],
            "rates": [entry["learning_rate"] for entry in entries if "loss" in entry],
            "eval": [entry["eval_loss"] for entry in entries if "eval_loss" in entry],
            "groups": [group["lr"] for group in trainer.optimizer.param_groups],
        }
        with open(os.path.join(cli.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
