"""One device a rank, nccl, asynchronous copies, averaging in the collective. On a machine with two GPUs:

python -m pytest tests/gpu
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allstep.testing.models import Regression, RegressionNet

GPUS = torch.cuda.device_count()
SCRIPT = Path(__file__).parent / "train_on_gpus.py"


def launch(ranks: int, folder: Path) -> list[dict]:
    command = [sys.executable, "-m", "allstep", "launch", "--num_processes", str(ranks), str(SCRIPT), str(folder)]
    subprocess.run(command, check=True, timeout=300)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs; this machine shows {GPUS}")
def test_two_ranks_on_two_gpus(tmp_path):
    first, second = launch(2, tmp_path)
    assert [first["device"], second["device"]] == ["cuda:0", "cuda:1"]
    assert "nccl" in first["backend"]
    assert first["digest"] == second["digest"]
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert first["predictions"] == second["predictions"]
    assert len(first["predictions"]) == 30
    assert first["gradient"] == second["gradient"] == [1.5, 1.5]


@pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU; this machine shows none")
def test_one_rank_on_a_gpu_learns_what_the_cpu_learns(tmp_path):
    (seen,) = launch(1, tmp_path)
    assert seen["model_device"] == "cuda:0"
    assert seen["gradient"] == [1.0, 1.0]
    model, rows = RegressionNet(), [Regression(30)[index] for index in range(30)]
    with torch.no_grad():
        untrained = model(torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows]))["loss"]
    assert seen["losses"][-1] < float(untrained)
