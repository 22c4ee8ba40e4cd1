"""One script, four ways to start it: the same weights for the same global batch."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from allstep import ArgumentParser, Trainer, TrainingArguments
    from allstep.comm.agreement import digest
    from allstep.testing.models import Noisy, RegressionNet

    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(RegressionNet(0.1), args, train_dataset=Noisy(37))
    trainer.train()
    seen = {
        "world_size": trainer.world.size,
        "launcher": trainer.world.launcher,
        "timeout": args.ddp_timeout,
        "digest": digest(trainer.model.named_parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    Path(args.output_dir, f"seen-{trainer.world.rank}.json").write_text(json.dumps(seen))
    """
)
ARGUMENTS = [
    "--per_device_train_batch_size", "4", "--num_train_epochs", "2", "--learning_rate", "1e-2", "--logging_steps", "1",
    "--save_strategy", "no", "--ddp_timeout", "120",
]  # fmt: skip
PYTHON = sys.executable


def free_port() -> str:
    """For accelerate alone, which cannot choose one by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def command(way: str, script: Path) -> list[str]:
    if way == "allstep":
        return [PYTHON, "-m", "allstep", "launch", "--num_processes", "2", str(script)]
    if way == "torchrun":
        return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    if way == "accelerate":
        options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
        options += ["--dynamo_backend", "no", "--main_process_port", free_port()]
        return [PYTHON, "-m", "accelerate.commands.launch", *options, str(script)]
    return [PYTHON, str(script), "--gradient_accumulation_steps", "2"]


def run(way: str, folder: Path) -> list[dict]:
    """What each rank saw."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MASTER_", "TORCHELASTIC"))}
    done = subprocess.run(
        [*command(way, script), "--output_dir", str(folder / "run"), *ARGUMENTS],
        capture_output=True,
        text=True,
        timeout=180,
        env={**variables, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted((folder / "run").glob("seen-*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The same global batch in one process, by accumulation."""
    (seen,) = run("python", tmp_path_factory.mktemp("alone"))
    return seen


@pytest.mark.parametrize("way", ["allstep", "torchrun", "accelerate"])
def test_two_ranks_under_each_launcher_train_to_the_weights_of_one_process(way, alone, tmp_path):
    if way == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    assert (alone["world_size"], alone["launcher"]) == (1, "none")
    seen = run(way, tmp_path)
    assert len(seen) == 2
    for rank in seen:
        assert rank["world_size"] == 2
        assert rank["launcher"] == way
        assert rank["digest"] == alone["digest"]
        assert rank["losses"] == alone["losses"]


def test_half_set_variables_are_an_error_that_lists_what_is_missing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, timeout=120, env=variables, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "LaunchVariablesError" in last
    assert "MASTER_ADDR, MASTER_PORT are missing" in last
    assert "allstep launch" in last
