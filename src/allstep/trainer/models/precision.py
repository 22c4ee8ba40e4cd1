"""Precision: which dtype a forward computes in, and whether kernels may round or reorder."""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.ddp.mixed_precision import cast_inputs
from allstep.errors import ArgumentsError

__all__ = ["autocast", "evaluation_dtype", "in_evaluation_dtype", "precision_line", "precision_of", "set_numerics"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(args: TrainingArguments) -> str:
    """What forward and loss run in: "bf16", "fp16" or "no", for the parameters' own dtype.

    Where the arguments say nothing, it is what the launcher was told with --mixed_precision, as in Hugging Face's.

    Raises:
        ArgumentsError: the launcher was told something else.
    """
    precision = args.mixed_precision
    if precision not in ("no", *_DTYPES):
        raise ArgumentsError(
            f"The launcher was told --mixed_precision {precision} (ACCELERATE_MIXED_PRECISION): expected no, bf16 or fp16. "
            f"Leave it out there, or write TrainingArguments(bf16=True), which comes first."
        )
    return precision


def precision_line(args: TrainingArguments) -> str | None:
    """A line for a person, where it is the launcher and not the arguments that says the precision."""
    precision = precision_of(args)
    if precision == "no" or args.fp16 or args.bf16:
        return None
    return f"precision {precision}, as the launcher was told (--mixed_precision); the arguments say neither bf16 nor fp16"


def autocast(args: TrainingArguments, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward: autocast to bfloat16 or float16, or nothing. Parameters stay as they are."""
    dtype = _DTYPES.get(precision_of(args))
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


# ---- evaluation in a low dtype


def evaluation_dtype(args: TrainingArguments) -> torch.dtype | None:
    """What the model itself is cast to for evaluation and prediction; None for nothing."""
    return torch.bfloat16 if args.bf16_full_eval else torch.float16 if args.fp16_full_eval else None


@contextmanager
def in_evaluation_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, floating parameters, buffers and inputs of `model` are of `dtype`; None: nothing is cast.

    Parameters and buffers are held meanwhile, and afterwards they are the same again, bit for bit.
    """
    if dtype is None:
        yield
        return
    held = [(each, each.data) for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    handle = model.register_forward_pre_hook(
        lambda module, inputs, kwargs: (cast_inputs(inputs, dtype), cast_inputs(kwargs, dtype)), with_kwargs=True
    )
    try:
        for tensor, data in held:
            tensor.data = data.to(dtype)
        yield
    finally:
        handle.remove()
        for tensor, data in held:
            tensor.data = data


# ---- kernels


def set_numerics(args: TrainingArguments, variables: MutableMapping[str, str]) -> None:
    """Tell torch what the arguments say of TF32 and of determinism; it stays so in this process. Before the first kernel.

    Args:
        variables: of this process; kernels that read their settings there are told too, unless somebody has told them already.
    """
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32
    if args.full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        variables.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
