"""Run on every rank by test_gpus.py: trains with nccl and leaves what it saw as JSON.

allstep launch --num_processes 2 tests/gpu/train_on_gpus.py OUTPUT_DIR
"""

import json
import sys
from pathlib import Path

import torch

from allstep import DistributedDataParallel, Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Regression, RegressionNet


def reduced_gradient(rank: int, device: str) -> list[float]:
    """The engine alone: gradients of rank + 1 on each rank, averaged in the collective."""
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).to(device), device_ids=[torch.device(device)])
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # moved to the device by the wrapper
    return model.module.weight.grad.flatten().tolist()


def main() -> None:
    folder = Path(sys.argv[1])
    args = TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=2,
    )
    trainer = Trainer(RegressionNet(0.1), args, train_dataset=Regression(100), eval_dataset=Regression(30))
    trainer.train()
    world = trainer.world
    seen = {
        "device": world.device,
        "backend": world.backend,
        "model_device": str(next(trainer.model.parameters()).device),
        "digest": digest(trainer.model.named_parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "predictions": trainer.predict(Regression(30)).predictions.tolist(),
        "gradient": reduced_gradient(world.rank, world.device),
    }
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
