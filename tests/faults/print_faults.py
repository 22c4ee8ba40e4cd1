"""Prints what docs/failure.md shows: each fault, what a person reads, and when the job ended."""

import importlib.util
import re
import sys
import tempfile
import time
from pathlib import Path

from allstep.testing import faults

HERE = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(backend="shm"):
    launches, every = load("conftest"), load("test_every_fault")
    for name, case in every.CASES.items():
        with tempfile.TemporaryDirectory(prefix="f-") as folder:
            where = every.FAULT.format(rank=case.rank, step=case.step)
            job = launches.Launch(Path(folder), every.SCRIPT.format(fault=f"faults.{case.fault}{where})"))
            job.start("--grace_period", "3", script_args=(backend,))
            status, errors = job.end()
            ended = time.time()
            (first, *_) = faults.fired(job.folder / "record")
            print(f"## {name}: rank {case.rank}, step {case.step}; exit code {status}, {ended - first['time']:.1f} s later\n")
            print("```text\n" + shown(errors, job.output) + "\n```\n", flush=True)
            job.close()


def shown(errors, output):
    """What a person reads, without tracebacks, the output of another rank, and what every run prints."""
    lines = [
        line for line in errors.splitlines() if not re.match(r"\[rank\d\]|  \||allstep: (\d ranks on|last output)|\s*$", line)
    ]
    stopped = [line for line in output.splitlines() if line.startswith(("stopped by", "1 of ", "  ", "NOTHING", "NO CHECK"))]
    return "\n".join([*lines, *stopped])


if __name__ == "__main__":
    main(*sys.argv[1:])
