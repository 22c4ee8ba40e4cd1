"""A disk that refuses checkpoints during training: what goes on, what is said, what stays on disk."""

import contextlib
import errno
import io
import os
import re
import shutil
import subprocess
import sys
import warnings

import pytest

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.checkpoint.store import CheckpointStore
from allstep.checkpoint.weights import read_weights, restore_weights
from allstep.comm.agreement import digest
from allstep.errors import CheckpointError
from allstep.testing.disk import acting_on_disk
from allstep.testing.models import Noisy, RegressionNet

HOW = pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside"])


class Saves(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, checkpoint, **kwargs):
        self.seen.append(checkpoint.name)


class Tokenizer:
    def save_pretrained(self, folder):
        raise TypeError("a mistake of its own")


def train(rank, size, folder, refused, options=None, tokenizer=None):
    """What became of a run where the disk refuses `refused`, names of (checkpoint, file), and what was said on this rank."""
    saves, output = Saves(), io.StringIO()

    def on_disk(action, path):
        if action == "sync" and [path.parent.name.removeprefix("staging-"), path.name] in refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if action == "stage" and [path.name.removeprefix("staging-"), "."] in refused:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        max_steps=10,
        learning_rate=1e-2,
        save_steps=2,
        disable_tqdm=True,
        **(options or {}),
    )
    error = None
    with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as caught, acting_on_disk(on_disk):
        warnings.simplefilter("always")
        trainer = Trainer(
            RegressionNet(0.3),
            args,
            train_dataset=Noisy(50),
            eval_dataset=Noisy(7),
            callbacks=[saves],
            processing_class=tokenizer,
        )
        try:
            trainer.train()
        except CheckpointError as caught_error:
            error = caught_error
    return {
        "weights": digest(trainer.model.named_parameters()),
        "step": trainer.state.global_step,
        "best": (trainer.state.best_global_step, trainer.state.best_model_checkpoint),
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "saved": saves.seen,
        "warned": [str(warning.message) for warning in caught],
        "said": output.getvalue(),
        "error": error,
    }


