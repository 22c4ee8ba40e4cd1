"""Checkpoints that are read are not deleted: by locks of the operating system, which end with their process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allstep.checkpoint.holds import Hold, held_for_deletion

READER = """
import sys
from pathlib import Path
from allstep.checkpoint.holds import Hold
hold = Hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
hold.release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def reader(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds `tmp_path`."""
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def free(folder: Path) -> bool:
    with held_for_deletion(folder) as nobody_reads:
        return nobody_reads


def test_what_another_process_reads_is_not_free_until_it_lets_go(reader: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert not free(tmp_path)
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "released\n"
    assert free(tmp_path)


def test_a_reader_that_is_killed_holds_nothing(reader: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert not free(tmp_path)
    os.kill(reader.pid, signal.SIGKILL)
    reader.wait(60)
    assert free(tmp_path)


def test_many_may_read_at_once_and_none_while_it_is_deleted(tmp_path: Path) -> None:
    one, other = Hold(tmp_path), Hold(tmp_path)
    one.release()
    one.release()
    assert not free(tmp_path)
    other.release()
    with held_for_deletion(tmp_path) as nobody_reads:
        assert nobody_reads
        with pytest.raises(FileNotFoundError, match="another process deletes it"):
            Hold(tmp_path)
    Hold(tmp_path).release()


def test_a_hold_that_nobody_keeps_is_let_go(tmp_path: Path) -> None:
    Hold(tmp_path)
    assert free(tmp_path)


def test_a_process_that_was_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    go_on, ended = os.pipe()
    child = os.fork()
    if child == 0:  # has the descriptor too, as loaders of data have
        os.close(ended)
        os.read(go_on, 1)
        os._exit(0)
    try:
        hold.release()
        assert free(tmp_path)
    finally:
        os.close(ended)
        os.close(go_on)
        os.waitpid(child, 0)


def test_a_folder_that_is_deleted_just_before_it_is_held_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()

    def flock(descriptor: int, operation: int) -> None:
        if folder.exists():
            folder.rename(tmp_path / "staging-removed-checkpoint-10")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileNotFoundError):
        Hold(folder)
    with pytest.raises(FileNotFoundError):
        Hold(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
def test_where_a_file_system_has_no_locks_all_goes_on_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    hold = Hold(tmp_path)
    assert free(tmp_path)
    hold.release()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    hold = Hold(tmp_path)
    hold.release()
    assert free(tmp_path)
    with pytest.raises(FileNotFoundError):
        Hold(tmp_path / "nowhere")
    assert len(os.listdir("/proc/self/fd")) == before
