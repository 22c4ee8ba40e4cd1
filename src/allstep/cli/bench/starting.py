"""Starts the ranks of a benchmark with `allstep.launch`, and brings their results back."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from allstep.launch.agent import launch
from allstep.launch.failures import report
from allstep.launch.spec import LaunchSpec, cores_available

__all__ = ["STEADY_MEMORY", "environment", "machine", "run_ranks"]

STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc gives the memory of large gradients back to the system after each step in some processes and not in others, and the
same step then takes half as long again by chance. All sides get these; what the user set is left as it is."""

PROGRAMS = "allstep.cli.bench.programs"
OUTPUT = "output.txt"
"""In the folder of results: what rank 0 of a program wrote that is silent."""
LAST_LINES = 30


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of every rank: one thread each, steady memory, no launcher from outside, and no wait for a name server."""
    outside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLSTEP_RUN_ID")
    rest = {name: value for name, value in variables.items() if name not in outside}
    return {**STEADY_MEMORY, "GLOO_SOCKET_IFNAME": "lo", **rest, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_ranks(program: str, ranks: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a module of `programs` on `ranks` ranks; what each left as its result, by rank.

    Raises:
        click.ClickException: a rank failed. The message is the launcher's report.
        SystemExit: a signal ended the ranks, such as that of Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as folder:
        spec = LaunchSpec(
            script=f"{PROGRAMS}.{program}",
            module=True,
            args=(json.dumps(settings), folder),
            num_processes=ranks,
            num_cpu_threads_per_process=1,
        )
        result = launch(spec, variables=environment(os.environ), say=lambda _: None)
        if result.interrupted_by is not None:
            click.echo(report(result, os.getcwd()), err=True)
            sys.exit(result.exit_code)
        if result.exit_code:
            raise click.ClickException(
                f"the ranks of {program} did not finish.\n{_output(folder)}{report(result, os.getcwd())}"
            )
        return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _output(folder: str) -> str:
    """The last that rank 0 wrote, where its program kept it out of the terminal."""
    path = Path(folder, OUTPUT)
    lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:] if path.exists() else []
    return "".join(f"  | {line}\n" for line in lines)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": cores_available(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
