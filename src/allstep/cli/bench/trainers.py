"""Steps per second under a Trainer: one job is one block of one side, and the jobs take turns."""

import importlib.util
import tempfile
import time
from dataclasses import asdict
from typing import Any

import click

from allstep.cli.bench.blocks import Block, estimate, medians
from allstep.cli.bench.cores import Patience, Watch
from allstep.cli.bench.starting import run_ranks
from allstep.cli.bench.turns import Turns

__all__ = ["PEER", "measure"]

PEER = "transformers"
BATCH, SAMPLES = 8, 4096
LEARNED = 0.5
"""A run whose loss is not below this part of the first one did not train."""
ALIKE = 0.5
"""Sides see the samples in orders of their own; final losses further apart than this part of the larger one are an error."""


def measure(ranks: int, *, steps: int, seconds: float, blocks: int) -> dict[str, Any]:
    """One row of the table.

    Args:
        steps: optimizer steps of one job, of which the first tenth is not timed.
        seconds: of measuring, all sides together.
        blocks: jobs of each side, at the least.
    """
    sides = ["allstep", "bare", *([PEER] if importlib.util.find_spec(PEER) else [])]
    turns, patience, elapsed = Turns(sides, seconds=seconds, least=blocks), Patience(seconds), 0.0
    losses: dict[str, float] = {}
    version = ""
    wrong: list[str] = []
    while (side := turns.next(elapsed)) is not None:
        patience.wait()
        began = time.monotonic()
        with Watch() as watch:
            ends = job(side, ranks, steps)
        elapsed += time.monotonic() - began
        turns.add(side, Block(seconds=max(end["seconds"] for end in ends), foreign=watch.foreign))
        wrong += _wrong(side, ranks, ends) if side not in losses else []
        losses[side], version = ends[0]["loss"], ends[0]["torch"]
        click.echo(
            f"  {ranks} rank{'s' if ranks > 1 else ''}, {side}: {1 / turns.blocks[side][-1].seconds:.0f} steps/s", err=True
        )
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    if losses[high] - losses[low] > ALIKE * losses[high]:
        wrong.append(
            f"Trainer on {ranks} rank(s): after {steps} steps the loss on all samples is {losses[high]:.4f} under {high} and "
            f"{losses[low]:.4f} under {low}; both see the same samples"
        )
    samples = turns.samples

    def faster_than(other: str) -> Any:
        if other not in samples:
            return None
        found = estimate({one: samples[one] for one in ("allstep", other)}, lambda median: median[other] / median["allstep"])
        return None if found is None else asdict(found)

    return {
        "ranks": ranks,
        "torch": version,
        "steps_per_second": {side: 1 / each for side, each in medians(samples).items()},
        "over_bare": faster_than("bare"),
        "over_peer": faster_than(PEER),
        "loss": losses,
        "blocks": turns.spoilt,
        "wrong": wrong,
    }


def job(side: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Run one job of `side`; what each rank left."""
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as folder:
        settings = {
            "side": side,
            "steps": steps,
            "warm": max(1, steps // 10),
            "batch": BATCH,
            "samples": SAMPLES,
            "folder": folder,
        }
        return run_ranks("trainer", ranks, settings)


def _wrong(side: str, ranks: int, ends: list[dict[str, Any]]) -> list[str]:
    found = []
    if len({end["weights"] for end in ends}) > 1:
        found.append(f"Trainer on {ranks} ranks: the weights under {side} differ between ranks")
    first, last = ends[0]["loss_before"], ends[0]["loss"]
    if not last < LEARNED * first:
        found.append(
            f"Trainer on {ranks} rank(s): under {side} the loss went from {first:.4f} to {last:.4f} only; it does not learn"
        )
    return found
