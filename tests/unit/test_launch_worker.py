import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from allstep.launch.record import FailureRecord
from allstep.launch.variables import FAILURE_FILE, LAUNCHER_PID, STOP_FILE

WORKER = [sys.executable, "-m", "allstep.launch.worker"]


def run(command, folder, **variables):
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def write(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return str(path)


def failed(folder, *arguments):
    """Run a worker that is expected to fail; gives how it ended and its record, if it left one."""
    path = folder / "failure.json"
    end = run([*WORKER, *arguments], folder, RANK="1", **{FAILURE_FILE: str(path)})
    return end, FailureRecord.from_json(path.read_text()) if path.exists() else None


SAME_AS_PYTHON = {
    "names": """
        import json, sys, __main__
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__)
        print(__main__.json is json, sys.modules["__main__"] is __main__, sorted({*vars(__main__)} - {"__annotations__"}))
    """,
    "the script's folder comes first": "import neighbour; print(neighbour.__file__)",
    "source of itself": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "pickling": """
        import pickle
        class Thing: pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """,
    "spawned processes": """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "forked processes": """
        import multiprocessing
        def double(x): return 2 * x
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(double, [1, 2]))
    """,
    "a late thread and a late handler": """
        import atexit, pickle, threading
        class Thing: pass
        ended = threading.Event()
        def late():
            ended.wait()
            print("thread", pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
        threading.Thread(target=late).start()
        atexit.register(lambda: print("exit", Thing))
        threading.main_thread()
        ended.set()
    """,
    "an exception": "def f(x):\n    return 1 / x\n\nf(0)",
    "a chain of exceptions": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "a syntax error": "x = 1\nif x\n    pass",
    "an exit code": "import sys; sys.exit(3)",
    "an exit text": "import sys; sys.exit('no data')",
    "an exit with nothing": "import sys; sys.exit()",
    "a hook for exceptions": "import sys; sys.excepthook = lambda *e: print('hook', e[0]); raise ValueError",
    "a forked child that fails": """
        import os
        if os.fork() == 0:
            raise ValueError("child")
        print(os.wait()[1])
    """,
}


@pytest.mark.parametrize("case", SAME_AS_PYTHON)
def test_a_script_runs_as_under_plain_python(tmp_path, case):
    script = write(tmp_path / "scripts" / "train.py", SAME_AS_PYTHON[case])
    write(tmp_path / "scripts" / "neighbour.py", "")
    for name in (script, "scripts/train.py"):
        plain = run([sys.executable, name, "--x", "1 2", "--", "-m"], tmp_path)
        ours = run([*WORKER, name, "--x", "1 2", "--", "-m"], tmp_path)
        assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)


def test_a_linked_script_finds_the_neighbours_of_its_target(tmp_path):
    write(tmp_path / "real" / "neighbour.py", "")
    (tmp_path / "train.py").symlink_to(
        write(tmp_path / "real" / "train.py", "import neighbour, sys; print(sys.argv[0], __file__)")
    )
    plain, ours = (run([*start, "train.py"], tmp_path) for start in ([sys.executable], WORKER))
    assert ours.stdout == plain.stdout != ""


@pytest.mark.parametrize("name", ["pkg.train", "pkg"])
def test_a_module_runs_as_under_python_m(tmp_path, name):
    code = "import sys\nfrom . import other\nprint(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__.name)"
    for file in ("train", "__main__"):
        write(tmp_path / "pkg" / f"{file}.py", code)
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "other.py", "")
    plain = run([sys.executable, "-m", name, "-m", "--x"], tmp_path)
    ours = run([*WORKER, "-m", name, "-m", "--x"], tmp_path)
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_a_module_can_spawn_processes(tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "train.py", SAME_AS_PYTHON["spawned processes"])
    assert run([*WORKER, "-m", "pkg.train"], tmp_path).stdout == "[2, 4]\n"


def test_the_traceback_of_a_module_starts_in_the_module(tmp_path):
    write(tmp_path / "job.py", "raise ValueError('bad')")
    end, record = failed(tmp_path, "-m", "job")
    assert end.stderr.splitlines()[1:] == [
        f'  File "{tmp_path}/job.py", line 1, in <module>',
        "    raise ValueError('bad')",
        "ValueError: bad",
    ]
    assert [frame.line for frame in record.frames] == [1]


def test_a_module_that_is_not_there_is_named(tmp_path):
    for name in ("nothing_here", "nothing_here.train"):
        end, record = failed(tmp_path, "-m", name)
        assert end.returncode == 1
        assert "nothing_here" in end.stderr
        assert "allstep" not in end.stderr  # nobody has to read our frames
        assert record.error == "ModuleNotFoundError"


def test_a_script_that_is_not_there_is_named(tmp_path):
    end, record = failed(tmp_path, "nothing.py")
    assert end.returncode == 1
    assert end.stderr.strip() == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/nothing.py'"
    assert record.error == "FileNotFoundError"


def test_an_exception_leaves_a_record(tmp_path):
    script = write(tmp_path / "train.py", "import os\nos.chdir('/')\ndef f():\n    raise ValueError('bad')\nf()")
    end, record = failed(tmp_path, script)
    assert end.returncode == 1
    assert (record.rank, record.error, record.message) == (1, "ValueError", "bad")
    assert [(frame.file, frame.line) for frame in record.frames] == [(script, 5), (script, 4)]
    assert record.traceback == end.stderr


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("import sys; sys.exit(3)", 3, "3"),
        ("import sys; sys.exit(0)", 0, None),
        ("raise SystemExit", 0, None),
        ("pass", 0, None),
        ("raise KeyboardInterrupt", 130, None),
        ("import os; os._exit(7)", 7, None),
        ("import os\nif os.fork() == 0: raise ValueError\nos.wait()", 0, None),
    ],
)
def test_what_leaves_a_record_and_what_does_not(tmp_path, code, status, message):
    end, record = failed(tmp_path, write(tmp_path / "train.py", code))
    assert end.returncode == status
    assert (record.message if record else None) == message


def test_an_interrupt_is_quiet(tmp_path):
    end, _ = failed(tmp_path, write(tmp_path / "train.py", "raise KeyboardInterrupt"))
    assert end.stderr == ""


def test_modules_of_the_user_do_not_get_in_the_way_of_a_record(tmp_path):
    for name in ("json", "traceback", "dataclasses", "linecache", "types", "socket"):
        write(tmp_path / "scripts" / f"{name}.py", "raise ImportError('not the one you want')")
    end, record = failed(tmp_path, write(tmp_path / "scripts" / "train.py", "raise ValueError('bad')"))
    assert record.message == "bad"
    assert "ValueError: bad" in end.stderr


def test_a_record_that_cannot_be_written_does_not_hide_the_exception(tmp_path):
    script = write(tmp_path / "train.py", "raise ValueError('bad')")
    end = run([*WORKER, script], tmp_path, RANK="1", **{FAILURE_FILE: str(tmp_path / "no" / "such" / "folder")})
    assert end.returncode == 1
    assert end.stderr.endswith("ValueError: bad\n")


def test_a_broken_hook_does_not_hide_the_exception(tmp_path):
    code = "import sys\ndef hook(*_): raise KeyError('hook')\nsys.excepthook = hook\nraise ValueError('bad')"
    end, record = failed(tmp_path, write(tmp_path / "train.py", code))
    assert end.returncode == 1
    assert "ValueError: bad" in end.stderr
    assert record.message == "bad"


def test_a_crash_in_native_code_shows_its_python_stack(tmp_path):
    script = write(tmp_path / "train.py", "import ctypes\nctypes.string_at(0)")
    end, _ = failed(tmp_path, script)
    assert end.returncode == -signal.SIGSEGV
    assert f'"{script}", line 2' in end.stderr


def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path):
    script = write(tmp_path / "train.py", "print('started')")
    end = run([*WORKER, script], tmp_path, **{LAUNCHER_PID: "1"})
    assert (end.returncode, end.stdout) == (-signal.SIGKILL, "")


def test_starting_loads_neither_torch_nor_numpy_nor_the_command_line(tmp_path):
    script = write(tmp_path / "train.py", "import json, sys; print(json.dumps(sorted(sys.modules)))")
    loaded = set(json.loads(run([*WORKER, script], tmp_path).stdout))
    assert not loaded & {"torch", "numpy", "click", "subprocess", "allstep.launch.agent", "allstep.arguments"}


@pytest.mark.parametrize(("code", "noted", "recorded"), [(143, True, False), (143, False, True), (1, True, True)])
def test_a_rank_that_stops_in_order_leaves_no_record_of_a_failure(tmp_path, code, noted, recorded):
    write(tmp_path / "script.py", f"import sys; sys.exit({code})")
    if noted:
        (tmp_path / "stop.json").write_text('{"signal": 15}')
    record, stop = tmp_path / "failure.json", tmp_path / "stop.json"
    end = run([*WORKER, "script.py"], tmp_path, RANK="1", **{FAILURE_FILE: str(record), STOP_FILE: str(stop)})
    assert end.returncode == code
    assert record.exists() is recorded
