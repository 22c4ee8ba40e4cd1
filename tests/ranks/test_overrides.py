"""What users override in a Trainer is called, on one rank and on two, and changes what it should, no more."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Regression, RegressionNet, Seen
from allstep.testing.ranks import one_thread

SETTINGS = {
    "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "num_train_epochs": 2,
    "per_device_train_batch_size": 3,
}  # fmt: skip


def make(kind, folder, size, dataset=None, **settings):
    accumulation = settings.pop("accumulation", 4) // size
    torch.manual_seed(0)
    args = TrainingArguments(str(folder), **{**SETTINGS, **settings}, gradient_accumulation_steps=accumulation)
    return kind(RegressionNet(), args, train_dataset=Seen(20) if dataset is None else dataset, eval_dataset=Regression(7))


def result_of(trainer):
    return {
        "digest": digest(trainer.model.named_parameters()),
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seen": getattr(trainer.train_dataset, "indices", None),
        "steps": trainer.state.global_step,
    }


def train(rank, size, kind, folder, settings):
    trainer = make(KINDS[kind], folder, size, **settings)
    trainer.train()
    return result_of(trainer)


def on_both(ranks, tmp_path, kind, **settings):
    together = ranks.run(train, kind, tmp_path / "two", settings)
    with one_thread():
        alone = train(0, 1, kind, tmp_path / "one", settings)
    assert together[0]["digest"] == together[1]["digest"]
    assert together[0]["losses"] == together[1]["losses"]
    return alone, together


# ---- the training step


class WithSuper(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss + 0


class ByHand(Trainer):
    """As people copy it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if self.args.n_gpu > 1:
            loss = loss.mean()
        self.accelerator.backward(loss)
        return loss.detach() / self.current_gradient_accumulation_steps


class Older(Trainer):
    """Without the count."""

    def training_step(self, model, inputs):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("kind", ["WithSuper", "ByHand", "Older"])
def test_a_training_step_that_does_the_same_gives_the_same_bits(ranks, tmp_path, kind):
    plain, _ = on_both(ranks, tmp_path / "plain", "Trainer")
    alone, together = on_both(ranks, tmp_path / "own", kind)
    assert alone["digest"] == together[0]["digest"] == plain["digest"]
    assert alone["losses"] == together[0]["losses"] == plain["losses"]


