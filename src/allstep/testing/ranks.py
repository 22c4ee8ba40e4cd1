"""Real ranks for tests: processes that join one group and run a function each.

    def total(rank, size, scale):
        x = torch.full((3,), float(rank * scale))
        torch.distributed.all_reduce(x)
        return x

    assert run_ranks(total, 2, 10)[0].tolist() == [10.0, 10.0, 10.0]

`run_ranks` starts processes for one call; a `RankPool` keeps them, so that a call costs milliseconds. Functions are found again
in the ranks by file and name, so they must stand at the top level of a module; arguments and results are pickled.
"""

import atexit
import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from allstep.launch.linux import end_with_parent

__all__ = ["Outcome", "RankPool", "RanksError", "one_thread", "run_ranks"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """With one CPU thread, as ranks have: threads divide a sum among them, and so change its order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended on one rank."""

    rank: int
    value: Any = None
    error: str | None = None
    """Name of the exception's class; None where the call returned."""
    message: str = ""
    traceback: str = ""


class RanksError(AssertionError):
    """A call failed on some rank, or did not come back in time. The message holds each failing rank's traceback."""


class RankPool:
    """`size` processes, joined in one group, that run functions `fn(rank, size, *args)`.

    Args:
        size: number of ranks.
        threads: torch threads of each rank.
        timeout: seconds for every collective of the group.
        backend: of the group: "gloo" or "shm".
    """

    def __init__(self, size: int, *, threads: int = 1, timeout: float = 60.0, backend: str = "gloo") -> None:
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (os.getpid(), rank, size, self._store.port, threads, timeout, backend, theirs)
            process = context.Process(target=_serve, args=arguments)  # not a daemon: loader workers are its children
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `fn(rank, size, *args)` on every rank and return the results by rank.

        Raises:
            RanksError: the call failed on a rank, or took more than `timeout` seconds.
        """
        outcomes = self.outcomes(fn, *args, timeout=timeout)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise RanksError("\n".join(f"rank {o.rank} of {self.size}:\n{o.traceback or o.message}" for o in failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """As `run`, but errors are part of the answer."""
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} cannot be found again by name: define it at the top level of its module.")
        # pickled here, not by the pipe, which would share tensors through segments and threads that outlive the call
        task = pickle.dumps((fn.__code__.co_filename, fn.__qualname__, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        waiting = dict(enumerate(self._pipes))
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout)
            if not ready:
                self.close()
                raise RanksError(f"rank(s) {sorted(waiting)} of {self.size} did not end {fn.__qualname__} within {timeout} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    outcomes[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
                except EOFError:
                    self._processes[rank].join(5)
                    outcomes[rank] = Outcome(rank=rank, error="Died", message=f"exit code {self._processes[rank].exitcode}")
        return [outcomes[rank] for rank in range(self.size)]

    @property
    def is_alive(self) -> bool:
        """Whether every rank can still be called."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the ranks."""
        atexit.unregister(self.close)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `fn(rank, size, *args)` on `size` new ranks; the results by rank.

    Raises:
        RanksError: the call failed on a rank, or took more than `timeout` seconds.
    """
    with RankPool(size) as pool:
        return pool.run(fn, *args, timeout=timeout)


def _serve(parent: int, rank: int, size: int, port: int, threads: int, timeout: float, backend: str, pipe: Connection) -> None:
    """The life of one rank of a pool: join, then run what comes through the pipe until it closes."""
    end_with_parent(parent)
    torch.set_num_threads(threads)
    multiprocessing.set_start_method(None, force=True)  # loader workers start as in any program, not as this rank was
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", port, is_master=False)
    importlib.import_module("allstep.comm.shm")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    modules: dict[str, ModuleType] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            file, name, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_call(rank, size, file, name, args, modules)))
    dist.destroy_process_group()


def _call(rank: int, size: int, file: str, name: str, args: tuple[Any, ...], modules: dict[str, ModuleType]) -> Outcome:
    variables = dict(os.environ)
    torch.manual_seed(0)
    random.seed(0)
    try:
        target: Any = _module(file, modules)
        for part in name.split("."):
            target = getattr(target, part)
        return Outcome(rank=rank, value=target(rank, size, *args))
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended its call
        return Outcome(rank=rank, error=type(error).__name__, message=str(error), traceback=traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(variables)


def _module(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    if file not in modules:
        name = f"allstep_ranks_{Path(file).stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = importlib.util.module_from_spec(spec)
        sys.modules[name] = modules[file]  # so that what it defines can be pickled back
        spec.loader.exec_module(modules[file])
    return modules[file]
