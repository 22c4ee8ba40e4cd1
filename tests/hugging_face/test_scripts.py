"""Scripts that were written for transformers' Trainer run with that import changed, on one rank and on two, with equal results.

The scripts are as users write them. On two ranks they accumulate half as many micro-batches, so that a step consists of the
same samples; everything that they compute is then the same to the bit.
"""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the scripts were written for it")
pytest.importorskip("datasets", reason="the scripts load their data by it")

SCRIPTS = Path(__file__).parent / "scripts"
THEIRS, OURS = "from transformers import Trainer, TrainingArguments\n", "from allstep import Trainer, TrainingArguments\n"
TRAINING = ["--seed", "11", "--per_device_train_batch_size", "6", "--learning_rate", "3e-3", "--do_train", "--do_eval"]
ARGUMENTS = {
    "causal_lm": [*TRAINING, "--num_train_epochs", "2", "--logging_steps", "3", "--save_steps", "5"],
    "text_classification": [],
    "token_classification": [*TRAINING, "--num_train_epochs", "2", "--lr_scheduler_type", "cosine", "--save_strategy", "no"],
    "own_loss": [*TRAINING, "--max_steps", "10", "--logging_steps", "2", "--save_strategy", "no"],
    "own_callbacks": [
        *TRAINING, "--num_train_epochs", "6", "--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "4",
        "--load_best_model_at_end", "true", "--metric_for_best_model", "eval_loss", "--greater_is_better", "false",
        "--learning_rate", "1e-3", "--save_total_limit", "2",
    ],
    "own_optimizer": [],
}  # fmt: skip


def run_script(rank, size, name, folder, argv):
    source = (SCRIPTS / f"{name}.py").read_text()
    assert source.count(THEIRS) == 1
    sys.path.insert(0, str(SCRIPTS))
    try:
        script = {"__name__": name, "__file__": str(SCRIPTS / f"{name}.py")}
        module = type(sys)(name)
        module.__dict__.update(script)
        sys.modules[name] = module  # dataclasses look their annotations up there
        exec(compile(source.replace(THEIRS, OURS), f"{name}.py", "exec"), module.__dict__)
        module.main(["--output_dir", folder, "--gradient_accumulation_steps", str(2 // size), *argv])
    finally:
        sys.path.remove(str(SCRIPTS))
        sys.modules.pop(name, None)


def both(name, one_rank, ranks, tmp_path):
    found = []
    for pool, folder in ((one_rank, tmp_path / "one"), (ranks, tmp_path / "two")):
        pool.run(run_script, name, str(folder), ARGUMENTS[name])
        found.append(json.loads((folder / "result.json").read_text()))
    return found


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_a_script_runs_with_its_import_changed(name, one_rank, ranks, tmp_path):
    alone, together = both(name, one_rank, ranks, tmp_path)
    assert alone == together
    CHECKS[name](alone, tmp_path / "two")


def check_causal_lm(found, folder):
    assert found["perplexity"] < 30
    assert found["layers"] == 2
    written = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer_state.json", "all_results.json"} <= written
    everything = json.loads((folder / "all_results.json").read_text())
    assert {"train_loss", "train_samples", "eval_loss", "eval_samples", "perplexity", "epoch"} <= everything.keys()


def check_text_classification(found, folder):
    assert found["accuracy"] > 0.9 > 1.5 / 3
    assert found["best"] >= found["accuracy"]
    assert found["eval_loss"] < found["before"]
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["predicted"]) == len(found["labels"]) == 30
    assert 1 <= len(found["checkpoints"]) <= 2
    assert {"test_loss", "test_accuracy", "test_runtime", "test_samples_per_second"} <= set(found["test"])


def check_token_classification(found, folder):
    assert found["accuracy"] > 0.8
    assert sum(map(len, found["tags"])) == found["tokens"]


def check_own_loss(found, folder):
    assert len(found["losses"]) == 5
    assert found["losses"][-1] < found["losses"][0]


def check_own_callbacks(found, folder):
    events = found["events"]
    assert events["step_end"] == found["steps"]
    assert events["train_begin"] == 1
    assert events["epoch_end"] < 6, "stopped early"
    assert found["seen"] == events["evaluate"] == len(found["eval_losses"])
    assert events["evaluate"] == events["epoch_end"] + 2  # one after step 5, one behind training


def check_own_optimizer(found, folder):
    assert len(found["losses"]) == len(found["rates"]) == 4
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["eval"]) == 2
    assert found["groups"] == pytest.approx([0.0, 0.0], abs=1e-9)


CHECKS = {name: globals()[f"check_{name}"] for name in ARGUMENTS}
