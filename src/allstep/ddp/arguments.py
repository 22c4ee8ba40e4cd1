"""The constructor arguments of `DistributedDataParallel`, brought into the form that the engine works with."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from allstep.comm.communicator import Communicator
from allstep.ddp.layout import BucketCaps

__all__ = [
    "bucket_caps",
    "buffer_flags",
    "check_parameters",
    "delayed_parameters",
    "group_of",
    "input_device",
]

_DEFAULT_CAP_MB = {"cpu": 5.0}  # gloo is fastest there; torch's 25 everywhere else


def group_of(
    process_group: "dist.ProcessGroup | Communicator | None", device_mesh: Any
) -> "dist.ProcessGroup | Communicator | None":
    """The ranks to average over, named by a group, or by a mesh of one dimension; None is the default group.

    Raises:
        RuntimeError: both are given, or the mesh has more dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. Leave one of them out.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}. Slice it: mesh['name of a dimension'].")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def buffer_flags(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether rank 0's buffers are sent before forwards, given either of torch's two names for it."""
    if broadcast_buffers is not None:
        more = " forward_sync_buffers is given too, and counts." if forward_sync_buffers is not None else ""
        warnings.warn(
            f"broadcast_buffers has a newer name in torch: write forward_sync_buffers={broadcast_buffers}.{more} Buffers are "
            f"made equal when the model is wrapped, whatever it says.",
            FutureWarning,
            stacklevel=3,
        )
    given = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return given is not False


def bucket_caps(
    cap_mb: float | Sequence[float] | None,
    cap_mb_list: Sequence[float] | None,
    device: torch.device,
    *,
    shared: bool = False,
) -> BucketCaps:
    """Sizes of buckets: one for all, one for each in turn (the last one for the rest), or what suits `device`.

    Ranks that are `shared`, in memory, sum what still lies in the cache.

    Raises:
        ValueError: a size that is not above zero.
    """
    asked = cap_mb_list or cap_mb
    sizes: Sequence[float] = asked if isinstance(asked, Sequence) else [] if asked is None else [asked]
    if any(not isinstance(size, (int, float)) or size <= 0 for size in sizes):
        raise ValueError(f"bucket_cap_mb={asked}: expected a size in MiB above zero, or several.")
    if isinstance(asked, Sequence) and asked:
        return BucketCaps.in_turn(asked)
    if shared and not sizes:
        return BucketCaps.in_shared_memory()
    return BucketCaps.of(sizes[0] if sizes else None, default_mb=_DEFAULT_CAP_MB.get(device.type, 25.0))


def delayed_parameters(
    trainable: Sequence[tuple[str, nn.Parameter]],
    delay_named: Iterable[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
) -> tuple[frozenset[str], str]:
    """Names of the parameters to reduce behind all others, and of the one whose gradient they wait for; none and "" else.

    Raises:
        ValueError: one is given without the other, or something that is not among the `trainable` ones.
    """
    if delay_named is None and trigger is None:
        return frozenset(), ""
    if delay_named is None or trigger is None:
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the parameters to "
            "delay, and the one whose gradient they wait for."
        )
    names = {id(parameter): name for name, parameter in trainable}
    given = [*delay_named, ("param_to_hook_all_reduce", trigger)]
    strangers = [name for name, parameter in given if id(parameter) not in names]
    if strangers:
        raise ValueError(
            f"{', '.join(strangers)}: no parameter of the module that requires a gradient. Give (name, parameter) pairs of "
            f"module.named_parameters()."
        )
    return frozenset(names[id(parameter)] for _, parameter in given[:-1]), names[id(trigger)]


def input_device(
    device: torch.device, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """Where inputs are moved to; None where they stay as they are.

    Raises:
        ValueError: more than one device, or another one than the module's.
    """
    if not device_ids and output_device is None:
        return None
    wanted = [*(device_ids or ()), *([] if output_device is None else [output_device])]
    named = [torch.device(device.type, d) if isinstance(d, int) else torch.device(d) for d in wanted]
    if device.type == "cpu" or any(d != device for d in named):
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} do not fit a module on {device}: write "
            f"{'device_ids=None' if device.type == 'cpu' else f'device_ids=[{device.index}]'}."
        )
    return device


def check_parameters(module: nn.Module) -> None:
    """Refuse a module that cannot be replicated as it is.

    Raises:
        RuntimeError: parameters have no shape yet (lazy modules).
        ValueError: parameters lie on several kinds of devices, or are split over ranks.
    """
    named = dict(module.named_parameters())
    lazy = [name for name, parameter in named.items() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"{', '.join(lazy[:10])} of {type(module).__name__} have no shape yet, as lazy modules get it from their first "
            f"input. Run a forward on one batch before wrapping it."
        )
    split = [name for name, parameter in named.items() if hasattr(parameter, "placements")]
    if split:
        raise ValueError(
            f"{', '.join(split[:10])} of {type(module).__name__} are DTensors, which lie on several ranks in parts. Here every "
            f"rank holds the whole model; use torch.distributed.fsdp.fully_shard over the data-parallel mesh for such a one."
        )
    kinds = sorted({parameter.device.type for parameter in named.values()})
    if len(kinds) > 1:
        raise ValueError(
            f"The parameters of {type(module).__name__} lie on devices of {len(kinds)} kinds, {' and '.join(kinds)}; expected "
            f"one. Move the module with .to(device) before wrapping it."
        )
