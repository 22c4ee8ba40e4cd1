"""Joining: `ddp_timeout` is the group's on every path, and a group that the user made is kept."""

import json
import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import torch
import torch.distributed as dist

from allstep import Trainer, TrainingArguments
from allstep.testing.models import Regression, RegressionNet

SCRIPT = textwrap.dedent(
    """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from allstep import Trainer, TrainingArguments
    from allstep.errors import CollectiveError
    from allstep.testing.models import RegressionNet

    args = TrainingArguments("out", ddp_timeout=2, use_cpu=True)
    trainer = Trainer(RegressionNet(), args)
    group = dist.distributed_c10d._get_default_group()
    said = {
        "seconds": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "world": json.loads(trainer.world.to_json()),
        "arguments": [args.world_size, args.process_index, args.local_rank],
        "error": None,
    }
    trainer.communicator.barrier()
    if trainer.world.rank == 0:
        try:
            trainer.communicator.barrier()  # rank 1 does not come
        except CollectiveError as error:
            said["error"] = str(error)
        open("gone", "w").close()
    else:
        open("gone").close()  # a pipe: returns when rank 0 has opened it
    print(json.dumps(said), flush=True)
    os._exit(0)  # the group is broken by now
    """
)


def test_the_timeout_of_the_arguments_is_the_one_that_collectives_have(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "gone")
    command = [sys.executable, "-m", "allstep", "launch", "--num_processes", "2", "--log_dir", str(tmp_path), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outputs = [done.stdout, (tmp_path / "rank-1.log").read_text()]
    said = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    for rank, each in enumerate(said):
        assert each["seconds"] == 2
        world = each["world"]
        assert (world["rank"], world["size"], world["local_rank"], world["local_size"]) == (rank, 2, rank, 2)
        assert (world["device"], world["backend"], world["launcher"]) == ("cpu", "shm", "allstep")
        assert each["arguments"] == [2, rank, rank]
    assert said[1]["error"] is None
    assert said[0]["error"].startswith("Rank 0 of 2: all_gather with 1 x int64 broke off: rank 1 did not come to it within")
    assert "the timeout of 2 s" in said[0]["error"]


def seconds():
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def joined_before(rank, size, folder):
    group, before = dist.distributed_c10d._get_default_group(), seconds()
    try:
        args = TrainingArguments(str(folder), ddp_timeout=123, max_steps=1, save_strategy="no", disable_tqdm=True)
        trainer = Trainer(RegressionNet(), args, train_dataset=Regression(16))
        trainer.train()
        return dist.distributed_c10d._get_default_group() is group, seconds(), trainer.world.rank, trainer.world.size
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=before))


def test_a_group_that_the_user_made_is_kept_and_gets_the_timeout(ranks, tmp_path):
    for rank, (kept, timeout, own_rank, size) in enumerate(ranks.run(joined_before, tmp_path)):
        assert kept
        assert timeout == 123
        assert (own_rank, size) == (rank, 2)


def two_trainers(rank, size, folder):
    args = TrainingArguments(str(folder), max_steps=2, save_strategy="no", disable_tqdm=True)
    losses = []
    for _ in range(2):
        trainer = Trainer(RegressionNet(), args, train_dataset=Regression(16))
        losses.append(trainer.train().training_loss)
    return losses


def test_a_second_trainer_joins_the_same_group(ranks, tmp_path):
    first, second = ranks.run(two_trainers, tmp_path)
    assert first == second
    assert first[0] == first[1]