class Raw(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()


def test_a_training_step_that_goes_backward_by_itself_is_averaged_over_ranks(ranks, tmp_path):
    """16 samples in full micro-batches: then every micro-batch counts alike anyway."""
    settings = {"dataset": Regression(24), "per_device_train_batch_size": 3, "max_grad_norm": 0.0}
    plain, _ = on_both(ranks, tmp_path / "plain", "Trainer", **settings)
    alone, together = on_both(ranks, tmp_path / "own", "Raw", **settings)
    for mine, reference in zip(together[0]["weights"], plain["weights"], strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone["losses"], plain["losses"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together[0]["losses"], plain["losses"], rtol=1e-5, atol=1e-6)


class Adversarial(Trainer):
    """Two backward passes: at the weights, and at weights that were moved."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        first = next(self.model.parameters())
        with torch.no_grad():
            first.add_(0.125)
        self.accelerator.backward(self.compute_loss(model, inputs))
        with torch.no_grad():
            first.sub_(0.125)
        return loss.detach()


def test_a_training_step_may_go_backward_twice(ranks, tmp_path):
    alone, together = on_both(ranks, tmp_path, "Adversarial")
    assert alone["digest"] == together[0]["digest"]
    plain, _ = on_both(ranks, tmp_path / "plain", "Trainer")
    assert plain["digest"] != alone["digest"]


class Prepares(Trainer):
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        inputs["x"] = inputs["x"] * 2
        return inputs


def test_inputs_may_be_changed(ranks, tmp_path):
    alone, together = on_both(ranks, tmp_path, "Prepares")
    assert alone["digest"] == together[0]["digest"]
    plain, _ = on_both(ranks, tmp_path / "plain", "Trainer")
    assert plain["losses"][0] != alone["losses"][0]


# ---- samplers and loaders


class Weighted(Trainer):
    def _get_train_sampler(self):
        return WeightedRandomSampler([1.0] * 10 + [9.0] * 10, 20)


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(self.train_dataset, generator=generator)
        return DataLoader(self.train_dataset, batch_size=3, sampler=sampler, collate_fn=self.data_collator)


class PreparedLoader(Trainer):
    def get_train_dataloader(self):
        loader = DataLoader(self.train_dataset, batch_size=3, shuffle=True, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class SharedLoader(Trainer):
    """As for torch's own class, one part a rank."""

    def get_train_dataloader(self):
        sampler = DistributedSampler(
            self.train_dataset, num_replicas=self.args.world_size, rank=self.args.process_index, shuffle=True
        )
        return DataLoader(self.train_dataset, batch_size=3, sampler=sampler, collate_fn=self.data_collator)


class Batched(Trainer):
    def get_train_dataloader(self):
        batches = BatchSampler(RandomSampler(self.train_dataset), 3, drop_last=False)
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)


KINDS = {
    kind.__name__: kind
    for kind in (
        Trainer, WithSuper, ByHand, Older, Raw, Adversarial, Prepares, Weighted, InOrder, OwnLoader, PreparedLoader,
        SharedLoader, Batched,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", ["InOrder", "OwnLoader", "PreparedLoader", "SharedLoader", "Batched"])
def test_what_a_loader_has_is_shared_without_repeats(ranks, tmp_path, kind):
    alone, together = on_both(ranks, tmp_path, kind)
    assert sorted(together[0]["seen"] + together[1]["seen"]) == sorted(alone["seen"]) == sorted([*range(20)] * 2)
    assert alone["digest"] == together[0]["digest"]
    assert alone["steps"] == together[0]["steps"] == 4


def test_a_sampler_that_repeats_by_itself_is_shared_as_it_is(ranks, tmp_path):
    alone, together = on_both(ranks, tmp_path, "Weighted")
    assert sorted(together[0]["seen"] + together[1]["seen"]) == sorted(alone["seen"])
    assert alone["digest"] == together[0]["digest"]
    assert sum(index >= 10 for index in alone["seen"]) > 25, "of 40"


class Lines(IterableDataset):
    def __init__(self, samples):
        self.rows = [Regression(samples)[index] for index in range(samples)]

    def __iter__(self):
        yield from self.rows


class Streamed(Trainer):
    def get_train_dataloader(self):
        return DataLoader(Lines(20), batch_size=3, collate_fn=self.data_collator)


class ReadyBatches(Trainer):
    """A loader of another library: batches, one after the other."""

    def get_train_dataloader(self):
        return [*DataLoader(Lines(21), batch_size=3, collate_fn=self.data_collator)]


KINDS |= {kind.__name__: kind for kind in (Streamed, ReadyBatches)}


@pytest.mark.parametrize("kind", ["Streamed", "ReadyBatches"])
def test_a_loader_of_a_stream_or_of_batches(ranks, tmp_path, kind):
    settings = {"max_steps": 4, "num_train_epochs": 1}
    alone, together = on_both(ranks, tmp_path, kind, **settings)
    assert alone["digest"] == together[0]["digest"]


# ---- evaluation


class OwnEvaluation(Trainer):
    """The way of question answering: look at predictions with one's own eyes."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                eval_dataloader,
                description="Evaluation",
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        metrics = {f"{metric_key_prefix}_rows": len(output.predictions), **output.metrics, "eval_num": output.num_samples}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class OwnPredictionStep(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss * 2, None if logits is None else logits + 1, labels


class OwnLoop(Trainer):
    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_more"] = 1.0
        return output


KINDS |= {kind.__name__: kind for kind in (OwnEvaluation, OwnPredictionStep, OwnLoop)}


def mean_error(prediction):
    return {"error": float(abs(prediction.predictions - prediction.label_ids).mean())}


def evaluate(rank, size, kind, folder):
    trainer = make(KINDS[kind], folder, size, eval_strategy="epoch", per_device_eval_batch_size=2)
    trainer.compute_metrics = mean_error
    before = trainer.evaluate()
    trainer.train()
    return before, trainer.state.log_history[-2], trainer.evaluate()


@pytest.mark.parametrize("kind", ["Trainer", "OwnEvaluation", "OwnPredictionStep", "OwnLoop"])
def test_evaluation_before_in_and_after_training(ranks, tmp_path, kind):
    together = ranks.run(evaluate, kind, tmp_path / "two")
    with one_thread():
        alone = evaluate(0, 1, kind, tmp_path / "one")
    for mine, other, reference in zip(*together, alone, strict=True):
        wanted = {name for name in reference if not name.endswith(("runtime", "second"))}
        for name in wanted:
            assert mine[name] == other[name] == reference[name], name
    before, during, after = alone
    assert before["eval_loss"] > after["eval_loss"]
    assert during["eval_loss"] == after["eval_loss"]
    if kind == "OwnEvaluation":
        assert after["eval_rows"] == after["eval_num"] == 7
    if kind == "OwnLoop":
        assert after["eval_more"] == during["eval_more"] == 1.0


def plain_loss(rank, size, kind, folder):
    trainer = make(KINDS[kind], folder, size)
    trainer.compute_metrics = mean_error
    return trainer.evaluate(), trainer.predict(Regression(5)).predictions


def test_a_prediction_step_of_ones_own_is_what_counts(tmp_path):
    plain, rows = plain_loss(0, 1, "Trainer", tmp_path)
    own, own_rows = plain_loss(0, 1, "OwnPredictionStep", tmp_path)
    assert own["eval_loss"] == pytest.approx(2 * plain["eval_loss"])
    assert own_rows == pytest.approx(rows + 1)


def by_batch(rank, size, folder):
    trainer = make(Trainer, folder, size, eval_do_concat_batches=False, per_device_eval_batch_size=2)
    seen = []

    def compute(prediction):
        seen.append((list(map(len, prediction.predictions)), list(map(len, prediction.label_ids))))
        return {}

    trainer.compute_metrics = compute
    trainer.evaluate()
    output = trainer.predict(Regression(7))
    whole = make(Trainer, folder, size).predict(Regression(7))
    return seen, [batch.tolist() for batch in output.predictions], whole.predictions.tolist()


def test_outputs_by_batch(ranks, tmp_path):
    for seen, batches, whole in ranks.run(by_batch, tmp_path):
        assert seen == [([2, 2, 2, 1], [2, 2, 2, 1])] * 2
        assert torch.allclose(torch.tensor([row for batch in batches for row in batch]), torch.tensor(whole))


# ---- what is written


class OwnSave(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        (Path(output_dir) / "mine.json").write_text(json.dumps({"rank": self.args.process_index}))


class OwnSaveModel(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            (Path(output_dir or self.args.output_dir) / "mine.json").write_text("{}")


class OwnCheckpoint(Trainer):
    def _save_checkpoint(self, model, trial, metrics=None):
        super()._save_checkpoint(model, trial, metrics)
        if self.is_world_process_zero():
            (Path(self._get_output_dir(trial=trial)) / f"saved-{self.state.global_step}").write_text(type(model).__name__)


class OnlyOwnCheckpoint(Trainer):
    def _save_checkpoint(self, model, trial):
        if self.is_world_process_zero():
            torch.save(self.model.state_dict(), Path(self.args.output_dir) / f"saved-{self.state.global_step}")


KINDS |= {kind.__name__: kind for kind in (OwnSave, OwnSaveModel, OwnCheckpoint, OnlyOwnCheckpoint)}


class Saves(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def save(rank, size, kind, folder, settings):
    trainer, saves = make(KINDS[kind], folder, size, save_strategy="steps", save_steps=2, **settings), Saves()
    trainer.add_callback(saves)
    trainer.train()
    trainer.save_model()
    whole = digest(trainer.model.named_parameters())
    resumed = None
    if kind != "OnlyOwnCheckpoint":
        again = make(KINDS[kind], folder, size, save_strategy="no", **settings)
        again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
        resumed = digest(again.model.named_parameters())
    return saves.steps, whole, resumed


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["OwnSave", "OwnSaveModel", "OwnCheckpoint", "OnlyOwnCheckpoint"])
def test_what_is_written_ones_own_way(ranks, tmp_path, kind, background):
    for steps, whole, resumed in ranks.run(save, kind, tmp_path, {"save_in_background": background}):
        assert steps == [2, 4] or (background and kind != "OnlyOwnCheckpoint")
        assert resumed in (None, whole)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    if kind in ("OwnSave", "OwnSaveModel"):
        assert {"checkpoint-2/mine.json", "checkpoint-4/mine.json", "mine.json", "model.safetensors"} <= names
    else:
        assert {"saved-2", "saved-4", "model.safetensors"} <= names
    assert not [name for name in names if "pretrained-" in name or "staging" in name]


# ---- optimizer and schedule


class OwnOptimizer(Trainer):
    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer if optimizer is None else optimizer, 2, 0.5)
        return self.lr_scheduler


class NamesOptimizer(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.Adamax, {"lr": args.learning_rate / 2}


class OneMethod(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, num_training_steps)


def test_optimizer_and_schedule_of_ones_own(tmp_path):
    kinds = {
        OwnOptimizer: (torch.optim.SGD, 0.5),
        NamesOptimizer: (torch.optim.Adamax, 0.005),
        OneMethod: (torch.optim.SGD, 0.5),
    }
    for kind, (optimizer, rate) in kinds.items():
        trainer = make(kind, tmp_path / kind.__name__, 1)
        trainer.train()
        assert type(trainer.optimizer) is optimizer
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
        assert rates[0] == rate
    trainer = Trainer(
        RegressionNet(), TrainingArguments(str(tmp_path), **SETTINGS), train_dataset=Regression(6),
        optimizer_cls_and_kwargs=(torch.optim.Adagrad, {"lr": 0.25}),
    )  # fmt: skip
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.Adagrad
    assert trainer.get_learning_rates() == [0.0, 0.0]
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())


# ---- an epoch that is ended


class EndsEpochs(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step in (1, 2)


def test_an_epoch_that_is_ended_counts_as_one(tmp_path):
    trainer = make(Trainer, tmp_path, 1)
    trainer.add_callback(EndsEpochs)
    assert trainer.train().global_step == 2


class Doubled(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("nobody looks at it")


def test_constructor_refuses_what_does_not_fit(tmp_path):
    args = TrainingArguments(str(tmp_path))
    with pytest.raises(TypeError, match="model is a str"):
        Trainer("bert-base-cased", args)
    with pytest.raises(TypeError, match="expected allstep's TrainingArguments, or those of transformers"):
        Trainer(RegressionNet(), {"output_dir": "x"})
    optimizer = torch.optim.SGD(RegressionNet().parameters())
    with pytest.raises(TypeError, match="either optimizers or optimizer_cls_and_kwargs"):
        Trainer(RegressionNet(), args, optimizers=(optimizer, None), optimizer_cls_and_kwargs=(torch.optim.SGD, {}))
    tokenizer = object()
    trainer = Trainer(RegressionNet(), args, tokenizer=tokenizer)
    assert trainer.processing_class is trainer.tokenizer is tokenizer
    with pytest.raises(TypeError, match="older name of processing_class"):
        Trainer(RegressionNet(), args, tokenizer=tokenizer, processing_class=object())
    with pytest.raises(TypeError, match="search of hyper-parameters"):
        trainer.train(trial={"lr": 1})


# ---- user code that talks to the other ranks


class Gathers(Trainer):
    """As trainers do that log what all ranks computed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.batch_eval_metrics:
            self.compute_metrics = lambda prediction, compute_result: {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.accelerator.gather_for_metrics(inputs["x"].sum())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class GathersInStep(Gathers):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.accelerator.wait_for_everyone()
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self.accelerator.wait_for_everyone()
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


class GathersRaw(Raw):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.accelerator.wait_for_everyone()
        return super().training_step(model, inputs, num_items_in_batch)


KINDS |= {kind.__name__: kind for kind in (Gathers, GathersInStep, GathersRaw)}
UNEVEN = {
    "dataset": Regression(13), "accumulation": 2, "ddp_timeout": 20, "eval_strategy": "epoch", "per_device_eval_batch_size": 3,
}  # fmt: skip
"""Steps of 6, 6 and 1 samples, evaluations of 3, 3 and 1: one rank has less to do."""


@pytest.mark.parametrize("kind", ["Gathers", "GathersInStep"])
@pytest.mark.parametrize("by_batch", [False, True])
def test_what_talks_to_other_ranks_is_called_as_often_on_each_and_nothing_else_changes(ranks, tmp_path, kind, by_batch):
    settings = UNEVEN | {"batch_eval_metrics": by_batch}
    plain, _ = on_both(ranks, tmp_path / "plain", "Trainer", **settings)
    alone, together = on_both(ranks, tmp_path / "own", kind, **settings)
    assert alone["digest"] == together[0]["digest"] == plain["digest"]
    assert alone["losses"] == together[0]["losses"] == plain["losses"]


def test_a_backward_of_ones_own_on_a_rank_without_samples_counts_nothing(ranks, tmp_path):
    _, plain = on_both(ranks, tmp_path / "plain", "Raw", **UNEVEN)
    _, together = on_both(ranks, tmp_path / "own", "GathersRaw", **UNEVEN)
    assert together[0]["digest"] == plain[0]["digest"]


def test_a_second_training_has_a_log_of_its_own(tmp_path):
    with one_thread():
        trainer = make(Trainer, tmp_path, 1)
        before = trainer.evaluate()
        trainer.train()
        first = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert trainer.state.log_history[0]["eval_loss"] == before["eval_loss"]
        trainer.train()
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == len(first) == trainer.state.global_step


class SavesTogether(Trainer):
    """As people do it for engines that shard the weights."""

    def save_model(self, output_dir=None, _internal_call=False):
        self.accelerator.wait_for_everyone()
        weights = self.accelerator.get_state_dict(self.model)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            torch.save(weights, Path(output_dir) / "weights.pt")


KINDS["SavesTogether"] = SavesTogether


def save_together(rank, size, folder, background):
    trainer = make(SavesTogether, folder, size, save_strategy="steps", save_steps=2, save_in_background=background)
    trainer.train()
    trainer.save_model(str(folder))
    return digest(sorted(trainer.model.state_dict().items()))


@pytest.mark.parametrize("background", [False, True])
def test_a_way_to_save_may_talk_to_the_other_ranks(ranks, tmp_path, background):
    (whole, _) = ranks.run(save_together, tmp_path, background)
    for folder in ("checkpoint-4", "."):
        assert digest(sorted(torch.load(tmp_path / folder / "weights.pt").items())) == whole
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists(), "so that the run can be resumed"


class Levels(Dataset):
    """Data that become harder; told by a callback, or by the epoch."""

    def __init__(self):
        self.level = 0.0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = Regression(8)[index]
        return {**row, "labels": row["labels"] + self.level}


class ByEpoch(Levels):
    def set_epoch(self, epoch):
        self.level = 10.0 * epoch


class Curriculum(TrainerCallback):
    decides_alike = False

    def __init__(self, dataset):
        self.dataset = dataset

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.dataset.level = 10.0 * round(state.epoch)


@pytest.mark.parametrize("kind", [Levels, ByEpoch])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_see_data_that_change_between_epochs(tmp_path, workers, kind):
    dataset = kind()
    settings = {"dataset": dataset, "dataloader_num_workers": workers, "accumulation": 1, "learning_rate": 1e-9}
    trainer = make(Trainer, tmp_path, 1, logging_strategy="epoch", **settings)
    if kind is Levels:
        trainer.add_callback(Curriculum(dataset))
    trainer.train()
    first, second = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert first < 20 < second


class Deaf(Trainer):
    def _maybe_log_save_evaluate(self, *args, **kwargs):
        raise AssertionError("nobody calls it")


def test_overrides_that_nobody_calls_are_named(tmp_path):
    with pytest.warns(UserWarning, match=r"Deaf overrides _maybe_log_save_evaluate, which allstep's Trainer does not have"):
        make(Deaf, tmp_path, 1)
