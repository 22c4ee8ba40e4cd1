"""Float16 runs: one scale on all ranks, steps left out together, the same bits at any world size and after a resume."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.comm.communicator import communicator_for
from allstep.errors import ArgumentsError, NonFiniteGradientsError
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet, Tagger, Tokens, pad
from allstep.testing.ranks import one_thread
from allstep.trainer.optimization.optimizers import split_by_decay
from allstep.trainer.optimization.scaling import AgreedGradScaler

BACKENDS = ("gloo", "shm")


def make(folder, size, *, net=RegressionNet, rows=None, steps=6, policy="raise", callbacks=(), **more):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // size,
        max_steps=steps,
        learning_rate=1e-2,
        fp16=True,
        use_cpu=True,
        nonfinite_gradients=policy,
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_steps": 1, **more},
    )
    return Trainer(net(), args, train_dataset=Regression(64) if rows is None else rows, callbacks=list(callbacks))


class Large(nn.Module):
    """A net whose gradients overflow while the loss is scaled by more than 2**`most`."""

    def __init__(self, most: int = 14) -> None:
        super().__init__()
        self.inner, self.limit = RegressionNet(), 2.0**most

    def forward(self, x, labels=None):
        outputs = self.inner(x, labels)
        if outputs["loss"].requires_grad:
            samples = len(x)
            outputs["loss"].register_hook(
                lambda gradient: gradient / 0 if float(gradient) > self.limit * samples / 8 else gradient
            )
        return outputs


def told(trainer):
    state, scaler = trainer.state, trainer.last_run.scaler
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in state.log_history if "loss" in entry]
    return digest(trainer.model.named_parameters()), scaler.state_dict(), state.skipped_steps, losses, rates


def trained(rank, size, folder, net=RegressionNet, more=None):
    trainer = make(folder, size, net=net, **(more or {}))
    trainer.train()
    return told(trainer)


@pytest.mark.parametrize("net", [RegressionNet, Large])
def test_one_rank_and_two_come_to_the_same_bits(ranks, tmp_path, net, capsys):
    with one_thread():
        alone = trained(0, 1, tmp_path / "one", net)
    two = ranks.run(trained, tmp_path / "two", net)
    assert two == [alone, alone]
    assert alone[2] == (2 if net is Large else 0)
    assert ("step 2: gradients overflow in float16; it is left out" in capsys.readouterr().out) == (net is Large)


def full(rank, size, folder):
    trainer = make(folder, size)
    trainer.args.fp16 = False
    trainer.train()
    return [each.detach() for each in trainer.model.parameters()]


def low(rank, size, folder):
    trainer = make(folder, size)
    trainer.train()
    return [each.detach() for each in trainer.model.parameters()]


def test_weights_are_near_those_of_float32(ranks, tmp_path):
    for ours, expected in zip(ranks.run(low, tmp_path)[1], ranks.run(full, tmp_path)[0], strict=True):
        assert not torch.equal(ours, expected)
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=2e-3)


class Recording(Trainer):
    """Keeps its micro-batches."""

    def compute_loss(self, model, inputs, **others):
        self.batches = [*getattr(self, "batches", []), inputs]
        return super().compute_loss(model, inputs, **others)


def by_hand(batches, net):
    """Torch's own loop, with the scale of a mean loss."""
    parameters = [*split_by_decay(net)[0].values(), *split_by_decay(net)[1].values()]  # the order of a norm's sum
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    scaler, skipped = torch.amp.GradScaler("cpu"), 0
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            scheduler.step()
    return skipped, scaler.get_scale()


class Steep(RegressionNet):
    """Small gradients, and a large one at the top, which overflows at torch's first scale."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return {"loss": nn.functional.linear(outputs["loss"][None], torch.ones(1, 1)).sum() * 3.0}


@pytest.mark.parametrize("net", [RegressionNet, Steep])
def test_a_run_is_torchs_own_loop_to_the_bit(tmp_path, net):
    """The scale of a sum over 8 samples is an eighth of that of the mean, and powers of two round nothing."""
    args = TrainingArguments(
        str(tmp_path), max_steps=6, learning_rate=1e-2, fp16=True, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    with one_thread():
        trainer = Recording(net(), args, train_dataset=Regression(64))
        trainer.train()
        twin = net()
        skipped, scale = by_hand(trainer.batches, twin)
    assert trainer.state.skipped_steps == skipped == (2 if net is Steep else 0)
    assert trainer.last_run.scaler.factor * 8 == scale
    for own, expected in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_steps_that_overflow_are_left_out_and_move_neither_weights_nor_schedule(ranks, tmp_path):
    """Of 6 steps two overflow; the others have the first four rates of a line over 6."""
    for _, state, skipped, losses, rates in ranks.run(trained, tmp_path, Large):
        assert skipped == 2
        assert len(losses) == 4
        assert rates == pytest.approx([1e-2 * (1 - done / 6) for done in range(4)])
        assert state["scale"] == 2.0**11  # of a sum over 8 samples: 2**14 of the mean


def scale_of(rank, size, poisoned):
    """A scaler over one parameter, whose gradient is infinite on one rank only; after two steps."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = AgreedGradScaler(torch.device("cpu"), communicator_for(None), 8.0)
    seen = [scaler.factor]
    for step in range(2):
        parameter.grad = torch.full((3,), scaler.factor)
        if rank == poisoned and step == 1:
            parameter.grad[1] = math.inf
        overflowed = scaler.unscale_gradients(optimizer, 8.0)
        seen += [overflowed, scaler.factor, float(parameter.grad[0])]
    return seen