def there(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@HOW
@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_1.pth", "manifest.json"])
def test_training_goes_on_and_says_so_then_and_at_the_end(ranks, tmp_path, name, beside):
    options = {"save_in_background": beside, "save_total_limit": 2}
    sound = ranks.run(train, tmp_path / "sound", [], options)
    refused = [["checkpoint-4", name], ["checkpoint-8", name]]
    outcomes = ranks.run(train, tmp_path / "refused", refused, options)
    folder, culprit = tmp_path / "refused", 1 if name == "rng_state_1.pth" else 0
    for rank in (0, 1):
        assert outcomes[rank]["error"] is None
        assert outcomes[rank]["step"] == 10
        assert outcomes[rank]["weights"] == sound[rank]["weights"]
        assert outcomes[rank]["saved"] == ["checkpoint-2", "checkpoint-6", "checkpoint-10"]
    assert [len(outcome["warned"]) for outcome in outcomes] == [2, 0]
    for step, said in zip((4, 8), outcomes[0]["warned"], strict=True):
        assert said.startswith(f"Rank {culprit} could not ")
        assert f"checkpoint-{step}" in said
        assert str(folder) in said
        assert "No space left on device" in said
        assert name == "manifest.json" or f"{name} could not be written" in said
        assert said.endswith('Training goes on; save_failure="stop" would end it here.')
    assert there(folder) == ["checkpoint-10", "checkpoint-6"]
    words = f"2 of 5 checkpoints could not be written: checkpoint-4, checkpoint-8. The last of them: Rank {culprit} could not "
    assert words in outcomes[0]["said"]
    assert "IS ON DISK" not in outcomes[0]["said"], "the last one is"
    assert "could not be written" not in sound[0]["said"]


@HOW
def test_an_output_folder_that_became_read_only_is_no_end_of_training_either(ranks, tmp_path, beside):
    outcomes = ranks.run(train, tmp_path, [["checkpoint-4", "."]], {"save_in_background": beside})
    assert [outcome["step"] for outcome in outcomes] == [10, 10]
    assert f"{tmp_path}/staging-checkpoint-4 could not be made: Read-only file system." in outcomes[0]["warned"][0]
    assert there(tmp_path) == ["checkpoint-10", "checkpoint-2", "checkpoint-6", "checkpoint-8"]


@HOW
def test_nothing_is_deleted_where_the_last_one_failed_and_the_end_says_it_loudly(ranks, tmp_path, beside):
    options = {"save_in_background": beside, "save_total_limit": 1}
    refused = [[f"checkpoint-{step}", "model.safetensors"] for step in (6, 8, 10)]
    outcome = ranks.run(train, tmp_path, refused, options)[0]
    assert outcome["error"] is None
    assert there(tmp_path) == ["checkpoint-4"]
    assert CheckpointStore(tmp_path).problems(tmp_path / "checkpoint-4") == []
    assert "3 of 5 checkpoints could not be written:" in outcome["said"]
    assert outcome["said"].splitlines()[-1] == (
        f"NOTHING NEWER THAN {tmp_path}/checkpoint-4 IS ON DISK: what was trained since then is lost when this process ends, "
        f"unless it is saved"
    )


@HOW
def test_where_the_arguments_say_stop_it_is_an_error_on_every_rank(ranks, tmp_path, beside):
    options = {"save_in_background": beside, "save_failure": "stop"}
    outcomes = ranks.run(train, tmp_path, [["checkpoint-4", "rng_state_1.pth"]], options)
    assert all(isinstance(outcome["error"], CheckpointError) for outcome in outcomes)
    assert "Rank 1 could not write checkpoint-4. rng_state_1.pth could not be written" in str(outcomes[0]["error"])
    assert outcomes[0]["error"].args == outcomes[1]["error"].args
    assert there(tmp_path) == ["checkpoint-2"]


@HOW
def test_an_error_that_is_not_the_disks_is_an_error_on_every_rank(ranks, tmp_path, beside):
    outcomes = ranks.run(train, tmp_path, [], {"save_in_background": beside}, Tokenizer())
    assert all("TypeError: a mistake of its own" in str(outcome["error"]) for outcome in outcomes)
    assert there(tmp_path) == []


@HOW
def test_the_best_is_the_best_of_those_on_disk(ranks, tmp_path, beside):
    """The loss falls, so that each checkpoint is the best; the last two cannot be written, and the third is loaded."""
    options = {"save_in_background": beside, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    refused = [[f"checkpoint-{step}", "model.safetensors"] for step in (8, 10)]
    outcomes = ranks.run(train, tmp_path / "refused", refused, options | {"save_total_limit": 1})
    assert outcomes[0]["evaluated"] == sorted(outcomes[0]["evaluated"], reverse=True)
    assert outcomes[0]["best"] == outcomes[1]["best"] == (6, str(tmp_path / "refused" / "checkpoint-6"))
    assert there(tmp_path / "refused") == ["checkpoint-6"]
    best = RegressionNet(0.3)
    restore_weights(best, read_weights(tmp_path / "refused" / "checkpoint-6"), tmp_path)
    assert outcomes[0]["weights"] == outcomes[1]["weights"] == digest(best.named_parameters())


FULL = """
mount -t tmpfs -o size={size} tmpfs "$1" && exec "$2" -m allstep launch --num_processes 2 "$3" "$1"
"""

SCRIPT = """
import os, sys
from allstep import Trainer, TrainingArguments
from allstep.testing.models import Regression, RegressionNet

args = TrainingArguments(sys.argv[1], max_steps=10, save_steps=1, logging_steps=100, disable_tqdm=True)
Trainer(RegressionNet(width=4000), args, train_dataset=Regression(400)).train()
if os.environ["RANK"] == "0":
    print("THERE", sorted(name for name in os.listdir(sys.argv[1]) if name != "metrics.jsonl"))
"""


@pytest.mark.long
def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 1 MiB, of which each checkpoint takes some 0.3, in a name space of this test's own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name spaces of its own are to be had here (unshare -rm)")
    (tmp_path / "disk").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", FULL.format(size="1m"), "sh", tmp_path / "disk", sys.executable, tmp_path / "train.py"],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failed = int(re.search(r"^(\d+) of 10 checkpoints could not be written: ", done.stdout, re.MULTILINE)[1])
    assert 0 < failed < 10
    assert done.stderr.count("No space left on device. Older checkpoints in") == failed
    assert f"NOTHING NEWER THAN {tmp_path}/disk/checkpoint-{10 - failed} IS ON DISK" in done.stdout
    assert f"THERE {[f'checkpoint-{step}' for step in range(1, 11 - failed)]}" in done.stdout
