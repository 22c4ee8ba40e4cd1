"""The kinds of devices that ranks can train on: the backend made for each, how to see it, and how to hide some of it.

One table for the launcher, which must not import torch, and for the ranks.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "DeviceKind", "kind_here", "native_backends", "visible_devices"]


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device. Its name is also that of torch's module for it, such as `torch.cuda`."""

    name: str
    """As in `torch.device(name)`."""
    backend: str
    """The communication backend made for it. On the CPU of one host it is `shm` instead."""
    package: str = "torch"
    """The package that brings it to torch."""
    visible: str = ""
    """Environment variable that says which of the devices a process sees."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Folders in which Linux shows one entry for each device, and what their names match. Any that has entries counts."""


KINDS = (
    DeviceKind(
        name="cuda",
        backend="nccl",
        visible="CUDA_VISIBLE_DEVICES",
        nodes=(("/proc/driver/nvidia/gpus", r".+"), ("/dev", r"nvidia\d+")),
    ),
    DeviceKind(name="xpu", backend="xccl", visible="ZE_AFFINITY_MASK"),
    DeviceKind(
        name="npu",
        backend="hccl",
        package="torch_npu",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        nodes=(("/dev", r"davinci\d+"),),
    ),
    DeviceKind(
        name="mlu",
        backend="cncl",
        package="torch_mlu",
        visible="MLU_VISIBLE_DEVICES",
        nodes=(("/dev", r"cambricon_dev\d+"),),
    ),
    DeviceKind(
        name="musa",
        backend="mccl",
        package="torch_musa",
        visible="MUSA_VISIBLE_DEVICES",
        nodes=(("/dev", r"mtgpu\.\d+"),),
    ),
    DeviceKind(name="cpu", backend="gloo"),
)
"""In the order in which they are looked for; the CPU is always there. Those without `nodes` only torch can count."""


def native_backends() -> dict[str, str]:
    """Name of each kind → the backend made for it."""
    return {kind.name: kind.backend for kind in KINDS}


def kind_here(root: str = "") -> DeviceKind:
    """The first kind of which Linux shows a device on this machine; the CPU where there is none.

    Args:
        root: where /proc and /dev are looked for.
    """
    return next((kind for kind in KINDS if _present(kind, root)), KINDS[-1])


def visible_devices(variables: Mapping[str, str], root: str = "") -> int:
    """Accelerators that a rank with these `variables` would see, counted without torch or a driver's library.

    The kind's own variable narrows what the machine has. Like CUDA, the count ends at the first entry that is no device.
    """
    kind = kind_here(root)
    present = _present(kind, root)
    listed = variables.get(kind.visible)
    if listed is None:
        return present
    visible = 0
    for entry in (part.strip() for part in listed.split(",")):
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdecimal() and int(entry) < present):
            break
        visible += 1
    return min(visible, present)


def _present(kind: DeviceKind, root: str) -> int:
    return max((_entries(root + folder, pattern) for folder, pattern in kind.nodes), default=0)


def _entries(folder: str, pattern: str) -> int:
    try:
        return sum(re.fullmatch(pattern, name) is not None for name in os.listdir(folder))
    except OSError:
        return 0
