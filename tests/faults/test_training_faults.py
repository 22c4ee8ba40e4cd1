"""A training run that goes wrong: the job ends soon, names the right rank, leaves no process and no half checkpoint."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from allstep.checkpoint.store import CheckpointStore
from allstep.testing.processes import processes_with

SCRIPT = """
import os, sys
from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.testing.models import Regression, RegressionNet

fault, rank = sys.argv[1], int(os.environ["RANK"])

class Ready(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            with open("ready", "w") as pipe:
                pipe.write(f"{rank} {os.getpid()}\\n")

class Rows(Regression):
    def __getitem__(self, index):
        if fault == "dataset" and index == 119:  # in step 12, on rank 1
            raise LookupError("row 119 is torn")
        return super().__getitem__(index)

class Net(RegressionNet):
    calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        if fault == "model" and rank == 1 and self.calls == 12:
            raise LookupError("the model refuses this batch")
        return super().forward(x, labels)

args = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=1_000_000,
    save_steps=5,
    save_total_limit=2,
    logging_steps=1,
    dataloader_num_workers=1,
)
Trainer(Net(), args, train_dataset=Rows(400), callbacks=[Ready()]).train()
"""

DEADLINE = 90.0
"""Seconds after which a test gives up on a run that should be training."""
BOUND = 30.0
"""Seconds within which a job has to end once something happened; it takes one or two."""


class Job:
    """One `allstep launch` of two ranks that train; its processes carry a mark by which they are found."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self.mark = folder, f"ALLSTEP_TEST_MARK={uuid.uuid4().hex}"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "temporary").mkdir()
        os.mkfifo(folder / "ready")
        self._ready = os.open(folder / "ready", os.O_RDWR | os.O_NONBLOCK)
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "allstep", "launch", "--num_processes", "2", "train.py", fault],
            cwd=folder,
            env={**os.environ, name: value, "TMPDIR": str(folder / "temporary"), "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def training(self) -> list[int]:
        """Wait until both ranks have taken some steps; the process of each, by rank."""
        deadline, text = time.monotonic() + DEADLINE, ""
        while text.count("\n") < 2:
            if not select.select([self._ready], [], [], max(0, deadline - time.monotonic()))[0]:
                pytest.fail(f"only {text.splitlines()} became ready; {self.marked()} are there")
            text += os.read(self._ready, 65536).decode()
        return [pid for _, pid in sorted(tuple(map(int, line.split())) for line in text.splitlines())]

    def end(self, within: float) -> tuple[int, list[str]]:
        """Wait for the end; the exit status, and the lines of stderr."""
        began = time.monotonic()
        _, errors = self.process.communicate(timeout=within)
        print(f"\nended after {time.monotonic() - began:.1f} s")
        return self.process.returncode, errors.rstrip().splitlines()

    def marked(self) -> list[int]:
        """The processes of this job that are there now."""
        return processes_with(self.mark)

    def close(self) -> None:
        os.close(self._ready)
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()
        self.process.wait(timeout=DEADLINE)


@pytest.fixture
def start(tmp_path):
    """Starts a job; ends what a failed test leaves of it."""
    jobs = []

    def make(fault: str = "none") -> Job:
        jobs.append(Job(tmp_path, fault))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def check_what_is_left(job: Job) -> None:
    """No process; whole checkpoints; whole lines of metrics."""
    assert job.marked() == []
    out = job.folder / "out"
    store = CheckpointStore(out, lambda action, path: None)
    checkpoints = store.checkpoints()
    assert checkpoints
    for path in checkpoints:
        assert store.problems(path) == []
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def report_of(lines: list[str]) -> list[str]:
    """The launcher's last words: from the line that names the rank on."""
    starts = [number for number, line in enumerate(lines) if line.startswith("allstep: rank")]
    assert starts, "\n".join(lines)
    return [line.strip() for line in lines[starts[-1] :]]


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_in_mid_training_is_named_and_the_other_ends_with_it(start, killed):
    job = start()
    os.kill(job.training()[killed], signal.SIGKILL)
    status, lines = job.end(BOUND)
    assert status == 128 + signal.SIGKILL
    first, *rest = report_of(lines)
    assert f"rank {killed} of 2 failed first" in first
    assert "killed by signal 9 (SIGKILL)" in first
    assert any(line.startswith(f"rank {1 - killed} ") for line in rest)
    check_what_is_left(job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"), [("dataset", "row 119 is torn"), ("model", "LookupError: the model refuses this batch")]
)
def test_a_rank_that_raises_is_named_with_its_error_and_its_place(start, fault, words):
    job = start(fault)
    status, lines = job.end(DEADLINE)
    assert status == 1
    report = report_of(lines)
    assert "allstep: rank 1 of 2 failed first" in report[0]
    assert any(words in line for line in report)
    assert any("rank 0 failed as a consequence" in line or "rank 0 was stopped" in line for line in report)
    assert any("train.py" in line for line in report), "the line of the user's script"
    check_what_is_left(job)
    assert all(path.name.startswith(("checkpoint-", "metrics.jsonl")) for path in (job.folder / "out").iterdir())


def test_ctrl_c_in_mid_training_ends_all(start):
    job = start()
    job.training()
    job.process.send_signal(signal.SIGINT)
    status, lines = job.end(BOUND)
    assert status == 130
    assert "allstep: stopped by Ctrl-C" in lines[-2:]  # the last line may tell where the output of rank 1 is kept
    check_what_is_left(job)
