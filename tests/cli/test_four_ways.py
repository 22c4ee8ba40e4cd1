"""One script, four ways to start it, the same weights: allstep launch, torchrun, accelerate launch, and plain python."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Noisy, RegressionNet

args = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=int(sys.argv[1]),
    num_train_epochs=2,
    learning_rate=0.01,
    save_strategy="no",
)
trainer = Trainer(RegressionNet(0.2), args, train_dataset=Noisy(27), eval_dataset=Noisy(5))
trainer.train()
said = {
    "digest": digest(trainer.model.named_parameters()),
    "eval_loss": trainer.evaluate()["eval_loss"],
    "train_loss": trainer.state.run.mean,
    "world": json.loads(trainer.world.to_json()),
    "steps": trainer.state.global_step,
}
with open(f"said-{trainer.world.rank}", "w") as file:
    json.dump(said, file)
"""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_ip", "127.0.0.1", "--main_process_port"]
WAYS = {
    "allstep": ["-m", "allstep", "launch", "--num_processes", "2"],
    "torchrun": TORCHRUN,
    "accelerate": ACCELERATE,
    "none": [],
}
"""What the script reads of its launcher -> how Python is told to start it."""

OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """Nothing of a launcher; one thread for every rank, also where there is only one: threads change the order of sums."""
    rest = {name: value for name, value in os.environ.items() if name not in OTHERS}
    return {**rest, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Launcher -> what each rank said; None where it is not installed. A run costs seconds: each is made once."""
    results = {}
    for way, options in WAYS.items():
        if way == "accelerate" and importlib.util.find_spec("accelerate") is None:
            results[way] = None
            continue
        folder = tmp_path_factory.mktemp(way)
        (folder / "train.py").write_text(SCRIPT)
        port = [free_port()] if way == "accelerate" else []
        command = [sys.executable, *options, *port, "train.py", "2" if way == "none" else "1"]
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{way}:\n{done.stdout}\n{done.stderr}"
        results[way] = [json.loads((folder / f"said-{rank}").read_text()) for rank in range(1 if way == "none" else 2)]
    return results


@pytest.mark.parametrize("way", [way for way in WAYS if way != "none"])
def test_two_ranks_join_whoever_started_them(said, way):
    if said[way] is None:
        pytest.skip(f"{way} is not installed")
    for rank, each in enumerate(said[way]):
        world = each["world"]
        assert (world["rank"], world["size"], world["local_rank"], world["local_size"]) == (rank, 2, rank, 2)
        assert (world["launcher"], world["device"], world["backend"]) == (way, "cpu", "shm")


def test_under_plain_python_the_same_script_trains_alone(said):
    (alone,) = said["none"]
    assert (alone["world"]["size"], alone["world"]["launcher"], alone["world"]["backend"]) == (1, "none", "none")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_global_batch_gives_the_same_bits(said, way):
    if said[way] is None:
        pytest.skip(f"{way} is not installed")
    (alone,) = said["none"]
    assert alone["steps"] == 8
    for each in said[way]:
        for key in ("digest", "steps", "train_loss", "eval_loss"):
            assert each[key] == alone[key], key


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are missing"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "RANK is missing"),
    ],
    ids=["no address", "no rank"],
)
def test_half_set_variables_end_the_script_with_what_is_missing(tmp_path: Path, variables, missing):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**environment(), **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("allstep.errors.LaunchVariablesError: The launcher's variables are half set: ")
    assert missing in last
    assert "allstep launch --num_processes N" in last
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
