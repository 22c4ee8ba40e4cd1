"""Ranks that a signal has stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from allstep.launch.frozen import AFTER, FrozenRanks, is_frozen


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def until(frozen, pid):
    deadline = time.monotonic() + 30
    while is_frozen(pid) != frozen:
        assert time.monotonic() < deadline


def test_a_stopped_process_is_told_once_and_again_when_it_is_stopped_again(process):
    ranks = FrozenRanks()
    assert ranks.look({3: process.pid}, 0.0) == []
    os.kill(process.pid, signal.SIGSTOP)
    until(True, process.pid)
    assert ranks.look({3: process.pid}, 1.0) == []
    (told,) = ranks.look({3: process.pid}, 1.0 + AFTER)
    assert told.startswith(f"rank 3 (process {process.pid}) is stopped by a signal")
    assert ranks.look({3: process.pid}, 9.0) == []
    os.kill(process.pid, signal.SIGCONT)
    until(False, process.pid)
    assert ranks.look({3: process.pid}, 10.0) == []
    os.kill(process.pid, signal.SIGSTOP)
    until(True, process.pid)
    assert ranks.look({3: process.pid}, 11.0) == []
    assert len(ranks.look({3: process.pid}, 11.0 + AFTER)) == 1


def test_a_process_that_is_gone_is_not_frozen(process):
    process.kill()
    process.wait()
    assert not is_frozen(process.pid)
