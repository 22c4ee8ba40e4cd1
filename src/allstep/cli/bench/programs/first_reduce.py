"""One rank of a job whose start is timed: join, reduce one number, and leave the time at which that was done."""

import os
import sys
import time

import torch
import torch.distributed as dist

__all__ = ["main"]


def main() -> None:
    """Run on every rank. CLOCK_MONOTONIC is one clock for all processes of a host."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    number = torch.full((1,), float(rank + 1))
    dist.all_reduce(number)
    done = time.monotonic()
    if number.item() != size * (size + 1) / 2:
        raise SystemExit(f"rank {rank} of {size}: the sum is {number.item():g}, not {size * (size + 1) / 2:g}")
    with open(os.path.join(sys.argv[1], f"rank-{rank}"), "w") as file:
        file.write(str(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
