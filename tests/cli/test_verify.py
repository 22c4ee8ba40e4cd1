"""`allstep verify` says that a script does the same on 1 and 2 ranks, or where it parts, and why."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import torch
from torch import nn
from allstep import Trainer, TrainingArguments

planted, output = sys.argv[1], sys.argv[2]
rank = int(os.environ.get("RANK", 0))
unseeded = torch.Generator()
unseeded.seed()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, index):
        if planted == "swapped" and rank == 1 and index in (3, 8):
            index = 11 - index
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if planted == "noise":
            x = x + torch.rand(4, generator=unseeded)
        return {"x": x if planted == "swapped" else x + 0.1 * torch.rand(4), "labels": x.sum()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if planted == "statistics" else nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, labels):
        x = self.dropout(self.norm(self.first(x).tanh()))
        if planted == "random":
            x = x * torch.rand(8, generator=unseeded)
        if planted == "branch" and rank == 1:
            x = x * 1.001
        return {"loss": (self.last(x).squeeze(-1) - labels).square().mean()}


args = TrainingArguments(
    output, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2,
    save_steps=2, ledger=True, ledger_digest_steps=2, disable_tqdm=True,
)
Trainer(Net(), args, train_dataset=Rows()).train()
print("the script went on")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def allstep(*words):
    done = subprocess.run(
        [sys.executable, "-m", "allstep", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def verify(script, planted, tmp_path):
    return allstep("verify", "--world_sizes", "1,2", "--steps", 5, script, planted, tmp_path / "own")


def test_a_script_that_does_the_same_is_said_to(script, tmp_path):
    status, said = verify(script, "nothing", tmp_path)
    assert status == 0, said
    assert "identical for 5 steps on 1, 2 rank(s), to the bit: 37 samples, every loss, gradient and weight" in said
    assert not (tmp_path / "own").exists()  # the script's own folder is not touched


@pytest.mark.parametrize(
    ("planted", "where", "cause"),
    [
        (
            "random",
            "step 1, loss of micro-batch 0",
            "Two runs alike differ too. The model draws random numbers from a generator",
        ),
        pytest.param(
            "branch",
            "step 1, loss of micro-batch 2",
            "Two runs alike are the same. The model or the loss takes another branch",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "swapped",
            "inputs of micro-batch",
            "Samples are swapped: in place of a sample of this micro-batch the second run has",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_is_planted_is_named_with_its_step_and_cause(script, tmp_path, planted, where, cause):
    status, said = verify(script, planted, tmp_path)
    assert status == 1, said
    assert "NOT identical: first difference at step " in said
    assert where in said
    assert f"Likely cause: {cause}" in said


@pytest.mark.long
def test_a_step_of_two_ranks_is_replayed_in_one_process_and_ledgers_are_compared(script, tmp_path):
    status, said = allstep(
        "launch", "--num_processes", 2, "--num_cpu_threads_per_process", 1, script, "nothing", tmp_path / "a"
    )
    assert (status, "the script went on" in said) == (0, True)
    status, said = allstep("verify", "--replay", tmp_path / "a", "--step", 4, script, "nothing", tmp_path / "unused")
    assert status == 0, said
    assert f"step 4 of {tmp_path}/a in one process, from {tmp_path}/a/checkpoint-2" in said
    assert "identical: step 4 (2 rank(s) then, 1 now): 4 micro-batches, their losses, norm of gradients, 6 gradients" in said
    status, said = allstep("verify", "--replay", tmp_path / "a", "--step", 4, script, "random", tmp_path / "unused")
    assert status == 1, said
    assert "NOT identical: first difference at step 3, loss of micro-batch 0" in said
    status, said = allstep("launch", "--num_processes", 1, "--num_cpu_threads_per_process", 1, script, "noise", tmp_path / "b")
    assert status == 0, said
    status, said = allstep("verify", "--compare", tmp_path / "a", tmp_path / "b")
    assert status == 1, said
    assert "NOT identical: first difference at step 1, samples of micro-batch 2" in said  # one rank has half the global batch
    assert "other numbers of samples" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare", "{0}", "{0}"], "holds no ledger: no rank_0.jsonl. Train with ledger=True."),
        (["--replay", "{0}", "train.py"], "--replay needs --step T"),
        (["--world_sizes", "one", "train.py"], "expected numbers of ranks, such as 1,2,4"),
        (["not_there.py"], "SCRIPT 'not_there.py' is not there: looked for"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_what_cannot_be_verified_is_said(script, tmp_path, monkeypatch, words, said):
    from click.testing import CliRunner

    from allstep.cli.verify.command import verify as command

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, [word.format(tmp_path) for word in words])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ").replace("  ", " ")


def test_a_script_that_fails_shows_the_end_of_its_output(script, tmp_path):
    script.write_text("raise ValueError('no data today')")
    status, said = allstep("verify", "--world_sizes", "1,2", script)
    assert status == 2
    assert "The script failed on 1 rank(s), exit status 1" in said
    assert "ValueError: no data today" in said
