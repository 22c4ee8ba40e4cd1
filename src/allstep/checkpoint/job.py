"""Which checkpoints are those of this job: for one that its launcher has started again after a failure.

A folder may hold checkpoints of an earlier run, of later steps even. A job that is started again by itself must not go on from
those: nobody has asked it to.
"""

import os
import time
from collections.abc import Mapping
from datetime import datetime

from allstep.checkpoint.manifest import Manifest

__all__ = ["is_of_this_job", "job_name", "launched_at"]

_NAMELESS = ("", "none")
"""What torchrun calls jobs that nobody gave a name."""


def job_name(variables: Mapping[str, str] = os.environ) -> str:
    """The name that torchrun's agents of one job share, also of those that join it later; empty where there is none."""
    name = variables.get("TORCHELASTIC_RUN_ID", "")
    return "" if name in _NAMELESS else name


def launched_at() -> float:
    """When the launcher of this process was started, unix seconds: it outlives the ranks that it starts again."""
    with open(f"/proc/{os.getppid()}/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def is_of_this_job(manifest: Manifest, name: str, since: float) -> bool:
    """Whether a checkpoint was written by the job of that name, or since its launcher was started.

    Args:
        manifest: of the checkpoint.
        name: as `job_name` gives it.
        since: as `launched_at` gives it.
    """
    if name and manifest.job:
        return manifest.job == name
    # `created` has whole seconds, and says when the save ended
    return datetime.fromisoformat(manifest.created).timestamp() + 1 > since
