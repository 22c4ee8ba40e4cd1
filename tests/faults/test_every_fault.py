"""Every fault of `allstep.testing.faults`, on both backends: it fired, the job ended, the right rank is named, nothing is left.

What a person reads in each case, and how long it takes, stands in docs/failure.md.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from allstep.checkpoint.store import CheckpointStore
from allstep.testing import faults

SCRIPT = """
import sys
from allstep import Trainer, TrainingArguments
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet

args = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=12,
    save_steps=5,
    logging_strategy="no",
    ddp_backend=sys.argv[1],
    ddp_timeout=5,
    ddp_wait_warning=1,
    ddp_drift_check_steps=1,
    disable_tqdm=True,
)
fault = {fault}
trainer = Trainer(RegressionNet(), args, train_dataset=Regression(200), callbacks=[fault])
trainer.train()
"""

FAULT = "record='record', rank={rank}, step={step}"


@dataclass(frozen=True)
class Case:
    """A fault, and what has to come of it."""

    fault: str
    """The call, without where it acts."""
    exit_code: int
    said: tuple[str, ...]
    """What a person reads."""
    rank: int = 1
    step: int = 7
    fires: int = 1
    saved: tuple[int, ...] = (5,)
    """Steps whose checkpoints are there and whole afterwards."""


CASES = {
    "fail": Case("fail(", 1, ("allstep: rank 1 of 2 failed first, on ", "InjectedError: rank 1 fails in step 7, as asked to")),
    "kill": Case("kill(", 137, ("allstep: rank 1 of 2 failed first, on ", "killed by signal 9 (SIGKILL)")),
    "kill rank 0": Case("kill(", 137, ("allstep: rank 0 of 2 failed first, on ", "killed by signal 9 (SIGKILL)"), rank=0),
    "hang": Case(
        "hang(",
        1,
        ("allstep: rank 1 of 2 did not come, and rank 0 gave up first", "is in callbacks (step 7) since"),
    ),
    "freeze": Case(
        "kill(signal.SIGSTOP, ",
        1,
        ("allstep: rank 1 of 2 did not come, and rank 0 gave up first", "is stopped by a signal (SIGSTOP"),
    ),
    "leave": Case("leave(", 1, ("allstep: rank 1 of 2 left early, on ", "while others still trained")),
    "crash": Case("kill(signal.SIGSEGV, ", 139, ("allstep: rank 1 of 2 failed first, on ", "killed by signal 11 (SIGSEGV)")),
    "nan": Case(
        "nan(",
        1,
        (
            "allstep: rank 1 of 2 failed first, on ",
            "Gradients of step 7 are not finite; the optimizer has not moved.",
            "rank 1: 'net.0.weight', from micro-batch 1, samples ",
        ),
    ),
    "flip_bit": Case(
        "flip_bit(event='on_step_end', ",
        1,
        ("Weights have come apart after step 7: net.0.weight on rank(s) 1 is not as on rank 0",),
    ),
    "slow": Case("slow(0.1, steps=2, ", 0, (), fires=2, saved=(5, 10, 12)),
    "full_disk": Case(
        "full_disk(steps=4, ",
        0,
        ("Rank 0 could not write checkpoint-10", "No space left on device", "1 of 3 checkpoints could not be written"),
        rank=0,
        saved=(5, 12),
    ),
    "stop": Case(
        "kill(signal.SIGUSR1, ",
        143,
        ("allstep: stopped by SIGUSR1 (sent to rank 1) at step 7; checkpoint: out/checkpoint-7",),
        saved=(5, 7),
    ),
}
SHORT: dict[str, set[str]] = {"shm": {"kill", "hang", "nan"}, "gloo": set()}
"""Those of every run; the others are long."""


def cases():
    for name in CASES:
        for backend in ("shm", "gloo"):
            long = [] if name in SHORT[backend] else [pytest.mark.long]
            yield pytest.param(name, backend, marks=long, id=f"{name}-{backend}")


@pytest.mark.parametrize(("name", "backend"), list(cases()))
def test_the_fault_fires_the_job_ends_and_the_right_rank_is_named(launch, name, backend):
    case = CASES[name]
    where = FAULT.format(rank=case.rank, step=case.step)
    job = launch(SCRIPT.format(fault=f"faults.{case.fault}{where})"))
    job.start("--grace_period", "3", script_args=(backend,))
    status, errors = job.end()
    assert status == case.exit_code, errors
    for words in case.said:
        assert words in errors + job.output
    fired = faults.fired(job.folder / "record")
    assert [(each["rank"], each["step"]) for each in fired] == [(case.rank, case.step + i) for i in range(case.fires)]
    assert job.gone()
    check_checkpoints(job.folder / "out", case.saved)
    check_nothing_is_left(job)


def check_checkpoints(out: Path, saved: tuple[int, ...]) -> None:
    store = CheckpointStore(out, lambda action, path: None)
    assert [path.name for path in store.checkpoints()] == [f"checkpoint-{step}" for step in saved]
    for path in store.checkpoints():
        assert store.problems(path) == []
    assert not [path for path in out.iterdir() if path.name.startswith("staging")]


def check_nothing_is_left(job) -> None:
    kept = [path for path in (job.folder / "temporary").rglob("*") if path.is_file()]
    assert [path.name for path in kept] in ([], ["rank-1.log"])  # what the report names
    port = next(line for line in job.errors.splitlines() if "2 ranks on 127.0.0.1:" in line).split(":")[2].split(",")[0]
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(port)))
        again.listen()


def test_all_faults_are_tried():
    tried = " ".join(case.fault for case in CASES.values())
    kinds = [name for name in faults.__all__ if name[0].islower() and name != "fired"]
    assert all(f"{name}(" in tried for name in kinds)
