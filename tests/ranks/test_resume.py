"""A run that stopped in mid-epoch and went on ends as one that never stopped, bit for bit."""

import json

import pytest
import torch

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import CheckpointError, ReplicaError
from allstep.testing.models import Noisy, RegressionNet
from allstep.trainer.throughput import MEASURED
from allstep.trainer.verification import StopAfter

BACKENDS = ("gloo", "shm")


class SampleOrder(TrainerCallback):
    """The first number of every micro-batch, as the model saw it: sample order and augmentation in one."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        if module.training:
            self.seen.append(kwargs["x"][:, 0].tolist())

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()


def train(rank, size, folder, workers, stop=None, resume=None):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=3,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=5,
        dataloader_num_workers=workers,
        disable_tqdm=True,
    )
    order = SampleOrder()
    callbacks = [order, *([] if stop is None else [StopAfter(stop)])]
    trainer = Trainer(RegressionNet(0.3), args, train_dataset=Noisy(50), eval_dataset=Noisy(7), callbacks=callbacks)
    output = trainer.train(resume_from_checkpoint=resume)
    optimizer = [(f"{i}.{key}", value) for i, s in trainer.optimizer.state_dict()["state"].items() for key, value in s.items()]
    return {
        "weights": digest(trainer.model.named_parameters()),
        "optimizer": digest((name, torch.as_tensor(value)) for name, value in optimizer),
        "logs": [
            {k: v for k, v in entry.items() if k not in MEASURED and "second" not in k and "runtime" not in k}
            for entry in trainer.state.log_history
        ],
        "order": order.seen,
        "train_loss": output.training_loss,
        "step": trainer.state.global_step,
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_stopped_in_mid_epoch_and_resumed_equals_never_stopped(ranks, tmp_path, workers, size):
    def run(*arguments):
        return ranks.run(train, *arguments) if size == 2 else [train(0, 1, *arguments)]

    whole = run(tmp_path / "whole", workers)
    stopped = run(tmp_path / "parts", workers, 8)
    resumed = run(tmp_path / "parts", workers, None, True)
    assert stopped[0]["step"] == 8
    for rank in range(size):
        for key in ("weights", "optimizer", "logs", "train_loss", "step"):
            assert resumed[rank][key] == whole[rank][key], key
        skipped = len(whole[rank]["order"]) - len(resumed[rank]["order"])
        assert skipped > 0
        assert resumed[rank]["order"] == whole[rank]["order"][skipped:]
        assert stopped[rank]["order"][:skipped] == whole[rank]["order"][:skipped]


def test_worker_processes_do_not_change_what_is_computed(ranks, tmp_path):
    without, beside = ranks.run(train, tmp_path / "0", 0), ranks.run(train, tmp_path / "2", 2)
    assert without == beside


def test_metrics_file_of_a_resumed_run_holds_each_step_once(tmp_path):
    train(0, 1, tmp_path, 0, 8)
    train(0, 1, tmp_path, 0, None, True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    assert steps[0] == 3


class Altered(RegressionNet):
    """Loads other weights than it was given."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        result = super().load_state_dict(state_dict, *args, **kwargs)
        with torch.no_grad():
            list(self.parameters())[-1].add_(1e-7)
        return result


def resume_altered(rank, size, folder):
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 3, "disable_tqdm": True}
    args = TrainingArguments(str(folder), **options)
    Trainer(RegressionNet(0.0), args, train_dataset=Noisy(20)).train()
    net = Altered(0.0) if rank == 1 else RegressionNet(0.0)
    with pytest.raises(ReplicaError) as raised:
        Trainer(net, args, train_dataset=Noisy(20)).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return str(raised.value), list(dict(net.named_parameters()))[-1]


def test_ranks_that_load_different_weights_are_found_before_the_first_step(ranks, tmp_path):
    for message, name in ranks.run(resume_altered, tmp_path):
        assert f"parameter {name} on rank(s) 1 is not as on rank 0" in message


def train_into_a_folder_in_use(rank, size, folder):
    class Second(TrainerCallback):
        """Starts a second run in the middle of the first."""

        decides_alike = True
        words = ""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                try:
                    Trainer(RegressionNet(), args, train_dataset=Noisy(20)).train()
                except CheckpointError as error:
                    self.words = str(error)

    second = Second()
    args = TrainingArguments(str(folder), max_steps=4, disable_tqdm=True, logging_strategy="no")
    Trainer(RegressionNet(), args, train_dataset=Noisy(20), callbacks=[second]).train()
    Trainer(RegressionNet(), args, train_dataset=Noisy(20)).train()  # when it is over, the folder is free
    return second.words


def test_a_second_run_is_kept_out_of_the_folder(ranks, tmp_path):
    for words in ranks.run(train_into_a_folder_in_use, tmp_path):
        assert f"Another run already trains into {tmp_path}" in words
