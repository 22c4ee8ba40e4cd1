"""How often the kernel killed a process of this control group because memory ran out: the difference between may and did."""

import os

__all__ = ["oom_kills"]

ROOT = ""
"""Where /proc and /sys are looked for; tests put a folder of their own here."""


def oom_kills(root: str = ROOT) -> int | None:
    """Processes of this control group that were killed for want of memory since it exists; None where nobody counts."""
    try:
        groups = _text(f"{root}/proc/self/cgroup").splitlines()
    except OSError:
        return None
    for line in groups:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            files = [f"{root}/sys/fs/cgroup{path}/memory.events", f"{root}/sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            # Inside a container the path may be the host's and not exist here; then the mount is our group.
            files = [f"{root}/sys/fs/cgroup/memory{path}/memory.oom_control", f"{root}/sys/fs/cgroup/memory/memory.oom_control"]
        else:
            continue
        count = next((found for file in files if (found := _count(file)) is not None), None)
        if count is not None:
            return count
    return None


def _count(path: str) -> int | None:
    if not os.path.exists(path):
        return None
    try:
        counts = dict(line.split(" ", 1) for line in _text(path).splitlines() if " " in line)
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
