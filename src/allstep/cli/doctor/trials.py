"""Tries out torch and its backends, in processes of their own and with a deadline."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["try_backends", "try_torch"]

SECONDS = 120.0
"""For one trial, with everything that it imports."""

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("ALLSTEP_", "TORCHELASTIC_", "ACCELERATE_", "PET_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "I_MPI_")


def try_torch(seconds: float = SECONDS) -> dict[str, Any]:
    """What torch says of itself and of this machine (see `torch_facts`), or {"error": why it does not}."""
    code, output, errors = _run([sys.executable, "-m", "allstep.comm.selftest", "torch"], os.environ, seconds)
    try:
        facts: dict[str, Any] = json.loads(output.strip().splitlines()[-1]) if code == 0 else {}
    except (ValueError, IndexError):
        facts = {}
    return facts or {"error": _last(errors) or _ending(code, seconds)}


def try_backends(torch_facts: Mapping[str, Any], seconds: float = SECONDS) -> list[dict[str, Any]]:
    """For each backend: whether two ranks joined and added up, in how many seconds, or why not.

    One that needs more devices than there are is not tried; `skipped` then says so.
    """
    return [_trial(backend, torch_facts, seconds) for backend in torch_facts.get("backends", ())]


def _trial(backend: str, torch_facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    devices = len(torch_facts["devices"])
    found: dict[str, Any] = {"backend": backend, "ok": None, "seconds": None, "error": None, "skipped": None}
    if backend in ("mpi", "ucc"):
        return {**found, "skipped": f"{backend} needs its own starter"}
    if backend not in ("gloo", "shm") and devices < 2:
        return {**found, "skipped": f"two ranks need two devices, and there is {devices}"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="allstep-") as folder:
        own = {n: v for n, v in os.environ.items() if n not in OF_LAUNCHERS and not n.startswith(_PREFIXES)}
        launch = ["-m", "allstep", "launch", "--num_processes", "2", "--log_dir", folder]
        launch += ["--num_cpu_threads_per_process", "1", "-m", "allstep.comm.selftest", backend]
        code, _, errors = _run([sys.executable, *launch], own, seconds)
    took = round(time.monotonic() - began, 1)
    if code == 0:
        return {**found, "ok": True, "seconds": took}
    return {**found, "ok": False, "seconds": took, "error": _headline(errors) or _ending(code, seconds)}


def _run(command: list[str], variables: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code, output and errors; the code is None where the time ran out. No process is left."""
    process = subprocess.Popen(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its ranks, which have sessions of their own
        try:
            output, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        return None, output, errors
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _headline(errors: str) -> str:
    """The line of the launcher's report that names the cause; else the last line of all."""
    lines = [line.removeprefix("allstep: ") for line in errors.splitlines() if line.startswith("allstep: ")]
    return next((line for line in lines if " failed" in line), "") or _last(errors)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _ending(code: int | None, seconds: float) -> str:
    return f"it did not end within {seconds:g} s" if code is None else f"it ended with exit code {code}"
