"""Who did not come: asked of the store when a collective has broken off, and never before."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

__all__ = ["missing_ranks"]

_PATIENCE = timedelta(seconds=2)
"""How long the others may take to see that the collective has broken off."""


def missing_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of `group` that do not say, within two seconds, that a collective broke off for them too.

    Empty where all say so, or where the store is gone.
    """
    missing: list[int] = []
    with suppress(RuntimeError, KeyError, ValueError):  # the store went with the rank that kept it
        _, store = dist.distributed_c10d._world.pg_map[group or dist.group.WORLD]  # type: ignore[index]
        keys = [f"allstep/broke_off/{rank}" for rank in range(dist.get_world_size(group))]
        store.set(keys[dist.get_rank(group)], "yes")
        with suppress(RuntimeError):
            store.wait(keys, _PATIENCE)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    return missing
