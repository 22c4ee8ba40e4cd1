"""Runs one rank: `python -m allstep.launch.worker SCRIPT ARGS` does what `python SCRIPT ARGS` does, and tells why it failed.

The script becomes `__main__` as under plain Python, so that pickling, `multiprocessing` and tracebacks are the same. What is
added: the rank ends with its launcher, a crash prints its stack, and an uncaught exception leaves a `FailureRecord`.

Everything needed after a failure is imported at the start: the script may put modules named `json` or `types` in the way.
"""

import contextlib
import faulthandler
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from allstep.launch.linux import end_with_parent
from allstep.launch.record import FailureRecord
from allstep.launch.variables import FAILURE_FILE, LAUNCHER_PID, STOP_FILE

__all__ = ["main"]

TORCHS_FAILURE_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: where torch's elastic agent looks for the failure of a rank."""

_HIDDEN = (__file__, importlib.util.__file__)


def main() -> None:
    """Run the program named by `sys.argv` to its end. Leaves by SystemExit where the program ended other than well."""
    faulthandler.enable()
    if os.environ.get(LAUNCHER_PID):
        end_with_parent(int(os.environ[LAUNCHER_PID]))
    if sys.argv[1] == "--no_python":
        _become(sys.argv[2:])
    process = os.getpid()
    try:
        code, program = _load_module(sys.argv[2:]) if sys.argv[1] == "-m" else _load_script(sys.argv[1:])
        sys.modules["__main__"] = program
        exec(code, program.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0) and not _stopped_in_order(error.code):
            _record(error, error.__traceback__, process)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is what the user has to read
        trace = _below_here(error.__traceback__)
        _record(error, trace, process)
        _show(error, trace)
        sys.exit(1)


def _become(command: list[str]) -> None:
    """Turn this process into another program. It still ends with its launcher: the kernel keeps that over an exec."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"allstep: {command[0]} could not be run: {error.strerror}")


def _load_script(argv: list[str]) -> tuple[CodeType, ModuleType]:
    """The code of a script and the `__main__` in which to run it; sys.argv and sys.path as `python SCRIPT` sets them."""
    sys.argv = argv
    path = os.path.abspath(argv[0])
    with io.open_code(path) as file:
        source = file.read()
    if not getattr(sys.flags, "safe_path", False):  # under -P, `python -m` has put no folder there
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    program = ModuleType("__main__")
    program.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    return compile(source, path, "exec", dont_inherit=True), program


def _load_module(argv: list[str]) -> tuple[CodeType, ModuleType]:
    """The same for `python -m MODULE`; sys.path already starts with the working folder."""
    name = argv[0]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    code = getattr(spec.loader, "get_code", lambda _: None)(name) if spec is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that could be run with -m", name=name)
    sys.argv = [spec.origin or name, *argv[1:]]
    program = ModuleType("__main__")
    program.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    return code, program


def _below_here(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames in which this module found and started the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*_HIDDEN, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _stopped_in_order(code: object) -> bool:
    """Whether this rank was asked to stop, said that it would, and now does."""
    return code == 128 + signal.SIGTERM and os.path.exists(os.environ.get(STOP_FILE, ""))


def _record(error: BaseException, trace: TracebackType | None, process: int) -> None:
    """Write the failure record, if a launcher asked for one. A process that the script forked is not the rank."""
    path, torchs_path = os.environ.get(FAILURE_FILE), os.environ.get(TORCHS_FAILURE_FILE)
    if not (path or torchs_path) or os.getpid() != process:
        return
    # Not even a full disk may keep the traceback itself from being shown.
    with contextlib.suppress(Exception), _undisturbed():
        record = FailureRecord.of(error, _below_here(trace), rank=int(os.environ["RANK"]))
        if path:
            record.write(path)
        elif torchs_path:
            record.write_for_torch(torchs_path)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold SIGTERM back: the launcher may already be stopping ranks because of what this failure did to another."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _show(error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as Python would, by the hook that the program may have put in place."""
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:  # noqa: BLE001 - a broken hook must not hide the failure
        sys.__excepthook__(type(error), error, trace)


if __name__ == "__main__":
    main()
