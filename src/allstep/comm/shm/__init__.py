"""The `shm` backend: CPU ranks of one host reduce in memory that they share. Importing this registers it with torch."""

import torch.distributed as dist

from allstep.comm.shm.process_group import ShmProcessGroup

__all__ = ["ShmProcessGroup"]

if not hasattr(dist.Backend, "SHM"):
    dist.Backend.register_backend("shm", ShmProcessGroup, devices=["cpu"])
