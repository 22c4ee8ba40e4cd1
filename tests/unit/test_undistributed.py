"""A process that would train alone where several were asked for is refused, with the line to type."""

import os
import shlex
import subprocess
import sys

import pytest
import torch

from allstep.ddp.module import DistributedDataParallel
from allstep.environment import WorkerEnvironment
from allstep.errors import LaunchVariablesError
from allstep.launchers.ancestors import Process
from allstep.launchers.undistributed import check_alone, check_joined, processes_asked_of_accelerate

BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}
SHELL = Process(2, ("sh", "-c", "..."))


def below(command):
    return lambda: [SHELL, Process(1, tuple(shlex.split(command)))]


@pytest.mark.parametrize(
    "command",
    [
        "/bin/python /bin/accelerate launch --num_processes 4 train.py --name 'a b'",
        "accelerate launch --num_processes 4 train.py --name 'a b'",
        "python -m accelerate.commands.launch --num_processes 4 train.py --name 'a b'",
        "python -m accelerate.commands.accelerate_cli launch --num_processes 4 train.py --name 'a b'",
        "/bin/python /bin/accelerate-launch --num_processes 4 train.py --name 'a b'",
    ],
)
def test_one_process_where_accelerate_was_asked_for_four_is_told_the_line_to_type(command):
    with pytest.raises(LaunchVariablesError) as caught:
        check_alone(WorkerEnvironment(), BY_ACCELERATE, below(command))
    assert "was asked for 4 processes and started this one alone" in str(caught.value)
    assert "\n    allstep launch --num_processes 4 train.py --name 'a b'\n" in str(caught.value)
    assert "\n    accelerate launch --multi_gpu --num_processes 4 train.py --name 'a b'\n" in str(caught.value)


def test_accelerates_two_flags_that_exclude_one_another_are_not_both_told():
    with pytest.raises(LaunchVariablesError) as caught:
        check_alone(WorkerEnvironment(), BY_ACCELERATE, below("accelerate launch --cpu --num_processes 4 train.py"))
    assert "\n    allstep launch --cpu --num_processes 4 train.py\n" in str(caught.value)
    assert "\n    accelerate launch --multi_gpu --num_processes 4 train.py\n" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--num_processes=3 train.py", 3),
        ("--num-processes 3 train.py", 3),
        ("--num-processes=3 -m pkg.train", 3),
        ("--cpu --mixed_precision no --num_processes 2 train.py --num_processes 9", 2),
        ("train.py --num_processes 4", 1),
        ("-m train --num_processes 4", 1),
        ("--num_processes two train.py", 1),
        ("--num_processes 1 train.py", 1),
        ("", 1),
    ],
)
def test_only_the_flags_of_the_launcher_are_read(words, count):
    assert processes_asked_of_accelerate(words.split()) == count


def test_who_was_not_started_by_accelerate_or_has_a_world_is_left_alone():
    command = below("accelerate launch --num_processes 4 train.py")
    check_alone(WorkerEnvironment(), {}, command)
    check_alone(WorkerEnvironment(launcher="torchrun"), BY_ACCELERATE, command)
    check_alone(WorkerEnvironment(), BY_ACCELERATE, below("python sweep.py accelerate launch --num_processes 4"))
    check_alone(WorkerEnvironment(), BY_ACCELERATE, below("accelerate config --num_processes 4"))


# A model that is wrapped before anybody joined.

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_one_of_several_processes_must_join_before_it_wraps_a_model(monkeypatch):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchVariablesError, match=r"rank 1 of 2.*joined no process group.*Call allstep\.join\(\)"):
        DistributedDataParallel(torch.nn.Linear(2, 1))


def test_one_process_need_not_join():
    check_joined({}, below(""))
    check_joined({"RANK": "0", "WORLD_SIZE": "1"}, below(""))


# The real one.

SCRIPT = """
import allstep
allstep.join()
print("joined alone")
"""


@pytest.mark.parametrize("flags", [["--num_processes", "4"], ["--cpu", "--num_processes", "4"]], ids=["plain", "cpu"])
def test_accelerate_itself_is_noticed(tmp_path, flags):
    pytest.importorskip("accelerate")
    if torch.accelerator.is_available():
        pytest.skip("accelerate starts several processes where there are GPUs")
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--num_machines", "1"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        [*launcher, "--mixed_precision", "no", "--dynamo_backend", "no", "train.py", "--x"],
        cwd=tmp_path,
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "joined alone" not in done.stdout
    assert (
        f"allstep launch {' '.join(flags)} --num_machines 1 --mixed_precision no --dynamo_backend no train.py --x"
        in done.stderr
    )
