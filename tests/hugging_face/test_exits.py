"""Scripts as users start them end with exit code 0, without a last word of the interpreter's, and leave no process behind."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from allstep.testing.processes import processes_with

pytest.importorskip("transformers", reason="the scripts were written for it")
pytest.importorskip("datasets", reason="the scripts load their data by it")

SCRIPTS = Path(__file__).parent / "scripts"
THEIRS, OURS = "from transformers import Trainer, TrainingArguments\n", "from allstep import Trainer, TrainingArguments\n"
TRAINED = ["--do_train", "--do_eval", "--per_device_train_batch_size", "6", "--max_steps", "6", "--logging_steps", "2"]
MORE = {
    "own_callbacks": [
        *TRAINED, "--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "true",
        "--metric_for_best_model", "eval_loss", "--greater_is_better", "false",
    ],
    "own_optimizer": [],
    "text_classification": [],
}  # fmt: skip
WAYS = {
    "launched": [sys.executable, "-m", "allstep", "launch", "--num_processes", "2"],
    "alone": [sys.executable],
}
BAD_WORDS = (
    "terminate called",
    "Fatal Python error",
    "Segmentation fault",
    "core dumped",
    "Exception ignored",
    "Aborted",
    "leaked",
)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "words"))
def test_every_process_ends_well(tmp_path, name, way, turn):
    source = (SCRIPTS / f"{name}.py").read_text()
    assert source.count(THEIRS) == 1
    script = tmp_path / f"{name}.py"
    script.write_text(source.replace(THEIRS, OURS))
    (tmp_path / "words.py").write_text((SCRIPTS / "words.py").read_text())
    mark = f"of-{uuid.uuid4().hex}"
    command = [*WAYS[way], str(script), "--output_dir", str(tmp_path / "out"), *MORE.get(name, TRAINED)]
    ended = subprocess.run(
        command, env={**os.environ, "ALLSTEP_TEST_MARK": mark}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not [word for word in BAD_WORDS if word in ended.stderr + ended.stdout]
    assert (tmp_path / "out" / "result.json").exists()
    assert not processes_with(f"ALLSTEP_TEST_MARK={mark}")
