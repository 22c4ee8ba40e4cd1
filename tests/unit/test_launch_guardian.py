import os
import subprocess
import sys

from allstep.launch.guardian import end_marked, marked
from allstep.launch.variables import FAILURE_FILE

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def sleeper(**variables):
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], env={**os.environ, **variables}, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_processes_that_know_the_folder_are_ended_and_no_others(tmp_path):
    folder = str(tmp_path / "allstep-1")
    ours = sleeper(**{FAILURE_FILE: f"{folder}/rank-0.failure.json"})
    others = [sleeper(**{FAILURE_FILE: f"{folder}2/rank-0.failure.json"}), sleeper(NOT_FAILURE_FILE=f"{folder}/x"), sleeper()]
    try:
        assert marked(folder) == [ours.pid]
        assert end_marked(folder) == [ours.pid]
        assert ours.wait(60) == -9
        assert marked(folder) == []
        assert [other.poll() for other in others] == [None] * 3
    finally:
        for process in (ours, *others):
            process.kill()
            process.communicate()


def test_the_guardian_starts_with_little():
    code = "import sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1]); import guardian; print(*sys.modules)"
    folder = os.path.dirname(sys.modules["allstep.launch.guardian"].__file__)
    command = [sys.executable, "-I", "-S", "-c", code, folder]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not {"subprocess", "contextlib", "allstep", "site", "re"} & set(loaded)
