"""Tries torch and a backend in processes of their own, for `allstep doctor`: `python -m allstep.comm.selftest WHAT`.

WHAT is `torch`, which prints what torch has here as one line of JSON, or a backend, which joins it with the other ranks and
adds up their numbers. A process that hangs or crashes in one of these takes nobody with it.
"""

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.process_group import available_backends, join, leave
from allstep.devices import native_backends
from allstep.errors import CollectiveError

__all__ = ["main", "torch_facts", "try_backend"]

SECONDS = 30.0
"""For joining, and for the sum."""
LENGTHS = (1, 1000, 1 << 20)
"""Elements of the tensors that are added: one message of each size that backends treat alike."""


def torch_facts() -> dict[str, Any]:
    """Version, devices and backends of this torch, on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    names = [str(getattr(module, "get_device_name", str)(index)) for index in range(count)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "device": accelerator.type if accelerator is not None else "cpu",
        "devices": names,
        "backends": available_backends(),
        "threads": torch.get_num_threads(),
    }


def try_backend(backend: str) -> None:
    """Join the other ranks by `backend` and check sums over all of them. Collective.

    Raises:
        CollectiveError: a sum is wrong.
    """
    device = next((name for name, native in native_backends().items() if native == backend), "cpu")
    world = join(backend=backend, timeout=timedelta(seconds=SECONDS), use_cpu=device == "cpu")
    if world.backend != backend:
        raise CollectiveError(f"{backend} was asked for, and {world.backend} is used in its place")
    expected = world.size * (world.size + 1) / 2
    for length in LENGTHS:
        total = torch.full((length,), world.rank + 1.0, device=world.device)
        dist.all_reduce(total)
        wrong = int((total != expected).sum())
        if wrong:
            raise CollectiveError(f"{wrong} of {length} sums are wrong on rank {world.rank}: expected {expected}")
    leave()


def main() -> None:
    """Do what `sys.argv` says."""
    if sys.argv[1] == "torch":
        sys.stdout.write(json.dumps(torch_facts()) + "\n")
    else:
        try_backend(sys.argv[1])


if __name__ == "__main__":
    main()
