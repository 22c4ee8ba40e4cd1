"""One run in a folder: the second is told who is there, and the lock ends with its holder, however that ends."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from allstep.checkpoint.folder_lock import FolderLock
from allstep.errors import CheckpointError

HOLD = """
import sys
from allstep.checkpoint.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock on `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_run_is_told_who_the_first_is_and_what_to_do(tmp_path, holder):
    with pytest.raises(CheckpointError) as caught:
        FolderLock(tmp_path)
    for said in (f"trains into {tmp_path}", f"process {holder.pid} on {os.uname().nodename}", "-c", str(os.getpid())):
        assert said in str(caught.value)
    assert "allstep launch --num_processes N" in str(caught.value)
    assert "output_dir of its own" in str(caught.value)


def test_the_lock_ends_with_its_holder(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with FolderLock(tmp_path) as lock:
        assert lock.is_held
    assert not lock.is_held


def test_it_leaves_no_file_and_can_be_taken_again(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        lock = FolderLock(tmp_path)
        assert lock.is_held
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
            FolderLock(tmp_path)
        lock.release()
        lock.release()
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_folder_is_another_matter(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with FolderLock(tmp_path / "a"), FolderLock(tmp_path / "b"), FolderLock(tmp_path) as lock:
        assert lock.is_held


KILLED_WITH_A_WORKER = """
import os, signal, sys
from allstep.checkpoint.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(reader, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_worker_that_outlives_its_rank_keeps_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED_WITH_A_WORKER, str(tmp_path)], stdin=subprocess.PIPE)
    try:
        assert process.wait(60) == -signal.SIGKILL
        FolderLock(tmp_path).release()
    finally:
        process.stdin.close()  # by which the worker ends


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert not first.is_held
    assert not second.is_held
    first.release()


def test_a_holder_that_cannot_be_seen_is_said_to_be_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("allstep.checkpoint.folder_lock._holder", lambda folder: None)
    with FolderLock(tmp_path), pytest.raises(CheckpointError, match="in another container, or on another host"):
        FolderLock(tmp_path)
