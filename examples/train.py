"""The smallest complete script: a model, data, arguments, and the same lines for one process or many.

allstep launch --num_processes 2 examples/train.py
torchrun --nproc_per_node 2 examples/train.py
accelerate launch --multi_gpu --num_processes 2 examples/train.py
python examples/train.py --learning_rate 3e-3
"""

import torch
from torch import Tensor, nn

from allstep import ArgumentParser, Trainer, TrainingArguments


class Classifier(nn.Module):
    """Is a point of the plane inside the circle or outside?"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(points)  # (batch, 2)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return [{"points": point, "labels": (point.norm() > 1.2).long()} for point in points]


def main() -> None:
    parser = ArgumentParser(TrainingArguments)  # every argument is an option too, such as --ddp_timeout 60
    parser.set_defaults(
        output_dir="outputs/train",
        per_device_train_batch_size=16,  # samples of one micro-batch on one rank
        gradient_accumulation_steps=2,  # micro-batches of a step; gradients are reduced once, on the last of them
        num_train_epochs=5,
        learning_rate=1e-2,
        ddp_find_unused_parameters=None,  # parameters without a gradient are found at the end of backward, at no cost
        ddp_bucket_cap_mb=None,  # MiB of gradients that one all-reduce carries; larger: fewer calls, less overlap
        ddp_broadcast_buffers=None,  # True: rank 0's buffers, such as BatchNorm's, go to all ranks at each step
        ddp_backend=None,  # by device: "nccl" on NVIDIA GPUs, on the CPU what is quickest there
        ddp_timeout=60,  # seconds for joining and each collective; then an error, never a wait
        gradient_checkpointing=False,  # True: recompute activations in backward; less memory, more compute
    )
    (args,) = parser.parse_args_into_dataclasses()

    torch.manual_seed(args.seed)  # every way to start begins with the same weights
    trainer = Trainer(
        model=Classifier(),
        args=args,
        train_dataset=samples(2000, seed=1),
        eval_dataset=samples(500, seed=2),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()  # the same numbers on every rank
    if trainer.is_world_process_zero():
        print(f"{metrics['eval_accuracy']:.1%} of held-out points are right")


if __name__ == "__main__":
    main()
