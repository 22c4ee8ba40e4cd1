"""`TrainingArguments.main_process_first`: one process does the work, and the others find it done."""

import os
import time
from pathlib import Path

import pytest

from allstep import TrainingArguments

BACKENDS = ("gloo", "shm")


def arguments(rank, size, hosts=1):
    """Those of a rank of a job, as its launcher would tell; the pool puts variables back after each call."""
    local_size = size // hosts
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ |= {"LOCAL_RANK": str(rank % local_size), "LOCAL_WORLD_SIZE": str(local_size)}
    return TrainingArguments(use_cpu=True)


def finds_it_done(rank, size, folder, local):
    """Whether the work was done when this rank came to it. Who does it waits until the others could have come."""
    args, path = arguments(rank, size), Path(folder)
    (path / f"arrived {rank}").touch()
    with args.main_process_first(local=local, desc="a test"):
        if (path / "done").exists():
            return True
        deadline = time.monotonic() + 30
        while len(list(path.glob("arrived *"))) < size and time.monotonic() < deadline:
            os.sched_yield()
        (path / "done").touch()
        return False


def failing_first(rank, size):
    with arguments(rank, size).main_process_first():
        if rank == 0:
            raise OSError("no space")
        return "went on"


@pytest.mark.parametrize("local", [True, False])
def test_rank_zero_goes_first(ranks, tmp_path, local):
    assert ranks.run(finds_it_done, str(tmp_path), local) == [False, True]


def test_a_process_that_fails_lets_the_others_go(ranks):
    first, second = ranks.outcomes(failing_first)
    assert (first.error, second.value) == ("OSError", "went on")


def test_alone_there_is_nobody_to_wait_for(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with TrainingArguments().main_process_first():
        pass


def hosts_first(rank, size, folder):
    with arguments(rank, size, hosts=2).main_process_first():
        if rank % 2:
            return sorted(path.name for path in Path(folder).iterdir())
        (Path(folder) / str(rank)).touch()
        return None


def test_the_first_rank_of_each_host_goes_first(four_ranks, tmp_path):
    """Ranks 0 and 2 are the first of two hosts, and both write before any of the others looks."""
    assert four_ranks.run(hosts_first, str(tmp_path)) == [None, ["0", "2"], None, ["0", "2"]]
