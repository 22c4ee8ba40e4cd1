"""Forking beside gloo: when it is safe to start loader workers.

gloo's threads enter the interpreter for a moment after each collective, to let go of Python objects. A fork in that moment
leaves the child with a lock of the interpreter that nobody will release: it hangs in `os.fork`, and the rank waits for its
first batch for ever. Seen with CPython 3.11, once in about two hundred runs with two loader workers on busy cores.

A signal that asks a job to stop often goes to all of its processes, by torchrun or SLURM for instance. A worker that it ended
would take its rank along, in the middle of the step that was to be the last; so workers do not heed it, and a rank sees to it
that none outlives it (test_stop_on_request.py).

A child that collects garbage of its parent is the other danger: a loader that lies there would be shut down once more from
within the worker, and with it the workers that it shares a flag with ("can only test a child process", workers that stop).
"""

import atexit
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from allstep.comm.watchdog import quiet_watchdog

__all__ = ["forking_workers", "keep_what_was_here", "wait_for_quiet_threads"]

_WORKERS: dict[int, list[multiprocessing.process.BaseProcess]] = {}
"""Process -> the loader workers that it started."""

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


@contextmanager
def forking_workers() -> Iterator[None]:
    """Start loader workers inside; each of them has to call `keep_what_was_here` first (`worker_init_fn`)."""
    was_on, before = gc.isenabled(), {*multiprocessing.active_children()}
    gc.disable()
    try:
        wait_for_quiet_threads()
        with quiet_watchdog():
            yield
    finally:
        _note_workers([child for child in multiprocessing.active_children() if child not in before])
        if was_on:
            gc.enable()


def _note_workers(started: list[multiprocessing.process.BaseProcess]) -> None:
    if os.getpid() not in _WORKERS:
        _WORKERS[os.getpid()] = []
        atexit.register(_end_workers)  # behind that of multiprocessing, which waits for its children: so it runs before it
    alive = [worker for worker in _WORKERS[os.getpid()] if worker.is_alive()]
    _WORKERS[os.getpid()] = [*alive, *started]


def _end_workers() -> None:
    """At the end of a rank: end the workers that their loader could not."""
    for worker in _WORKERS.pop(os.getpid(), []):
        with suppress(Exception):  # torch raises for a worker that is killed, and this is the end of all of them
            worker.kill()


def keep_what_was_here(worker: int) -> None:
    """In a loader worker: what came from the parent is never collected; what is made here is, as ever.

    And signals that ask a job to stop are not heeded: the rank says when its workers end.
    """
    gc.freeze()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _do_nothing)  # unlike SIG_IGN it is not handed on to programs that the dataset runs


def _do_nothing(*_: object) -> None:
    return None


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
