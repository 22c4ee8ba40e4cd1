"""Signals that ask a run to stop, in one process."""

import json
import os
import signal
import threading

import pytest

from allstep.launch.variables import STOP_FILE
from allstep.trainer.stopping import EXIT_CODE, StopRequest, restarts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_does_not_end_the_process(number):
    with StopRequest() as request:
        assert not request.is_asked()
        os.kill(os.getpid(), number)
        assert request.is_asked()
        assert request.signal == number
        request.is_heeded = True
    assert signal.getsignal(number) is signal.SIG_DFL


def test_the_first_of_several_counts():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == signal.SIGUSR1
        request.is_heeded = True


def test_a_handler_of_the_users_own_stays():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("mine"))
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (seen, request.is_asked()) == (["mine"], False)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_that_is_not_the_main_one_changes_no_handler():
    entered = []

    def train():
        with StopRequest() as request:
            entered.append(request.is_asked())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert entered == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_launcher_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "rank-0.stop.json"))
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        request.is_heeded = True
        assert json.loads((tmp_path / "rank-0.stop.json").read_text()) == {"signal": signal.SIGTERM}
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.stop.json"]


@pytest.mark.parametrize(
    ("variables", "count"),
    [({}, 0), ({"ALLSTEP_RESTART_COUNT": "2"}, 2), ({"TORCHELASTIC_RESTART_COUNT": "1"}, 1)],
)
def test_restarts_are_read_from_the_launchers_variables(monkeypatch, variables, count):
    for name in ("ALLSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert restarts() == count


def test_the_exit_code_is_that_of_a_process_that_sigterm_ended():
    assert EXIT_CODE == 143


def test_a_signal_that_the_run_did_not_heed_comes_back_when_it_is_over():
    seen = []
    request = StopRequest()
    with request:
        os.kill(os.getpid(), signal.SIGUSR1)
        request._before[signal.SIGUSR1] = lambda *_: seen.append("again")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert seen == ["again"]
