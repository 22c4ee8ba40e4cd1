"""What a collective is, in one 64-bit number that ranks compare before they touch each other's memory."""

import torch
import torch.distributed as dist

__all__ = ["Call", "describe", "pack"]

Call = int
"""A packed call."""

KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "number",
)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

_KIND_OF = {name: number for number, name in enumerate(KINDS)}
_DTYPE_OF = {dtype: number for number, dtype in enumerate(DTYPES)}
_OP_OF = {getattr(dist.ReduceOp, name): number for number, name in enumerate(OPS)}
_NUMEL_BITS = 38
_NO_OP = 15


def pack(kind: str, dtype: torch.dtype, numel: int, op: "dist.ReduceOp.RedOpType | None" = None, root: int = 0) -> Call:
    """The number of a call; equal on all ranks that run the same.

    Args:
        kind: one of `KINDS`.
        dtype: one of `DTYPES`; others travel as bytes.
        numel: elements of what each rank brings, below 2**38.
        op: how values are combined, where they are.
        root: the rank that sends or receives all, where there is one; below 1024.
    """
    number = _KIND_OF[kind] << 5 | _DTYPE_OF.get(dtype, 31)
    number = number << 4 | (_NO_OP if op is None else _OP_OF[op])
    return (number << 10 | root) << _NUMEL_BITS | numel


def describe(call: Call) -> str:
    """A call in words."""
    numel, rest = call & ((1 << _NUMEL_BITS) - 1), call >> _NUMEL_BITS
    root, op, dtype, kind = rest & 1023, rest >> 10 & 15, rest >> 14 & 31, rest >> 19
    if not 0 <= kind < len(KINDS):
        return "something else"
    name = KINDS[kind]
    if name in ("barrier", "number"):
        return "exchange of numbers" if name == "number" else name
    kind_of_value = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "value"
    how = f" ({OPS[op]})" if op < len(OPS) else ""
    whose = (
        f" of rank {root}" if name in ("broadcast", "scatter") else f" to rank {root}" if name in ("reduce", "gather") else ""
    )
    return f"{name}{how}{whose} with {numel} x {kind_of_value}"
