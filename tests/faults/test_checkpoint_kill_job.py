"""`kill -9` of a whole job at random moments, again and again: it goes on each time, and ends as one that was never stopped."""

import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from allstep.checkpoint.store import CheckpointStore, step_of
from allstep.testing.processes import processes_with

SCRIPT = """
import os, sys
from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.disk import acting_on_disk
from allstep.testing.models import Noisy, RegressionNet

def train(out, steps, in_background, ranks, tell):
    class Events(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            tell(f"begin {state.global_step}")

        def on_step_end(self, args, state, control, **kwargs):
            tell(f"step {state.global_step}")

    args = TrainingArguments(
        out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // ranks,
        max_steps=steps,
        learning_rate=1e-2,
        save_steps=3,
        save_total_limit=2,
        save_in_background=in_background,
        logging_steps=100,
        disable_tqdm=True,
    )
    trainer = Trainer(RegressionNet(0.1), args, train_dataset=Noisy(40), callbacks=[Events()])
    trainer.train(resume_from_checkpoint="auto")
    return digest(trainer.model.named_parameters())

if __name__ == "__main__":
    out, steps, how, pipe = sys.argv[1], int(sys.argv[2]), sys.argv[3], os.open(sys.argv[4], os.O_WRONLY)
    tell = lambda event: os.write(pipe, f"{event}\\n".encode())
    with acting_on_disk(lambda action, path: tell(f"disk {action}")):
        print("DIGEST", train(out, steps, how == "beside", 2, tell))
"""

DEADLINE = 120.0
"""Seconds after which a test gives up on a run."""


class Jobs:
    """Runs of the script below one folder, by `allstep launch` on two ranks; their processes carry a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, f"ALLSTEP_TEST_MARK={uuid.uuid4().hex}"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "temporary").mkdir()
        os.mkfifo(folder / "events")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._text = ""

    def start(self, out: str, steps: int, how: str) -> "subprocess.Popen[str]":
        name, value = self.mark.split("=")
        return subprocess.Popen(
            [sys.executable, "-m", "allstep", "launch", "--num_processes", "2", "train.py", out, str(steps), how, "events"],
            cwd=self.folder,
            env={**os.environ, name: value, "TMPDIR": str(self.folder / "temporary"), "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def to_the_end(self, out: str, steps: int, how: str) -> str:
        """Run until it ends; the digest of its weights."""
        job = self.start(out, steps, how)
        output, errors = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, errors
        self._drain()
        return next(line.split()[1] for line in output.splitlines() if line.startswith("DIGEST"))

    def alone(self, out: str, steps: int) -> str:
        """The same run by one process, this one; the digest of its weights."""
        names: dict[str, Any] = {"__name__": "train"}
        exec(SCRIPT, names)
        return names["train"](str(self.folder / out), steps, False, 1, lambda event: None)

    def killed(self, out: str, steps: int, how: str, events: int) -> tuple[int, str]:
        """Run until so many things have happened once training began, and kill all its processes at once.

        The step at which it began, and the last thing that was heard of.
        """
        job = self.start(out, steps, how)
        try:
            lines = self._heard(job, "begin", 0)
            began = next(int(line.split()[1]) for line in lines if line.startswith("begin"))
            heard = self._heard(job, "", events)
        finally:
            for pid in self.marked():
                os.kill(pid, signal.SIGKILL)
            output, errors = job.communicate(timeout=DEADLINE)
        assert job.returncode == -signal.SIGKILL, f"it came to its end: {output}{errors}"
        self._drain()
        return began, heard[-1]

    def _heard(self, job: "subprocess.Popen[str]", word: str, more: int) -> list[str]:
        """Wait until a line with `word` came, and so many more; all lines so far."""
        deadline, lines = time.monotonic() + DEADLINE, []
        while not any(word in line for line in lines) or len(lines) < more:
            ready = select.select([self._events], [], [], max(0, deadline - time.monotonic()))[0]
            if not ready or job.poll() is not None:
                pytest.fail(f"heard {lines}, waiting for {word} and {more}; exit status {job.poll()}")
            self._text += os.read(self._events, 65536).decode()
            *whole, self._text = self._text.split("\n")
            lines += whole
        return lines

    def _drain(self) -> None:
        while select.select([self._events], [], [], 0)[0]:
            os.read(self._events, 65536)
        self._text = ""

    def marked(self) -> list[int]:
        """The processes of these jobs that are there now."""
        return processes_with(self.mark)

    def close(self) -> None:
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        os.close(self._events)


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


def kill_again_and_again(jobs: Jobs, steps: int, kills: list[tuple[str, int]]) -> list[tuple[int, str]]:
    """Kill a run as often, each time after so many events; what `killed` says of each time."""
    history: list[tuple[int, str]] = []
    for how, events in kills:
        store = CheckpointStore(jobs.folder / "out")
        whole = [step_of(path) for path in store.checkpoints()]
        history.append(jobs.killed("out", steps, how, events))
        print(f"begun at {history[-1][0]} of {whole}, killed after {history[-1][1]}")
        assert history[-1][0] == max(whole, default=0), "it goes on from the newest"
        assert all(store.problems(path) == [] for path in store.checkpoints()), history
        assert jobs.marked() == []
    return history


@pytest.mark.long
def test_a_job_that_is_killed_thrice_ends_as_one_that_was_never_stopped(jobs):
    """One process ends what two have begun: the same bits, and half the time. `make long` has two to the end."""
    events = random.Random(20)
    kills = [("beside", events.randrange(30, 60)), ("waiting", events.randrange(30, 60)), ("beside", events.randrange(5, 30))]
    history = kill_again_and_again(jobs, 24, kills)
    assert history[-1][0] > 0, "it went on"
    assert jobs.alone("out", 24) == jobs.alone("whole", 24)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_job_that_is_killed_thirty_times_in_a_row_ends_as_one_that_was_never_stopped(jobs, seed):
    events = random.Random(seed)
    kills = [(events.choice(["beside", "waiting"]), events.randrange(1, 60)) for _ in range(30)]
    history = kill_again_and_again(jobs, 240, kills)
    assert sum(last.startswith("disk") for _, last in history) > 5, "most of them in the middle of a save"
    assert jobs.to_the_end("out", 240, "beside") == jobs.to_the_end("whole", 240, "waiting")
    assert sorted(path.name for path in (jobs.folder / "out").iterdir() if path.is_dir()) == [
        "checkpoint-237",
        "checkpoint-240",
    ]
