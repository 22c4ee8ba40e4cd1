"""Randomness that belongs to the sample, not to the rank.

Python's, numpy's and torch's generators are seeded from what is being computed: (seed, epoch, index) around each sample that a
dataset prepares, (seed, step, place in the grid) around each forward. So augmentation and dropout are the same at any world
size, any number of loader workers, and after a resume; and they differ between samples, epochs and ranks.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["mixed", "preserved_generators", "seed_generators"]


def mixed(*numbers: int) -> int:
    """A 63-bit seed that depends on every one of `numbers` and on their order."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (with its accelerators)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long, and this runs per sample
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():
        torch.xpu.manual_seed_all(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Give the global generators of Python, numpy and torch's CPU back as they were."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
