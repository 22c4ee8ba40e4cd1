"""Buffers and batch statistics: several forwards, worlds of one, time loops, and which statistics an evaluation sees."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel, SyncBatchNorm, Trainer, TrainerCallback, TrainingArguments
from allstep.checkpoint.weights import read_weights, restore_weights
from allstep.testing.models import Regression
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Buffered(nn.Module):
    """Batch normalisation, a mask and a running scale that are multiplied into the output, and a count."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([1.0, 0.5]))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.found: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append({name: buffer.clone() for name, buffer in self.named_buffers()})
        self.count += 1
        out = self.second(self.norm(self.first(x)).tanh()) * self.mask * self.scale
        self.scale = self.scale * 1.0  # by another tensor, as graphs may hold the one before
        return out


def batch(rank: int, number: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def loss(model, rank, number):
    return model(batch(rank, number)).square().mean()


def two_then_one(model, rank, step):
    (loss(model, rank, step) + loss(model, rank, step + 20)).backward()


def three_then_one(model, rank, step):
    sum(loss(model, rank, step + 20 * number) for number in range(3)).backward()


def two_then_two(model, rank, step):
    losses = [loss(model, rank, step), loss(model, rank, step + 20)]
    for each in losses:
        each.backward()


def kept_for_later(model, rank, step):
    """The graph of the first forward is used again after the second forward, between which there was a reduction."""
    first = loss(model, rank, step)
    first.backward(retain_graph=True)
    (first + loss(model, rank, step + 20)).backward()


def window(model, rank, step):
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            two_then_one(model, rank, step + 40)
    else:
        two_then_one(model, rank, step + 40)
    two_then_one(model, rank, step)


PATTERNS = {f.__name__: f for f in (two_then_one, three_then_one, two_then_two, kept_for_later, window)}


def several_forwards(rank, size, pattern, flag, sync_batch_norm):
    net = Buffered(rank)
    if sync_batch_norm:
        net = SyncBatchNorm.convert_sync_batchnorm(net)
    model = DistributedDataParallel(net, broadcast_buffers=flag)
    seen = []
    for step in range(3):
        PATTERNS[pattern](model, rank, step)
        seen.append(gradients_of(net))
        model.zero_grad()
    net.found.clear()
    model(batch(rank, 90)).mean().backward()
    return seen, net.found[0]


@pytest.mark.parametrize("flag", [True, False], ids=["sent", "not sent"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore:DistributedDataParallel.broadcast_buffers")
def test_several_forwards_may_share_a_backward_with_buffers_in_their_graphs(ranks, pattern, flag):
    """Batch normalisation, and buffers that are multiplied into the output; two or more forwards before a backward.

    No buffer is written that a graph still needs: gradients are those of one process. The next forward finds rank 0's
    statistics on every rank, where they are sent.
    """

    def run(rank: int, step: int) -> nn.Module:
        net = Buffered()
        PATTERNS[pattern](net, rank, step)
        return net

    results = ranks.run(quietly, several_forwards, pattern, flag, False)
    for step in range(3):
        expected = mean_of_ranks(2, lambda rank, step=step: run(rank, step))
        assert_mean([seen[step] for seen, _ in results], expected, rtol=1e-4)
    (_, first), (_, second) = results
    equal = all(torch.equal(first[name], second[name]) for name in first)
    assert equal == flag
    assert torch.equal(first["count"], second["count"])


def quietly(rank, size, function, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the older name of an argument
        return function(rank, size, *arguments)


# ---- batch normalisation over ranks


class Recurrent(nn.Module):
    """One normalisation layer that a time loop runs through several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.norm, self.head = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(4):
            state = self.norm(self.cell(torch.cat([x, state], 1))).tanh()
        return self.head(state)


def whole(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def recurrent(rank, size, counts, forwards):
    net = SyncBatchNorm.convert_sync_batchnorm(Recurrent())
    model = DistributedDataParallel(net)
    seen = []
    for step in range(2):
        total = 0.0
        for number in range(forwards):
            part = whole(2 * step + number).split(counts)[rank] if size > 1 else whole(2 * step + number)
            total = total + model(part).square().sum()
        model.weigh(counts[rank] if size > 1 else 8)
        total.backward()
        seen.append(gradients_of(net))
        model.zero_grad()
    model.eval()
    return seen, {name: b.clone() for name, b in net.named_buffers()}, model(whole(9)).detach()


@pytest.mark.parametrize("forwards", [1, 2], ids=["one forward", "two forwards"])
@pytest.mark.parametrize("counts", [[4, 4], [6, 2], [7, 1]], ids=str)
def test_statistics_over_ranks_in_a_time_loop_are_those_of_the_whole_batch(ranks, counts, forwards):
    """SyncBatchNorm that runs several times in a forward, before one backward; equal and unequal batches; then in eval mode.

    No error about tensors changed in place: gradients, running statistics and outputs are those of BatchNorm in one process.
    """
    net = Recurrent()
    expected = []
    for step in range(2):
        sum(net(whole(2 * step + number)).square().sum() / 8 for number in range(forwards)).backward()
        expected.append(gradients_of(net))
        net.zero_grad()
    net.eval()
    results = ranks.run(recurrent, counts, forwards)
    for step in range(2):
        assert_mean([seen[step] for seen, *_ in results], expected[step], rtol=1e-4, atol=1e-5)
    for _, buffers, evaluated in results:
        for name, buffer in net.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(evaluated, net(whole(9)).detach(), rtol=1e-4, atol=1e-5)


def test_in_a_world_of_one_statistics_over_ranks_are_plain_ones():
    """The same model alone, wrapped: several forwards before a backward, a time loop, eval mode. It is plain BatchNorm."""
    seen, buffers, evaluated = recurrent(0, 1, [8], 2)
    net = Recurrent()
    for step in range(2):
        sum(net(whole(2 * step + number)).square().sum() for number in range(2)).backward()
        for name, gradient in gradients_of(net).items():
            torch.testing.assert_close(seen[step][name], gradient / 8, rtol=1e-5, atol=1e-6)
        net.zero_grad()
    net.eval()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in net.named_buffers())
    torch.testing.assert_close(evaluated, net(whole(9)).detach(), rtol=1e-5, atol=1e-6)


# ---- which statistics an evaluation sees


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        out = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out} if labels is not None else {"logits": out}


class Statistics(TrainerCallback):
    """Keeps the running mean as this rank has it when an evaluation has just run, and when a checkpoint was just saved."""

    def __init__(self) -> None:
        self.evaluated: list[torch.Tensor] = []
        self.saved: list[torch.Tensor] = []

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluated.append(model.net[1].running_mean.clone())

    def on_save(self, args, state, control, model=None, **kwargs):
        self.saved.append(model.net[1].running_mean.clone())


def evaluates(rank, size, folder, flag):
    keeper = Statistics()
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        ddp_broadcast_buffers=flag,
        disable_tqdm=True,
        report_to="none",
    )
    data: dict[str, Any] = {"train_dataset": Regression(64), "eval_dataset": Regression(11, index_from=100)}
    trainer = Trainer(Normalised(), args, callbacks=[keeper], **data)
    trainer.train()
    last = trainer.predict(Regression(11, index_from=100))
    bare = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return keeper.evaluated, keeper.saved, bare, last.predictions, last.metrics["test_loss"]


@pytest.mark.parametrize("flag", [True, False])
def test_evaluations_and_checkpoints_have_rank_zeros_statistics_on_every_rank(ranks, tmp_path, flag):
    """Each rank gathers batch statistics of its own while it trains, whether buffers are sent or not.

    When an evaluation runs or a checkpoint is saved, all ranks have those of rank 0, which are the ones that are saved: what
    was evaluated, on however many ranks, is what is read back.
    """
    first, second = ranks.run(evaluates, tmp_path, flag)
    for mine, other in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(mine, other)
    folder = tmp_path / "checkpoint-4"
    saved = read_weights(folder)
    assert torch.equal(saved["net.1.running_mean"], first[1][-1])
    net = Normalised()
    restore_weights(net, saved, folder)
    net.eval()
    rows = [Regression(11, index_from=100)[index] for index in range(11)]
    x, labels = torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])
    with torch.no_grad():
        alone = net(x, labels)
    for result in (first, second):
        torch.testing.assert_close(torch.as_tensor(result[3]), alone["logits"], rtol=1e-5, atol=1e-6)
        assert result[4] == pytest.approx(float(alone["loss"]), rel=1e-5)


class Replaced(nn.Module):
    """A buffer that each forward replaces, and multiplies into the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        self.scale = self.scale + x.mean()
        return self.layer(x) * self.scale


def overlapping(rank, size):
    """The graph of one forward is used after the buffers of the next reduction have been sent."""
    model = DistributedDataParallel(Replaced())
    model(batch(rank, 0)).sum().backward()
    kept = model(batch(rank, 1)).sum()
    kept.backward(retain_graph=True)
    model(batch(rank, 2)).sum().backward()
    words = []
    for loss in (lambda: kept, lambda: model(batch(rank, 3)).sum()):
        try:
            loss().backward()
            words.append("fine")
        except RuntimeError as error:
            words.append(str(error))
    return words


def test_a_buffer_that_a_graph_still_reads_is_not_overwritten_in_silence(ranks):
    """Rank 1's own values, which its graph holds, were replaced by rank 0's: both ranks read of it, in that backward."""
    first, second = ranks.run(overlapping)
    assert "rank 1: its last backward did not come to its end" in first[0]
    assert "modified by an inplace operation" in second[0]
    assert first[1] == second[1] == "fine"
