"""Windows of several micro-batches: reduced once, weighted as asked, the same decision of a scaler on every rank."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from allstep import DistributedDataParallel, Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Regression, RegressionNet
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

BACKENDS = ("gloo", "shm")


class Net(nn.Module):
    """With a layer that is never used, and one that is recomputed in backward, where that is asked for."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        if kind == "unused layer":
            self.third = nn.Linear(2, 2)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.kind == "recomputed" else self.first(x)
        return self.second(x.tanh())


def batch(rank: int, number: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * number + rank))


# ---- static graphs


def static(rank, size, kind, options, windows):
    net = Net(kind)
    model = DistributedDataParallel(net, static_graph=True, bucket_cap_mb=1e-5, **options)
    seen, number = [], 0
    for length in windows:
        for place in range(length):
            with model.no_sync() if place < length - 1 else nullcontext():
                model(batch(rank, number)).square().mean().backward()
            number += 1
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen, model.reductions


@pytest.mark.parametrize("windows", [[2, 2, 2], [1, 3, 3], [3, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}],
    ids=["static", "and walk", "copies"],
)
@pytest.mark.parametrize("kind", ["plain", "unused layer", "recomputed"])
def test_a_static_graph_and_windows_go_together(ranks, kind, options, windows):
    """static_graph=True, and windows that begin under no_sync, the very first one too, or that have other lengths in turn.

    With and without unused and recomputed layers, gradients are those of one process in every window, reduced once in each.
    """
    results = ranks.run(static, kind, options, windows)
    for window, length in enumerate(windows):

        def run(rank: int, first: int = sum(windows[:window]), length: int = length) -> nn.Module:
            net = Net(kind)
            for number in range(first, first + length):
                net(batch(rank, number)).square().mean().backward()
            return net

        assert_mean([seen[window] for seen, _ in results], mean_of_ranks(2, run))
    assert all(reductions == len(windows) for _, reductions in results)


# ---- what is sent, and when


def sent(rank, size, way, steps):
    """Bytes after each micro-batch of windows of three, and how often each rank was warned before its optimizer's step."""
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bytes_sent, told = [], []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for place in range(3):
                before = model.bytes_reduced
                loss = None
                with model.no_sync() if way == "both" and place < 2 else nullcontext():
                    loss = model(batch(rank, 3 * step + place)).square().mean()
                    if way == "both":
                        loss.backward()
                if way == "backward only":
                    with model.no_sync() if place < 2 else nullcontext():
                        loss.backward()
                bytes_sent.append(model.bytes_reduced - before)
        told.append([str(warning.message) for warning in caught])
        optimizer.step()
        optimizer.zero_grad()
    layout = sum(bucket.nbytes for bucket in model.bucket_layout.buckets)
    return bytes_sent, told, layout, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("way", ["both", "backward only"])
