"""Buffers: rank 0's at wrap, and again at the start of each window where asked for; never a mismatch of collectives."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


class Buffered(nn.Module):
    """A net with batch normalisation, and buffers of every kind; `seen` keeps them as each forward found them."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.net[1].running_mean += rank
        for name, value in {
            "count": torch.tensor([rank, 7]),
            "flag": torch.tensor([rank == 0, True]),
            "scalar": torch.tensor(float(rank)),
            "doubles": torch.full((2, 2), float(rank), dtype=torch.float64),
            "halves": torch.full((3,), float(rank), dtype=torch.bfloat16),
            "empty": torch.zeros(0, 2),
            "turned": torch.full((2, 3), float(rank)).t(),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("unsaved", torch.tensor([float(rank)]), persistent=False)
        self.seen: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(values(self))
        self.scalar = self.scalar + 1  # replaces the buffer, as some models do
        return self.net(x) * (1 + 0 * self.turned.sum())


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def wrapped(rank, size, flag):
    model = DistributedDataParallel(Buffered(rank), forward_sync_buffers=flag)
    return values(model.module)


@pytest.mark.parametrize("flag", [True, False])
def test_after_wrapping_every_rank_has_rank_zeros_buffers_of_every_kind(ranks, flag):
    for found in ranks.run(wrapped, flag):
        assert same(found, values(Buffered(0)))


def steps(rank, size, flag, windows):
    """`windows` windows of two micro-batches; buffers as every forward found them, and at the end."""
    model = DistributedDataParallel(Buffered(rank), forward_sync_buffers=flag)
    for window in range(windows):
        with model.no_sync():
            model(batch(rank, 2 * window)).square().mean().backward()
        model(batch(rank, 2 * window + 1)).square().mean().backward()
        model.zero_grad()
    return model.module.seen, values(model.module)


def test_with_the_flag_every_window_begins_with_rank_zeros_buffers(ranks):
    (first, _), (second, end) = ranks.run(steps, True, 3)
    assert [same(a, b) for a, b in zip(first, second, strict=True)] == [True, False] * 3
    assert not same(first[-1], end)


def test_without_the_flag_every_rank_keeps_its_own(ranks):
    results = ranks.run(steps, False, 3)
    alone = Buffered(0)
    for step in range(6):
        alone(batch(1, step))
    for found, expected in zip(results[1][0], alone.seen, strict=True):
        torch.testing.assert_close(found, expected)
    assert not same(results[0][0][-1], results[1][0][-1])


def evaluates_alone(rank, size):
    """Rank 0 runs forwards without gradients that the other does not run."""
    model = DistributedDataParallel(Buffered(rank))
    model(batch(rank, 0)).mean().backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(batch(0, 1))
        model.train()
    model(batch(rank, 2)).mean().backward()
    return model.module.net[0].weight.grad.clone()


def test_a_forward_without_gradients_needs_no_other_rank(ranks):
    one, two = ranks.run(evaluates_alone)
    assert torch.equal(one, two)


def unequal_windows(rank, size):
    """In the second window rank 1 has no micro-batch, in the third rank 0 has one more than rank 1."""
    model = DistributedDataParallel(Buffered(rank))
    for counts in [(1, 1), (1, 0), (2, 1), (1, 1)]:
        model.zero_grad()
        for number in range(counts[rank]):
            if number < counts[rank] - 1:
                with model.no_sync():
                    model(batch(rank, number)).mean().backward()
            else:
                model(batch(rank, number)).mean().backward()
        if not counts[rank]:
            model.take_part()
    return [p.grad.clone() for p in model.parameters()], model.module.seen[-1]


def test_ranks_with_unequal_windows_send_buffers_the_same_number_of_times(ranks):
    (gradients, seen), (others, seen_there) = ranks.run(unequal_windows)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert same(seen, seen_there)


def fails_between(rank, size, where, failing):
    """Ranks of `failing` break off after their first forward, in the loss or in the backward; then all go on."""
    model = DistributedDataParallel(Buffered(rank))
    words = []
    for attempt in range(4):
        try:
            out = model(batch(rank, attempt))
            if attempt == 0 and rank in failing:
                if where == "loss":
                    raise ZeroDivisionError
                out.register_hook(broken)
            out.mean().backward()
            words.append("fine")
        except ZeroDivisionError:
            words.append("own error")
            try:
                model.abandon("a bad batch")
            except RuntimeError as error:
                words.append(type(error).__name__)
        except RuntimeError as error:
            words.append(f"{type(error).__name__}: {error}")
        model.zero_grad(set_to_none=False) if attempt < 3 else None
    return words, model.module.net[0].weight.grad.clone(), model.module.seen[-1]


def broken(gradient):
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_rank_that_fails_after_its_forward_does_not_send_buffers_a_second_time(ranks, where):
    (told, gradient, seen), (own, other, seen_there) = ranks.run(fails_between, where, [1], timeout=30)
    assert told[0].startswith("RankFailedError")
    assert "a bad batch" in told[0]
    assert told[1:] == ["fine"] * 3
    assert own == ["own error", "RankFailedError", "fine", "fine", "fine"]
    assert torch.equal(gradient, other)
    assert same(seen, seen_there)


def goes_on_without_a_word(rank, size):
    """Rank 1's backward breaks off; it tells nobody and runs its next forward, while rank 0 waits in the reduction."""
    model = DistributedDataParallel(Buffered(rank))
    words = []
    for attempt in range(2):
        try:
            out = model(batch(rank, attempt))
            if attempt == 0 and rank == 1:
                out.register_hook(broken)
            out.mean().backward()
            words.append("fine")
        except ZeroDivisionError:
            words.append("own error")
        except RuntimeError as error:
            words.append(type(error).__name__)
        model.zero_grad(set_to_none=False)
    return words


def test_a_forward_after_a_broken_backward_meets_the_others_where_they_wait(ranks):
    assert ranks.run(goes_on_without_a_word, timeout=30) == [
        ["RankFailedError", "fine"],
        ["own error", "fine"],
    ]


def two_forwards(rank, size):
    model = DistributedDataParallel(Buffered(rank))
    (model(batch(rank, 0)).mean() + model(batch(rank, 1)).square().mean()).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_two_forwards_and_one_backward_work_with_buffers(ranks):
    first, second = ranks.run(two_forwards)
    expected = []
    for rank in range(2):
        model = Buffered(0)
        (model(batch(rank, 0)).mean() + model(batch(rank, 1)).square().mean()).backward()
        expected.append([p.grad for p in model.parameters()])
    for one, two, *each in zip(first, second, *expected, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, sum(each) / 2, rtol=1e-6, atol=1e-6)
