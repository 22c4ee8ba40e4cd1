"""Mixed precision: which dtype a forward computes in."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from allstep.arguments import TrainingArguments

__all__ = ["autocast", "warn_of_precision"]


def autocast(args: TrainingArguments, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward: bfloat16 autocast with `bf16=True`, else nothing. Parameters stay as they are."""
    return torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()


def warn_of_precision(args: TrainingArguments, variables: Mapping[str, str]) -> None:
    """Warn where the launcher was told of a precision that the arguments do not say: Hugging Face's would take it."""
    asked = variables.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("", "no") and not (asked == "bf16" and args.bf16):
        warnings.warn(
            f"The launcher was given --mixed_precision {asked}, which allstep's Trainer does not read: precision is an "
            f"argument of the run (docs/launching.md). Write TrainingArguments(bf16=True) for bfloat16; now it is {args.bf16}.",
            stacklevel=3,
        )