def test_what_a_step_sends_can_be_read_and_a_context_without_effect_is_said_once(ranks, way):
    """no_sync around forward and backward, or around the backward only, where it comes too late to have an effect.

    Then each micro-batch is reduced, as with torch, and each rank says so once, before its first optimizer step. The bytes
    reduced are counted: those of all buckets once a window, or once a micro-batch. The weights are the same in both ways.
    """
    results = ranks.run(sent, way, 2)
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        for place in range(3):
            sum(alone(batch(rank, 3 * step + place)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for bytes_sent, told, layout, weights in results:
        assert bytes_sent == ([0, 0, layout] if way == "both" else [layout] * 3) * 2
        assert [len(words) for words in told] == ([0, 0] if way == "both" else [1, 0])
        assert all("under no_sync" in word and "forward" in word for words in told for word in words)
        for mine, expected in zip(weights, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-6, atol=1e-6)


# ---- unequal batches


def unequal(rank, size, wrapper):
    net = Net()
    model = wrapper(net)
    rows = (6, 2)[rank]
    model(batch(rank, 0, rows)).square().mean().backward()
    return gradients_of(net)


def test_by_default_ranks_count_alike_whatever_their_batches_as_with_torch(ranks):
    """Six samples on one rank, two on the other, and no weights: the engine averages over ranks, as torch's class does."""
    ours = ranks.run(unequal, DistributedDataParallel)
    theirs = ranks.run(unequal, nn.parallel.DistributedDataParallel)
    for own, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in own)


# ---- loss scaling


def losses_of(model, rank, step, bad, accumulate):
    """The micro-batches of a window; where this rank is `bad`, the first one's loss is infinite."""
    for place in range(2 if accumulate else 1):
        last = place == (1 if accumulate else 0)
        with nullcontext() if last or isinstance(model, Net) else model.no_sync():
            loss = model(batch(rank, 2 * step + place)).square().mean()
            yield loss * torch.inf if bad and place == 0 else loss


def take_scaled_step(net, optimizer, scaler, schedule, clip):
    """As people write it; what was found, the scale then, and whether the schedule has moved."""
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < before
    if not skipped:
        schedule.step()
    optimizer.zero_grad()
    return skipped, scaler.get_scale(), schedule.last_epoch


def scaled_parts(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return optimizer, scaler, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


# step -> ranks whose loss is infinite in it
BAD = {1: [1], 4: [0, 1], 6: [0]}


def scaled(rank, size, options, clip, accumulate):
    net = Net()
    model = DistributedDataParallel(net, **options)
    optimizer, scaler, schedule = scaled_parts(net)
    seen = []
    for step in range(8):
        for loss in losses_of(model, rank, step, rank in BAD.get(step, ()), accumulate):
            scaler.scale(loss).backward()
        seen.append(take_scaled_step(net, optimizer, scaler, schedule, clip))
    return seen, [p.detach().clone() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("accumulate", [False, True], ids=["single", "window"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": None}], ids=str)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks, options, clip, accumulate):
    """GradScaler, and a loss that is infinite on one rank, on the other, or on both, in the last or an earlier micro-batch.

    In each step all ranks find the same, have the same scale, and step or skip together, the schedule too; weights are those
    of one process.
    """
    results = ranks.run(scaled, options, clip, accumulate)
    alone = Net()
    optimizer, scaler, schedule = scaled_parts(alone)
    expected = []
    for step in range(8):
        for rank in range(2):
            for loss in losses_of(alone, rank, step, rank in BAD.get(step, ()), accumulate):
                scaler.scale(loss / 2).backward()
        expected.append(take_scaled_step(alone, optimizer, scaler, schedule, clip))
    assert [skipped for skipped, *_ in expected] == [step in BAD for step in range(8)]
    for seen, weights in results:
        assert seen == expected
        for mine, other in zip(weights, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def scaled_unevenly(rank, size):
    """Rank 1 has two batches more; then rank 0 takes part without one. The loss of rank 1 is infinite when it is alone."""
    net = Net()
    model = DistributedDataParallel(net)
    optimizer, scaler, schedule = scaled_parts(net)
    seen = []
    for step in range(5):
        if rank == 1 or step < 3:
            for loss in losses_of(model, rank, step, step == 3, False):
                scaler.scale(loss).backward()
        else:
            model.take_part()
        seen.append(take_scaled_step(net, optimizer, scaler, schedule, True))
    return seen, [p.detach().clone() for p in net.parameters()]


def test_a_rank_without_a_batch_skips_with_the_others(ranks):
    """Uneven numbers of batches, and an infinite loss where only one rank has any left: all skip, at the same scale."""
    (seen, weights), (there, others) = ranks.run(scaled_unevenly)
    assert seen == there
    assert [skipped for skipped, *_ in seen] == [False, False, False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


class Routed(nn.Module):
    """The second layer is used on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.shared(x)
        return self.own(x) if both else x


def scaled_in_a_part(rank, size):
    net = Routed()
    model = DistributedDataParallel(net, find_unused_parameters=None)
    optimizer, scaler, schedule = scaled_parts(net)
    seen = []
    for step in range(3):
        out = model(batch(rank, step), rank == 1)
        if rank == 1 and step == 1:
            net.own.weight.register_hook(infinite)
        scaler.scale(out.square().mean()).backward()
        seen.append(take_scaled_step(net, optimizer, scaler, schedule, False))
        net.own.weight._backward_hooks = None
    return seen


def infinite(gradient):
    return gradient * torch.inf


def test_an_infinite_gradient_that_only_one_rank_has_at_all_is_found_on_all(ranks):
    """The other rank did not use that layer, so the infinity comes to it by the reduction alone."""
    seen, there = ranks.run(scaled_in_a_part)
    assert seen == there
    assert [skipped for skipped, *_ in seen] == [False, True, False]


# ---- the trainer's windows


def make_trainer(folder, callbacks=(), dropout=0.0, samples=48, **arguments):
    settings = {"learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0, "report_to": "none"}
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    data: dict[str, Any] = {"train_dataset": Regression(samples), "eval_dataset": Regression(6, index_from=100)}
    return Trainer(RegressionNet(dropout), args, callbacks=list(callbacks), **data)


class Reductions(TrainerCallback):
    """Counts what the engine has reduced when the optimizer steps."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.counts.append(self.trainer.last_run.model.reductions)


def trainer_windows(rank, size, folder, accumulation, samples, batch_size):
    counter = Reductions()
    counter.trainer = trainer = make_trainer(
        folder,
        [counter],
        samples=samples,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
    )
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()], counter.counts


@pytest.mark.parametrize("samples", [48, 41])
@pytest.mark.parametrize("accumulation", [2, 3, 4])
def test_the_trainer_reduces_the_last_micro_batch_of_each_window_and_all_before_it(ranks, tmp_path, accumulation, samples):
    """Accumulation over 2, 3 and 4 micro-batches, with and without a last window that is not full.

    Weights are those of one process that sees each global batch at once, equal on both ranks; one reduction a step.
    """
    results = ranks.run(trainer_windows, tmp_path / "two", accumulation, samples, 2)
    alone, _ = trainer_windows(0, 1, tmp_path / "one", 1, samples, 4 * accumulation)
    for weights, counts in results:
        assert counts == list(range(1, len(counts) + 1))
        assert len(counts) == 2 * -(-samples // (4 * accumulation))
        for mine, other, expected in zip(weights, results[0][0], alone, strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=2e-6)


class Interrupts(TrainerCallback):
    """In the middle of windows: iterates loaders of its own to their ends, and evaluates."""

    def __init__(self, how: str) -> None:
        self.how, self.trainer, self.times = how, None, 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.times += 1
        if self.how == "evaluates":
            self.trainer.evaluate()
        for _ in range(2):
            for rows in DataLoader(Regression(5), batch_size=2):
                assert len(rows["x"])


def interrupted(rank, size, folder, how, samples):
    callback = Interrupts(how)
    callback.trainer = trainer = make_trainer(
        folder,
        [callback] if how else [],
        dropout=0.3,
        samples=samples,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
    )
    trainer.train()
    return digest(trainer.model.named_parameters()), trainer.state.global_step, callback.times


# An evaluation needs all ranks, and in a last window that is not full they have unequal numbers of micro-batches.
@pytest.mark.parametrize(("how", "samples"), [("iterates", 22), ("iterates", 24), ("evaluates", 24)])
def test_other_loaders_and_evaluations_within_a_window_change_nothing(ranks, tmp_path, how, samples):
    """While a window is accumulated, the last one of an epoch too, other loaders come to their end, or an evaluation runs.

    Windows have the lengths that the training data give: the same steps, and weights that are bit for bit the same.
    """
    plain = ranks.run(interrupted, tmp_path / "plain", "", samples)
    disturbed = ranks.run(interrupted, tmp_path / how, how, samples)
    assert [found[:2] for found in plain] == [found[:2] for found in disturbed]
    assert plain[0][0] == plain[1][0]
    assert all(times > 2 for *_, times in disturbed)
