"""The same model, data and order through transformers' Trainer and ours, in one process, in fp32: equal numbers and names.

Only models whose stock loss is a mean over what they are said to be (a causal model of the Llama kind, plain modules) are
compared with accumulation; those of BERT's heads and GPT-2 are held against a reference in test_wrong_losses.py. What is
evaluated has rows of one length, as theirs is a mean of batch means. Micro-batches have a power of two of samples, so that
multiplying a gradient by its weight and dividing loses no bit.
"""

import json

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="it is compared with")

FILES_OF_BOTH = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
SETTINGS = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "disable_tqdm": True,
    "seed": 5,
}
CASES = {
    "epochs": {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_first_step": True},
    "steps": {
        "max_steps": 7, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 2, "logging_steps": 2, "warmup_steps": 3,
        "lr_scheduler_type": "cosine", "eval_delay": 4, "save_total_limit": 2,
    },
    "accumulation": {
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.05, "eval_strategy": "no",
        "save_strategy": "no", "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0.25,
    },
    "best": {
        "num_train_epochs": 2.5, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True,
        "metric_for_best_model": "error", "greater_is_better": False, "eval_on_start": True, "optim": "sgd",
    },
}  # fmt: skip


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def curve(samples=24):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(samples, 3, generator=generator)
    rows = [{"x": row, "labels": torch.stack([row.sum(), row.prod()])} for row in rows]
    return Curve(), rows, rows[:9]


def llama(samples=24):
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(4)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    rows = []
    lengths = [*torch.randint(4, 12, (samples,), generator=generator).tolist(), *[12] * 9]
    for length in lengths:
        ids = torch.zeros(12, dtype=torch.long)
        ids[:length] = torch.randint(1, 31, (length,), generator=generator)
        mask = (torch.arange(12) < length).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)})
    return LlamaForCausalLM(config), rows[:samples], rows[samples:]


def error(prediction):
    return {"error": float(abs(prediction.predictions - prediction.label_ids).mean())}


def recorder():
    from transformers import TrainerCallback

    names = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    events = []

    def method(name):
        return lambda self, args, state, control, **kwargs: events.append((name, state.global_step))

    return type("Recorder", (TrainerCallback,), {name: method(name) for name in names})(), events


def train(rank, size, whose, make, folder, settings, resume=None):
    import transformers

    import allstep

    package = {"theirs": transformers, "ours": allstep}[whose]
    if whose == "theirs":
        settings = {**settings, "use_cpu": True}
    torch.manual_seed(1)
    model, rows, held_out = make()
    callback, events = recorder()
    trainer = package.Trainer(
        model,
        package.TrainingArguments(folder, **settings),
        train_dataset=rows,
        eval_dataset=held_out,
        compute_metrics=error if make.__name__ == "curve" else None,
        callbacks=[callback],
    )
    output = trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    return {
        "history": trainer.state.log_history,
        "events": events,
        "steps": output.global_step,
        "loss": output.training_loss,
        "keys": sorted(output.metrics),
        "metrics": metrics,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "epoch": trainer.state.epoch,
    }


def both(one_rank, tmp_path, make, settings):
    (theirs,) = one_rank.run(train, "theirs", make, str(tmp_path / "theirs"), settings)
    (ours,) = one_rank.run(train, "ours", make, str(tmp_path / "ours"), settings)
    return theirs, ours


def near(values):
    return tuple(value if value is None else pytest.approx(value, rel=2e-6, abs=1e-8) for value in values)


def numbers(history, *names):
    return [(entry["step"], *(entry.get(name) for name in names)) for entry in history if names[0] in entry]


@pytest.mark.parametrize(
    ("make", "case"),
    [(curve, case) for case in CASES] + [(llama, case) for case in CASES if case != "best"],  # whose metric is the curve's
)
def test_equal_numbers_events_and_files(one_rank, tmp_path, make, case):
    settings = {**SETTINGS, **CASES[case]}
    if make is llama:  # theirs logs a mean of steps, ours a mean over tokens
        settings["logging_steps"] = 1
    theirs, ours = both(one_rank, tmp_path, make, settings)
    assert ours["steps"] == theirs["steps"]
    assert ours["epoch"] == theirs["epoch"]
    for names in (("loss", "learning_rate", "epoch"), ("eval_loss", "eval_error", "epoch"), ("grad_norm",)):
        for mine, reference in zip(numbers(ours["history"], *names), numbers(theirs["history"], *names), strict=True):
            assert mine == near(reference)
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-5, atol=1e-6)
    assert ours["events"] == theirs["events"]
    assert set(theirs["keys"]) <= set(ours["keys"])
    assert set(theirs["metrics"]) <= set(ours["metrics"])
    assert ours["metrics"]["eval_loss"] == pytest.approx(theirs["metrics"]["eval_loss"], rel=2e-6)
    if make is curve:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
    assert ours["best"] == near(theirs["best"])
    folders = [sorted(path.name for path in (tmp_path / whose).glob("checkpoint-*")) for whose in ("theirs", "ours")]
    assert folders[0] == folders[1]
    for name in folders[0]:
        files = [{path.name for path in (tmp_path / whose / name).iterdir()} for whose in ("theirs", "ours")]
        assert files[0] - {"training_args.bin"} <= files[1]
        assert files[1] >= FILES_OF_BOTH


@pytest.mark.parametrize("make", [curve, llama])
@pytest.mark.parametrize(("first", "second"), [("theirs", "ours"), ("ours", "theirs")])
def test_a_checkpoint_of_the_one_is_resumed_by_the_other(one_rank, tmp_path, make, first, second):
    settings = {**SETTINGS, "num_train_epochs": 2, "save_steps": 4, "eval_strategy": "no"}
    (whole,) = one_rank.run(train, first, make, str(tmp_path), settings)
    (resumed,) = one_rank.run(train, second, make, str(tmp_path / "more"), settings, str(tmp_path / "checkpoint-4"))
    assert resumed["steps"] == whole["steps"]
    for mine, reference in zip(numbers(resumed["history"], "loss"), numbers(whole["history"], "loss"), strict=True):
        assert mine == pytest.approx(reference, rel=2e-6)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_trainer_states_are_read_by_the_other(one_rank, tmp_path):
    import transformers

    one_rank.run(train, "ours", curve, str(tmp_path), {**SETTINGS, "max_steps": 2, "save_steps": 2})
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = transformers.TrainerState.load_from_json(str(path))
    assert (state.global_step, state.max_steps) == (2, 2)
    theirs = {name for name in vars(transformers.TrainerState()) if not name.startswith("_")}
    assert theirs <= json.loads(path.read_text()).keys() | {"compute"}
