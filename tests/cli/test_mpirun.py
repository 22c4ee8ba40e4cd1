"""Ranks that a real mpirun started find one another, without a variable set by hand."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist

import allstep

world = allstep.join()
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
with open(f"said-{world.rank}", "w") as file:
    file.write(f"{world.launcher} {world.rank} {world.size} {world.local_rank} {world.local_size} {total.item()}")
"""

STARTERS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
    "mpich": ["mpirun.mpich", "-n", "2"],
}
"""Launcher -> how its mpirun starts two ranks; the names are those that Debian gives to both of them."""

OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("launcher", STARTERS)
def test_two_ranks_of_one_host_join(tmp_path, launcher):
    starter = STARTERS[launcher]
    if shutil.which(starter[0]) is None:
        pytest.skip(f"{starter[0]} is not installed")
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name not in OTHERS}
    command = [*starter, sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**variables, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said == [f"{launcher} {rank} 2 {rank} 2 3.0" for rank in range(2)]
