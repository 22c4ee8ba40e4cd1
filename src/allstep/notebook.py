"""Ranks that are started by a function call: `notebook_launcher`, for notebooks and for programs that cannot be launched."""

import contextlib
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from allstep.comm.process_group import is_joined, leave
from allstep.devices import KINDS
from allstep.environment import WorkerEnvironment
from allstep.errors import ArgumentsError, RankFailedError
from allstep.launch.linux import end_with_parent
from allstep.launch.ports import HeldPort
from allstep.launch.record import FailureRecord
from allstep.launch.spec import cores_available, default_num_processes, threads_per_rank, visible_gpus

__all__ = ["notebook_launcher"]

PROBE_SECONDS = 5.0
"""After this a forked process that should have computed a sum is taken to hang; it takes some 30 milliseconds otherwise."""

Payload = tuple[Callable[..., object], tuple[Any, ...]] | bytes
"""What a rank calls and with what: the objects themselves, or bytes for a new process."""


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = 0,
    *,
    num_nodes: int = 1,
    start_method: str | None = None,
) -> None:
    """Call `function(*args)` on several ranks of this machine, and return when all have returned.

    The names are those of accelerate's function. Each rank is a process that finds the variables of a launcher, so that
    `Trainer`, `allstep.join()` and everything else work as below `allstep launch`. Standard output goes where that of this
    process goes. One rank is called in this process.

    Ranks are forked, so that functions, lambdas and classes of the notebook need not be sent anywhere, if a forked copy of
    this process can compute; that is tried out first. It cannot after an accelerator was used here, nor with several threads
    after this process had several at work. Then ranks are new processes, to which `function` is sent by cloudpickle, or as a
    name that can be imported.

    Args:
        function: what each rank calls.
        args: its arguments.
        num_processes: ranks; None for one per visible GPU, or one.
        mixed_precision: "no", "fp16" or "bf16", where the arguments of the function's Trainer, or Accelerator, say none.
        use_port: where ranks meet; 0 for a free port.
        num_nodes: accepted for compatibility; must be 1.
        start_method: "fork" or "spawn"; None to choose as above.

    Raises:
        ArgumentsError: an argument is out of its range, this process has joined a group, is a rank itself, or cannot start
            ranks that could call `function`; the message says how it can.
        RankFailedError: a rank failed; with its number and traceback. All ranks have ended.
    """
    ranks = default_num_processes(visible_gpus(os.environ)) if num_processes is None else num_processes
    _check(ranks, mixed_precision, num_nodes, start_method)
    if ranks == 1:
        function(*args)
        return
    threads = threads_per_rank(cores_available(), ranks, os.environ) or torch.get_num_threads()
    method, payload, threads = _choose((function, tuple(args)), start_method, threads)
    folder = tempfile.mkdtemp(prefix="allstep-")
    try:
        with HeldPort(int(use_port)) as held:
            environments = [_variables(rank, ranks, held.port, mixed_precision) for rank in range(ranks)]
            _run(ranks, (payload, environments, threads, folder), method, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fork_problem(threads: int) -> str | None:
    """Why a forked copy of this process could not train; None where one has just computed a gradient with `threads` threads.

    Trying is the only way to know: what breaks lies in libraries of threads and devices, which do not tell.
    """
    reader, writer = os.pipe()
    with _fork_allowed():
        child = os.fork()
    if child == 0:
        _probe(writer, threads)
    os.close(writer)
    try:
        poll = select.poll()  # unlike select(), it takes any descriptor
        poll.register(reader, select.POLLIN)
        answered = poll.poll(PROBE_SECONDS * 1000)
        text = os.read(reader, 4096).decode(errors="replace") if answered else "it hangs in its first computation"
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if text == "well" else text or "it crashes in its first computation"


def _probe(writer: int, threads: int) -> None:
    """What the forked copy does: it says "well", or what is wrong, and never returns."""
    try:
        said = "well"
        bad = [kind.name for kind in KINDS if _is_in_bad_fork(kind.name)]
        if bad:
            said = f"{bad[0]} was used in this process before, and devices cannot be used in a copy"
        else:
            torch.set_num_threads(threads)
            torch.ones(1 << 18, requires_grad=True).mul(2).sum().backward()
        os.write(writer, said.encode())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the answer is that a copy cannot train
        os.write(writer, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(0)


def _is_in_bad_fork(device_type: str) -> bool:
    ask = getattr(getattr(torch, device_type, None), "_is_in_bad_fork", None)
    return bool(ask()) if ask is not None else False


@contextlib.contextmanager
def _fork_allowed() -> Iterator[None]:
    """Python warns of forks beside threads, which any notebook has; whether they do harm has been tried out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield


def _check(ranks: int, mixed_precision: str, num_nodes: int, start_method: str | None) -> None:
    problems = []
    if ranks < 1:
        problems.append(f"num_processes={ranks}: expected 1 or more")
    if mixed_precision not in ("no", "fp16", "bf16"):
        problems.append(f"mixed_precision={mixed_precision!r}: expected 'no', 'fp16' or 'bf16'")
    if num_nodes != 1:
        problems.append(f"num_nodes={num_nodes}: expected 1; start several machines with `allstep launch --num_machines`")
    if start_method not in (None, "fork", "spawn"):
        problems.append(f"start_method={start_method!r}: expected 'fork', 'spawn' or None")
    environment = WorkerEnvironment.from_variables(os.environ)
    if environment.world_size > 1:
        problems.append(f"this is rank {environment.rank} of {environment.world_size} already: call the function itself")
    if is_joined():
        problems.append("this process has joined a process group: call allstep.leave() first, or restart the notebook")
    if problems:
        raise ArgumentsError("notebook_launcher cannot start ranks: " + "; ".join(problems) + ".")


def _choose(call: tuple[Callable[..., object], tuple[Any, ...]], asked: str | None, threads: int) -> tuple[str, Payload, int]:
    """How to start ranks, what to give them, and the threads of each.

    Raises:
        ArgumentsError: a copy of this process could not train, and a new one could not be sent `call`.
    """
    problem = "start_method='spawn' asks for new processes" if asked == "spawn" else fork_problem(threads)
    if asked == "fork" or problem is None:
        return "fork", call, threads
    sent, reason = _pickled(*call)
    if sent is not None:
        return "spawn", sent, threads
    name = getattr(call[0], "__qualname__", repr(call[0]))
    remedy = f"install cloudpickle (pip install cloudpickle), or put {name} into a file and import it"
    if asked is None and threads > 1 and fork_problem(1) is None:
        warnings.warn(
            f"Ranks are copies of this process with one thread each instead of {threads}, with which {problem}; new processes "
            f"could have them, but {reason}. To use all cores, {remedy}, or restart the notebook.",
            RuntimeWarning,
            stacklevel=3,
        )
        return "fork", call, 1
    raise ArgumentsError(
        f"notebook_launcher needs new processes for its ranks, because {problem}; but {reason}. Either {remedy}. Or restart "
        "the notebook and call notebook_launcher before anything else trains or uses a device there: move such lines into "
        f"{name}."
    )


def _pickled(function: Callable[..., object], args: tuple[Any, ...]) -> tuple[bytes | None, str]:
    """`function` and `args` for a new process; or None and why they cannot be sent."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        with contextlib.suppress(ModuleNotFoundError):
            import cloudpickle  # type: ignore[import-not-found, unused-ignore]

            return cloudpickle.dumps((function, args)), ""
        if function.__module__ == "__main__" and not os.path.isfile(getattr(sys.modules["__main__"], "__file__", "")):
            return None, f"{name} is defined in the notebook, from which a new process cannot import"
        return pickle.dumps((function, args)), ""
    except Exception as error:  # noqa: BLE001 - objects raise what they like when they are pickled
        return None, f"{name} or its arguments cannot be sent there: {error}"


def _variables(rank: int, ranks: int, port: int, mixed_precision: str) -> dict[str, str]:
    """The launcher's variables for one rank."""
    worker = WorkerEnvironment(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_addr="127.0.0.1",
        master_port=port,
    )
    own = {**worker.variables(), "ALLSTEP_RUN_ID": f"notebook-{os.getpid()}-{port}"}
    if not visible_gpus(os.environ):
        own["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU") or "true"
    if mixed_precision != "no":
        own["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    return own


def _run(ranks: int, args: tuple[Any, ...], method: str, folder: str) -> None:
    """Start the ranks and wait for all of them. None is left, however this ends."""
    with _fork_allowed():
        context = start_processes(_rank, (*args, os.getpid()), ranks, join=False, daemon=False, start_method=method)
    assert context is not None
    try:
        while not context.join():
            pass
    except ProcessException as error:
        raise RankFailedError(_story(folder, context.processes, str(error))) from None
    finally:
        for process in context.processes:
            if process.is_alive():  # Ctrl-C, or another end of this call
                process.kill()
            process.join()


def _rank(rank: int, payload: Any, environments: Sequence[Mapping[str, str]], threads: int, folder: str, launcher: int) -> None:
    """One rank, in a process of its own."""
    end_with_parent(launcher)
    os.environ.update(environments[rank])
    torch.set_num_threads(threads)
    try:
        function, args = pickle.loads(payload) if isinstance(payload, bytes) else payload
        function(*args)
        leave()
    except Exception as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        with contextlib.suppress(OSError):
            FailureRecord.of(error, trace, rank=rank).write(os.path.join(folder, f"{rank}.json"))
        raise


def _story(folder: str, processes: Sequence[multiprocessing.process.BaseProcess], text: str) -> str:
    """Which rank failed first and why, after all have ended.

    Args:
        folder: where ranks left their records.
        text: what torch says, for ends that left no record.
    """
    count = len(processes)
    records = [FailureRecord.from_json(path.read_text()) for path in Path(folder).glob("*.json")]
    records.sort(key=lambda record: (record.collateral, record.time))
    killed = [
        (rank, -(process.exitcode or 0))
        for rank, process in enumerate(processes)
        if (process.exitcode or 0) < 0 and -(process.exitcode or 0) != signal.SIGTERM
    ]
    if records and not (killed and records[0].collateral):
        first = records[0]
        others = [f"rank {record.rank}: {record.error}" for record in records[1:]]
        more = f"\nFailed too: {', '.join(others)}." if others else ""
        return f"Rank {first.rank} of {count} failed first: {first.error}: {first.message}\n\n{first.traceback}{more}"
    if killed:
        rank, number = killed[0]
        hint = ": perhaps the system ran out of memory" if number == signal.SIGKILL else ""
        return f"Rank {rank} of {count} was killed by signal {number} ({signal.Signals(number).name}){hint}."
    return f"A rank of {count} failed: {text}"
