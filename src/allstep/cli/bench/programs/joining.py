"""How a program of `allstep bench` begins and ends: its settings, the default group, the group under test, its result."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from allstep.errors import BackendError

__all__ = ["group_of", "joined", "leave_result", "output_to_file", "settings"]


def settings() -> dict[str, Any]:
    """What the command said: JSON, the first argument of the program."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def leave_result(value: Any) -> None:
    """Write this rank's result where the command looks for it."""
    with open(os.path.join(sys.argv[2], f"rank-{os.environ.get('RANK', '0')}.json"), "w") as file:
        json.dump(value, file)


def output_to_file() -> None:
    """Trainers tell about themselves; that is kept beside the results, and shown where the rank fails."""
    file = os.open(os.path.join(sys.argv[2], "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """One thread a rank, and a default group on gloo, whose ranks sleep while they wait."""
    os.dup2(2, 1)  # whatever a library prints: standard output belongs to the command
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_of(backend: str) -> dist.ProcessGroup:
    """A group of all ranks on `backend`: NAME, or MODULE:NAME where importing MODULE registers it.

    Raises:
        BackendError: there is no such backend.
    """
    module, _, name = backend.rpartition(":")
    if module or name == "shm":
        try:
            importlib.import_module(module or "allstep.comm.shm")
        except ImportError as error:
            raise BackendError(f"--backend {backend}: its module cannot be imported: {error}.") from error
    if not dist.is_backend_available(name):
        raise BackendError(
            f"--backend {backend} is not there. Write the name of a torch.distributed backend for the CPU, such as gloo or "
            f"shm, or MODULE:NAME where importing MODULE registers NAME."
        )
    group = dist.new_group(backend=name)
    assert isinstance(group, dist.ProcessGroup)
    return group
