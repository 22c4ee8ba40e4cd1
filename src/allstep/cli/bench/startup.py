"""How long two ranks take to start: from the command until the first all_reduce is done, under each launcher, in turns."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from allstep.cli.bench.blocks import Block, estimate, medians
from allstep.cli.bench.cores import Patience, Watch
from allstep.cli.bench.starting import environment
from allstep.cli.bench.turns import Turns
from allstep.launch.ports import HeldPort

__all__ = ["measure"]

RANKS = 2
SCRIPT = Path(__file__).parent / "programs" / "first_reduce.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
PORT = "PORT"
"""In a command: a port that is free."""
COMMANDS = {
    "allstep launch": [sys.executable, "-m", "allstep", "launch", "--num_processes", str(RANKS)],
    "torchrun --master-port": [*TORCHRUN, "--master-port", PORT],
    "torchrun --standalone": [*TORCHRUN, "--standalone"],
}
BARE = "bare processes"
WORTH_DIVIDING = 0.02
"""Part of the bare start that torchrun must add before ours is told as a share of that."""
LONGEST = 120.0
"""Seconds after which a start counts as hung."""


def measure(*, seconds: float, blocks: int, imports: int) -> dict[str, Any]:
    """Rows and ratios. Bare processes are the floor: what torch itself needs, with no launcher at all.

    Args:
        seconds: of measuring, all launchers together.
        blocks: of each launcher, at the least.
        imports: times that each import is timed, in an interpreter of its own.
    """
    racing = [name for name in COMMANDS if name.startswith("torchrun")]
    turns = Turns([BARE, "allstep launch"], racing=racing, seconds=seconds, least=blocks)
    patience, elapsed = Patience(seconds), 0.0
    for name in (BARE, *COMMANDS):
        once(name)  # so that all of them find the files in memory, and compiled
    while (side := turns.next(elapsed)) is not None:
        patience.wait()
        began = time.monotonic()
        with Watch() as watch:
            until = once(side)
        elapsed += time.monotonic() - began
        turns.add(side, Block(seconds=until, foreign=watch.foreign))
        click.echo(f"  {side}: {until:.2f} s", err=True)
    samples = turns.samples
    best = turns.best
    own = estimate(
        {"ours": samples["allstep launch"], "theirs": samples[best], "bare": samples[BARE]},
        _share_of_cost,
    )
    whole = estimate(
        {"ours": samples["allstep launch"], "theirs": samples[best]}, lambda median: median["ours"] / median["theirs"]
    )
    assert whole is not None
    return {
        "rows": [{"launcher": side, "ranks": RANKS, "seconds": each} for side, each in medians(samples).items()],
        "best_torchrun": best,
        "own_cost_over_torchrun": None if own is None else asdict(own),
        "over_torchrun": asdict(whole),
        "imports": {name: import_time(name, imports) for name in ("allstep", "torch")},
        "torch": version("torch"),
        "blocks": turns.spoilt,
        "wrong": [],
    }


def _share_of_cost(median: Mapping[str, float]) -> float | None:
    """What our launcher adds to bare processes, as a part of what theirs adds; None where that is nothing to speak of."""
    theirs = median["theirs"] - median["bare"]
    return (median["ours"] - median["bare"]) / theirs if theirs > WORTH_DIVIDING * median["bare"] else None


def once(side: str) -> float:
    """Seconds from the start of `side` until every rank has its first sum.

    Raises:
        click.ClickException: it failed, which a wrong sum does too, or took longer than `LONGEST`.
    """
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as folder, HeldPort() as held:
        tail = [str(SCRIPT), folder]
        variables = environment(os.environ)
        if side == BARE:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.port), "WORLD_SIZE": str(RANKS)}
            starts = [([sys.executable, *tail], {**variables, **meeting, "RANK": str(rank)}) for rank in range(RANKS)]
        else:
            command = [str(held.port) if word == PORT else word for word in COMMANDS[side]]
            starts = [([*command, *tail], variables)]
        began = time.monotonic()
        running = [
            subprocess.Popen(
                command,
                env=each,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command, each in starts
        ]
        try:
            said = [process.communicate(timeout=LONGEST)[0].decode(errors="replace") for process in running]
        except subprocess.TimeoutExpired:
            raise click.ClickException(
                f"{side}: {RANKS} ranks did not come to their first all_reduce in {LONGEST:g} s."
            ) from None
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        if any(process.returncode for process in running):
            raise click.ClickException(f"{side}: the {RANKS} ranks failed:\n{''.join(said)[-2000:]}")
        return max(float(Path(folder, f"rank-{rank}").read_text()) for rank in range(RANKS)) - began


def import_time(module: str, times: int) -> dict[str, Any]:
    """Milliseconds of `import module` in a new interpreter, and whether torch came with it."""
    timed = f"import time; t = time.perf_counter(); import {module}; t = time.perf_counter() - t"
    code = f"{timed}; import sys; print(t, 'torch' in sys.modules)"
    found = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(times + 1)
    ][1:]
    return {"ms": 1e3 * statistics.median(float(one[0]) for one in found), "loads_torch": found[0][1] == "True"}