@pytest.mark.parametrize("poisoned", [0, 1])
def test_what_one_rank_alone_sees_all_ranks_heed(ranks, poisoned):
    assert ranks.run(scale_of, poisoned) == [[2.0**13, False, 2.0**13, 1.0, True, 2.0**12, 1.0]] * 2


def resumed(rank, size, folder, steps, resume, fp16=True):
    trainer = make(folder, size, net=Large, steps=steps, save_strategy="steps", save_steps=4)
    trainer.args.max_steps, trainer.args.fp16 = 6, fp16
    if steps == 4:
        trainer.add_callback(faults.fail(StopIteration(), rank=rank, step=5))
        with pytest.raises(StopIteration):
            trainer.train()
        return None
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


def test_a_run_goes_on_with_its_scale_also_on_fewer_ranks(ranks, tmp_path):
    whole = ranks.run(trained, tmp_path / "whole", Large)[0]
    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    ranks.run(resumed, tmp_path / "two", 4, None)
    saved = tmp_path / "two" / "checkpoint-4"
    assert torch.load(saved / "scaler.pt", weights_only=True)["scale"] == 2.0**11
    shutil.copytree(saved, tmp_path / "one" / "checkpoint-4")
    assert ranks.run(resumed, tmp_path / "two", 6, str(saved))[1] == whole
    with one_thread():
        assert resumed(0, 1, tmp_path / "one", 6, str(tmp_path / "one" / "checkpoint-4")) == whole


def test_a_checkpoint_of_another_precision_begins_with_the_first_scale(ranks, tmp_path):
    ranks.run(resumed, tmp_path, 4, None, False)
    assert not (tmp_path / "checkpoint-4" / "scaler.pt").exists()
    _, state, skipped, *_ = ranks.run(resumed, tmp_path, 6, str(tmp_path / "checkpoint-4"))[0]
    assert (state["scale"], skipped) == (2.0**11, 2)


class Spoilt(RegressionNet):
    """Never well."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return {"loss": outputs["loss"] * math.nan}


def hopeless(rank, size, folder, policy):
    trainer = make(folder, size, net=Spoilt, steps=30, policy=policy)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        return str(error), trainer.state.global_step
    return trainer.state.skipped_steps, trainer.state.global_step


def test_what_is_not_finite_at_any_scale_is_an_error_that_names_it(ranks, tmp_path):
    for words, steps in ranks.run(hopeless, tmp_path, "raise"):
        assert "Gradients of step 17 are not finite" in words
        assert "rank 0: 'net.0.weight' and 3 more" in words
        assert steps == 16
    assert ranks.run(hopeless, tmp_path, "ignore") == [(30, 30), (30, 30)]


def tagged(rank, size, folder):
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=3, fp16=True, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(Tagger(), args, train_dataset=Tokens(40), data_collator=pad)
    trainer.train()
    totals = trainer.last_run.model.totals
    return trainer.last_run.scaler.factor * 2 ** round(math.log2(float(totals.weight))), trainer.state.skipped_steps


def test_the_first_step_tells_how_many_tokens_there_are(ranks, tmp_path):
    for scale, skipped in ranks.run(tagged, tmp_path):
        assert scale in (2.0**15, 2.0**16, 2.0**17)
        assert skipped <= 1


class Unscaled(Trainer):
    """Goes backward by itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


class Scaled(Trainer):
    """Goes backward as it should."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


def own_step(rank, size, folder, kind):
    trainer = make(folder, size)
    trainer = kind(trainer.model, trainer.args, train_dataset=trainer.train_dataset)
    trainer.train()
    return told(trainer)[0]


def test_a_training_step_of_the_users_own_scales_its_loss_or_is_refused(ranks, tmp_path):
    assert ranks.run(own_step, tmp_path / "scaled", Scaled) == ranks.run(own_step, tmp_path / "own", Trainer)
    for outcome in ranks.outcomes(own_step, tmp_path / "unscaled", Unscaled):
        assert outcome.error == "RuntimeError"
        assert "expected self.accelerator.backward(loss)" in outcome.message


def told_apart(rank, size, folder):
    trainer = make(folder, size)
    trainer.args.fp16 = False
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        trainer.train()


def test_ranks_that_were_told_other_precisions_are_an_error_on_all(ranks, tmp_path):
    for outcome in ranks.outcomes(told_apart, tmp_path):
        assert outcome.error == "ArgumentsError"
        assert "precision is 'no' on rank 0 and 'fp16' on rank 1" in outcome.message


def refused(rank, size, folder):
    make(folder, size, net=lambda: RegressionNet().half()).train()


def test_a_model_in_float16_is_refused_in_words(tmp_path):
    with pytest.raises(ArgumentsError, match=r"fp16=True with a model in float16: .* found 'net.0.weight' and 3 more"):
        refused(0, 1, Path(tmp_path))
