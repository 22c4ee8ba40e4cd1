"""Forking beside gloo: when it is safe to start loader workers.

gloo's threads enter the interpreter for a moment after each collective, to let go of Python objects. A fork in that moment
leaves the child with a lock of the interpreter that nobody will release: it hangs in `os.fork`, and the rank waits for its
first batch for ever. Seen with CPython 3.11, once in about two hundred runs with two loader workers on busy cores.
"""

import os
import time

__all__ = ["wait_for_quiet_threads"]

_INTERVAL = 0.001
_DEADLINE = 1.0


def wait_for_quiet_threads() -> None:
    """Return when gloo's threads have nothing left to do in the interpreter; for before a fork, with no collective under way.

    While this thread sleeps, a thread that wants the interpreter gets it, and so is runnable; one that still sleeps rests.
    """
    deadline = time.monotonic() + _DEADLINE
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
        quiet = quiet + 1 if all(state == "S" for state in _states_of_gloo_threads()) else 0


def _states_of_gloo_threads() -> list[str]:
    """Scheduler states ("S" sleeps, "R" runs or would like to) of this process's threads that carry out gloo's collectives."""
    states = []
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if name.startswith("pt_gloo"):
            states.append(rest.split()[0])
    return states
