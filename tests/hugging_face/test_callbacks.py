"""Callbacks written for transformers' Trainer, as they are: the same events in the same order, and the same effects."""

import json

import pytest
import torch

from allstep.testing.models import Regression, RegressionNet

pytest.importorskip("transformers", reason="its callbacks are used")

PARTS = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
SETTINGS = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True, "report_to": "none", "seed": 3}
CASES = {
    "steps": {
        "max_steps": 7, "logging_steps": 2, "logging_first_step": True, "eval_strategy": "steps", "eval_steps": 3,
        "save_steps": 4, "eval_on_start": True, "gradient_accumulation_steps": 2,
    },
    "epochs": {
        "num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch",
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    },
}  # fmt: skip


def recorder():
    """A callback that notes each event, with the step and what is wished for then."""
    import transformers

    class Records(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

    def note(event):
        def hear(self, args, state, control, **kwargs):
            wishes = [name for name, value in vars(control).items() if value is True]
            self.seen.append((event, state.global_step, round(state.epoch, 3), wishes))
            missing = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"} - set(
                kwargs
            )
            assert not missing, (event, missing)

        return hear

    for event in [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]:
        setattr(Records, event, note(event))
    return Records()


def events(rank, size, folder, case):
    """What the same callback hears in transformers' Trainer and in ours."""
    import transformers

    import allstep

    heard = {}
    for kind in (transformers, allstep):
        torch.manual_seed(0)
        args = kind.TrainingArguments(str(folder / kind.__name__), **SETTINGS, **CASES[case], use_cpu=True)
        records = recorder()
        data = {"train_dataset": Regression(24), "eval_dataset": Regression(6)}
        trainer = kind.Trainer(RegressionNet(), args, callbacks=[records], **data)
        trainer.train()
        trainer.predict(Regression(3))
        heard[kind.__name__] = records.seen, list(trainer.state.stateful_callbacks)
    return heard


@pytest.mark.parametrize("case", CASES)
def test_events_come_as_in_transformers_with_the_same_wishes(one_rank, tmp_path, case):
    (heard,) = one_rank.run(events, tmp_path, case)
    (theirs, _), (ours, names) = heard["transformers"], heard["allstep"]
    assert len(theirs) > 30
    assert ours == theirs
    assert names == ["TrainerControl"]


def stopped_early(rank, size, folder, own):
    """A run that gets no better, with their callback or ours; and what it is resumed with."""
    import transformers

    import allstep

    kind = allstep if own else transformers
    args = allstep.TrainingArguments(
        str(folder), **SETTINGS | {"learning_rate": 0.0}, max_steps=20, eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", restore_callback_states_from_checkpoint=True,
    )  # fmt: skip
    data = {"train_dataset": Regression(24), "eval_dataset": Regression(6)}
    trainer = allstep.Trainer(RegressionNet(), args, callbacks=[kind.EarlyStoppingCallback(3)], **data)
    trainer.train()
    again = allstep.Trainer(RegressionNet(), args, callbacks=[kind.EarlyStoppingCallback(1)], **data)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    (callback,) = [each for each in again.callback_handler.callbacks if isinstance(each, kind.EarlyStoppingCallback)]
    return trainer.state.global_step, again.state.global_step, callback.early_stopping_patience


@pytest.mark.parametrize("own", [True, False], ids=["ours", "theirs"])
def test_early_stopping_stops_all_ranks_and_remembers_over_a_resume(ranks, tmp_path, own):
    assert ranks.run(stopped_early, tmp_path, own) == 2 * [(8, 8, 3)]


def with_their_own(rank, size, folder):
    """Every callback that transformers' Trainer has by itself, given by the user; TensorBoard's among them."""
    import transformers
    from transformers.integrations import TensorBoardCallback

    import allstep
    from allstep.trainer import decisions

    asked, exchange = [], decisions.any_rank
    decisions.any_rank = lambda communicator, bits: (asked.append(bits), exchange(communicator, bits))[1]
    try:
        args = allstep.TrainingArguments(
            str(folder), **SETTINGS, max_steps=4, logging_steps=2, run_name="x", save_strategy="no"
        )
        own = [transformers.trainer_callback.DefaultFlowCallback, transformers.PrinterCallback]
        trainer = allstep.Trainer(RegressionNet(), args, train_dataset=Regression(24), callbacks=own)
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
        without, logged = len(asked), [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.add_callback(TensorBoardCallback)
        trainer.train()
        logged += [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    finally:
        decisions.any_rank = exchange
    return trainer.callback_handler.callback_list.splitlines(), logged, without


def test_their_own_callbacks_act_once_and_decide_alike(ranks, tmp_path, capfd):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    names = ["DefaultFlowCallback", "PrinterCallback", "TensorBoardCallback"]
    assert ranks.run(with_their_own, tmp_path) == 2 * [(names, [2, 4, 2, 4], 1)]
    (folder,) = (tmp_path / "runs").iterdir()
    assert list(folder.glob("events.out.*"))


class Perplexing:
    """Not even a subclass."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "eval_loss" in logs:
            logs["eval_perplexity"] = 2.0 ** logs["eval_loss"]

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_seen"] = 1.0


class Evaluates:
    """Evaluates on the training data at the end of each epoch, in the way that many scripts do."""

    trainer = None

    def on_epoch_end(self, args, state, control, **kwargs):
        import copy

        kept = copy.deepcopy(control)
        self.trainer.evaluate(eval_dataset=self.trainer.train_dataset, metric_key_prefix="train")
        return kept


def changing(rank, size, folder):
    import allstep

    args = allstep.TrainingArguments(
        str(folder), **SETTINGS, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch"
    )
    evaluates = Evaluates()
    data = {"train_dataset": Regression(24), "eval_dataset": Regression(6)}
    trainer = allstep.Trainer(RegressionNet(), args, callbacks=[Perplexing(), evaluates], **data)
    evaluates.trainer = trainer
    trainer.train()
    metrics = trainer.evaluate()
    control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    assert control is trainer.control
    steps = sorted(path.name for path in folder.glob("checkpoint-*"))
    return {"keys": sorted(metrics), "steps": steps, "logs": [sorted(each)[:3] for each in trainer.state.log_history]}


def test_what_callbacks_change_is_what_files_and_callers_get(ranks, tmp_path):
    first, second = ranks.run(changing, tmp_path)
    assert first == second
    assert {"eval_perplexity", "eval_seen"} <= set(first["keys"])
    assert first["steps"] == ["checkpoint-3", "checkpoint-6"], "evaluating in an event takes no wish away"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_perplexity" in line for line in lines) == 3
    assert [line["step"] for line in lines if "train_loss" in line and "train_runtime" in line] == [3, 6, 6]
