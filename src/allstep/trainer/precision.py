"""Mixed precision: which dtype a forward computes in."""

from contextlib import AbstractContextManager, nullcontext

import torch

from allstep.arguments import TrainingArguments

__all__ = ["autocast"]


def autocast(args: TrainingArguments, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward: bfloat16 autocast with `bf16=True`, else nothing. Parameters stay as they are."""
    return torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
