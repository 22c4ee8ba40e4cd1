"""Runs of the user's script: each started by `allstep launch`, stopped after some steps, and read from its ledger."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from allstep.report.ledger import LEDGER_FOLDER, LedgerStep, read_ledger
from allstep.trainer.verification import VARIABLE, Verification

__all__ = ["NotVerified", "Script", "run_script"]

_LAST_LINES = 30


class NotVerified(click.ClickException):
    """Whether runs are the same could not be found out."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the user wants to have verified."""

    name: str
    is_module: bool
    args: Sequence[str]


def run_script(script: Script, ranks: int, verification: Verification, threads: int) -> dict[int, LedgerStep]:
    """Run it on `ranks` ranks; step -> what it did.

    Args:
        threads: CPU threads of each rank, equal in all runs that are compared.

    Raises:
        NotVerified: the script failed, or trained nothing with allstep's Trainer; with the end of its output.
    """
    folder = Path(verification.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "allstep", "launch", "--num_processes", str(ranks)]
    words += ["--num_cpu_threads_per_process", str(threads), *(["-m"] if script.is_module else []), script.name, *script.args]
    outside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLSTEP_RUN_ID")
    variables = {name: value for name, value in os.environ.items() if name not in outside}
    log, began = folder / "output.txt", time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            words,
            env={**variables, VARIABLE: verification.to_json()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise NotVerified(f"The script failed on {ranks} rank(s), exit status {done.returncode}:\n{_end(log)}")
    try:
        steps = read_ledger(folder / LEDGER_FOLDER)
    except FileNotFoundError:
        raise NotVerified(
            f"{script.name} ended on {ranks} rank(s) without a step of allstep's Trainer. Is train() called, and on every "
            f"rank? The end of its output:\n{_end(log)}"
        ) from None
    click.echo(f"  {ranks} rank(s) x {threads} thread(s): {len(steps)} steps in {time.monotonic() - began:.0f} s")
    return steps


def _end(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])
