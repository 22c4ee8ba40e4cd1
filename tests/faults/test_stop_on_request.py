"""A run that is asked to stop saves once, at a step that all ranks agree on, leaves with 143, and goes on to equal weights."""

import json
import os
import signal
import subprocess
import sys

import pytest

from allstep.checkpoint.store import CheckpointStore

SCRIPT = """
import json
from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Noisy, RegressionNet

class Wait(TrainerCallback):
    decides_alike = True

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5 and "stop" in sys.argv:
            ready()
            import time
            while not request.is_asked() and rank == int(sys.argv[2]):
                time.sleep(0.01)

from allstep.trainer import stopping, trainer as module

class Request(stopping.StopRequest):
    def __init__(self):
        global request
        super().__init__()
        request = self

module.StopRequest = Request
args = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=12,
    learning_rate=1e-2,
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=6,
    dataloader_num_workers=1,
    logging_steps=1,
    disable_tqdm=True,
)
trainer = Trainer(RegressionNet(0.2), args, train_dataset=Noisy(70), eval_dataset=Noisy(6), callbacks=[Wait()])
trainer.train(resume_from_checkpoint="auto")
if rank == 0:
    print("DIGEST", digest(trainer.model.named_parameters()))
"""


def digest_of(job):
    return next(line for line in job.output.splitlines() if line.startswith("DIGEST"))


def whole(job):
    job.start(script_args=("whole",))
    assert job.end()[0] == 0, job.errors
    return digest_of(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_a_signal_to_the_launcher_stops_all_and_the_run_goes_on_to_the_same_weights(launch, number):
    expected = whole(launch(SCRIPT, "w"))  # short names: loader workers talk through sockets below TMPDIR
    job = launch(SCRIPT, "p")
    job.start(script_args=("stop", "0"))
    job.ready(2)
    job.process.send_signal(number)
    status, errors = job.end()
    assert status == 143, errors
    (checkpoint,) = CheckpointStore(job.folder / "out").checkpoints()
    assert CheckpointStore(job.folder / "out").problems(checkpoint) == []
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    name = signal.Signals(number).name
    assert f"allstep: stopped by {name} at step {step}; checkpoint: out/{checkpoint.name}" in errors
    assert job.gone()
    again = launch(SCRIPT, "a")
    os.rename(job.folder / "out", again.folder / "out")
    assert whole(again) == expected
    steps = [json.loads(line)["step"] for line in (again.folder / "out/metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 13))


@pytest.mark.long
def test_under_torchrun_a_signal_to_it_leaves_a_checkpoint_too(launch):
    job = launch(SCRIPT, "t")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "stop", "0"]
    name, value = job.mark.split("=")
    job.process = subprocess.Popen(
        program, cwd=job.folder, env={**os.environ, name: value}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    job.end()
    (checkpoint,) = CheckpointStore(job.folder / "out").checkpoints()
    assert CheckpointStore(job.folder / "out").problems(checkpoint) == []
    assert job.gone()
