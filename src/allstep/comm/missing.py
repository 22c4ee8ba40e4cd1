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
    group = group or dist.group.WORLD
    if group is None:
        return missing
    with suppress(RuntimeError):  # the store went with the rank that kept it
        store = group.get_group_store()
        keys = [f"allstep/broke_off/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], "yes")
        with suppress(RuntimeError):
            store.wait(keys, _PATIENCE)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    return missing
