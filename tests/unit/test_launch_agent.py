import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from allstep.errors import ArgumentsError
from allstep.launch.agent import launch
from allstep.launch.spec import LaunchSpec
from allstep.launch.verdict import Outcome

HANDLED = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Temporary files go here."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def traces():
    """What a launch changes in this process while it runs: signal handlers, open files, children."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    descriptors = {entry: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    return [signal.getsignal(number) for number in HANDLED], len(descriptors), children


def test_a_launch_from_python_returns_how_it_ended_and_leaves_no_trace(tmp_path, temporary):
    (tmp_path / "train.py").write_text("import os, sys; sys.exit(4 if os.environ['RANK'] == '1' else 0)")
    before, said = traces(), []
    result = launch(LaunchSpec(script=str(tmp_path / "train.py"), num_processes=2), say=said.append)
    assert traces() == before
    assert result.exit_code == 4
    assert result.first_failure is not None
    assert result.first_failure.rank == 1
    assert [end.outcome for end in result.ranks][1] is Outcome.FAILED_FIRST
    assert result.started_at <= result.ended_at
    assert said[0].startswith("allstep: 2 ranks on 127.0.0.1:")
    assert list(temporary.iterdir()) == []


def test_the_environment_of_the_ranks_can_be_given(tmp_path):
    code = "import os, sys; sys.exit(0 if os.environ['GIVEN'] == 'x' and 'NOT_GIVEN' not in os.environ else 1)"
    (tmp_path / "train.py").write_text(code)
    variables = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    spec = LaunchSpec(script=str(tmp_path / "train.py"))
    assert launch(spec, variables={**variables, "GIVEN": "x"}, say=lambda _: None).exit_code == 0
    spec = LaunchSpec(script=str(tmp_path / "train.py"), env=(("GIVEN", "x"),))
    assert launch(spec, variables={**variables, "GIVEN": "y"}, say=lambda _: None).exit_code == 0


def test_a_rank_that_cannot_be_started_is_an_error_and_nothing_is_left(tmp_path, temporary, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    before = traces()
    with pytest.raises(ArgumentsError, match="Rank 0 of 2 could not be started: No such file or directory"):
        launch(LaunchSpec(script="train.py", num_processes=2), say=lambda _: None)
    assert traces() == before
    assert list(temporary.iterdir()) == []


def test_an_error_of_the_launcher_itself_leaves_no_process(tmp_path, temporary, monkeypatch):
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("allstep.launch.watch.decide", fail)
    before = traces()
    with pytest.raises(ZeroDivisionError):
        launch(LaunchSpec(script=str(tmp_path / "train.py"), num_processes=2), say=lambda _: None)
    assert traces() == before
    assert list(temporary.iterdir()) == []


def test_ranks_start_before_what_watches_over_them_is_imported(tmp_path):
    """`subprocess` is asked what is loaded by then; of the launcher's own modules only those that start ranks."""
    code = """
        import os, subprocess, sys
        from allstep.cli.main import main

        class Tell(subprocess.Popen):
            def __init__(self, *_, **__):
                print(*sys.modules, flush=True)
                os._exit(0)

        subprocess.Popen = Tell
        main(["launch", "--num_processes", "2", "train.py"], prog_name="allstep")
    """
    (tmp_path / "train.py").write_text("")
    end = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    loaded = set(end.stdout.split())
    assert "allstep.launch.agent" in loaded
    unneeded = ("watch", "decide", "job", "verdict", "result", "failures", "record", "worker", "first", "other", "channel")
    heavy = {f"allstep.launch.{name}" for name in unneeded}
    assert not loaded & (heavy | {"tempfile", "random", "shutil", "traceback", "pathlib"})


def test_another_thread_than_the_main_one_is_refused():
    errors = []

    def target():
        try:
            launch(LaunchSpec(script="train.py"))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]
