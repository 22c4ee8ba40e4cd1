"""Parameters without a gradient: zeros from ranks that lack one, None where no rank has one, or one error on every rank."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.ddp import unused

BACKENDS = ("gloo", "shm")


class Experts(nn.Module):
    """A trunk, and experts of which a forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.trunk(x)
        return sum(self.experts[index](x) for index in used)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def gradients(rank, size, options, used_of_rank, as_views):
    """Of the second step: with a static graph, the first one is what later ones rely on."""
    model = DistributedDataParallel(Experts(), **options, gradient_as_bucket_view=as_views, bucket_cap_mb=1e-5)
    model(batch(rank), used_of_rank[rank]).square().mean().backward()
    model.zero_grad()
    kept = torch.full((2, 4), 7.0)
    model.module.experts[2].weight.grad = kept.clone()
    model(batch(rank), used_of_rank[rank]).square().mean().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}


def reference(used_of_rank):
    """Name -> mean over two ranks of each rank's own gradient, zeros where it has none; None where nobody has one."""
    each = []
    for rank in range(2):
        model = Experts()
        model(batch(rank), used_of_rank[rank]).square().mean().backward()
        each.append({name: p.grad for name, p in model.named_parameters()})
    means = {}
    for name, p in Experts().named_parameters():
        found = [g[name] for g in each if g[name] is not None]
        means[name] = sum(found, torch.zeros_like(p)) / 2 if found else None
    return means


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"find_unused_parameters": None}, {"static_graph": True}]
)
@pytest.mark.parametrize("used", [[[0], [1]], [[0, 1], [1]], [[0], [0]]])
def test_missing_gradients_count_as_zero_and_what_nobody_used_is_left_alone(ranks, options, used, as_views):
    results = ranks.run(gradients, options, used, as_views)
    expected = reference(used)
    for result in results:
        for name, value in result.items():
            if expected[name] is not None:
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
            elif name == "experts.2.weight":
                assert torch.equal(value, torch.full((2, 4), 7.0))
            else:
                assert value is None


def strict(rank, size):
    model = DistributedDataParallel(Experts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    message = None
    try:
        model(batch(rank), [0, 1, 2] if rank == 0 else [0, 2]).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    model(batch(rank), [0, 1, 2]).sum().backward()  # the error does not disturb the next step
    return message, unchanged, model.module.trunk.weight.grad.clone()


def test_with_the_flag_off_every_rank_learns_name_and_rank_before_the_optimizer_moves(ranks):
    results = ranks.run(strict)
    for message, unchanged, _ in results:
        assert message is not None
        assert message.startswith("UnusedParametersError")
        assert "experts.1.weight" in message
        assert "experts.1.bias" in message
        assert "experts.0" not in message
        assert "rank(s) 1" in message
        assert "find_unused_parameters" in message
        assert unchanged
    assert torch.equal(results[0][2], results[1][2])


def outputs_of_all_kinds(rank, size):
    """One output enters the loss, the other does not; both hide in a nested structure."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return {"nested": [(self.a(x), {"deep": self.b(x)})]}

    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=None)
    model(torch.ones(2, 2))["nested"][0][0].sum().backward()
    return [p.grad is None for p in model.parameters()]


def test_an_output_that_does_not_enter_the_loss_leaves_its_parameters_without_gradient(ranks):
    assert ranks.run(outputs_of_all_kinds) == [[False, False, True, True]] * 2


def rank_without_backward(rank, size):
    model = DistributedDataParallel(Experts(), find_unused_parameters=None)
    if rank == 0:
        model(batch(0), [0]).square().mean().backward()
    else:
        model.take_part()
    return model.module.trunk.weight.grad.clone()


def test_a_rank_that_runs_no_backward_takes_part_with_zeros(ranks):
    mine, other = ranks.run(rank_without_backward)
    model = Experts()
    model(batch(0), [0]).square().mean().backward()
    assert torch.equal(mine, other)
    torch.testing.assert_close(mine, model.trunk.weight.grad / 2)


def abandoned(rank, size, failing, attempts):
    """What this rank reads in each of its attempts; in the first one the ranks of `failing` break off their backward."""
    model = DistributedDataParallel(Experts(), bucket_cap_mb=1e-5)
    words = []
    for attempt in range(attempts[rank]):
        try:
            out = model(batch(rank), [0, 1, 2])
            if rank in failing and attempt == 0:
                out.register_hook(broken)
            out.sum().backward()
            words.append("fine")
        except ZeroDivisionError:
            words.append("own error")
            model.zero_grad()
        except RuntimeError as error:
            words.append(f"{type(error).__name__}: {error}")
            model.zero_grad()
    return words, model.module.trunk.weight.grad.clone()


def broken(gradient):
    raise ZeroDivisionError


def test_a_backward_that_breaks_off_on_one_rank_is_told_to_both_and_never_pairs_with_a_later_one(ranks):
    # rank 1 closes its part at its next forward
    (first, gradient), (second, other) = ranks.run(abandoned, [1], [2, 2])
    assert [word.partition(":")[0] for word in first] == ["RankFailedError", "fine"]
    assert "rank 1" in first[0]
    assert second == ["own error", "fine"]
    assert torch.equal(gradient, other)


def test_a_backward_that_breaks_off_on_all_ranks_alike_does_not_disturb_the_next(ranks):
    (first, gradient), (second, other) = ranks.run(abandoned, [0, 1], [2, 2])
    assert first == second == ["own error", "fine"]
    assert torch.equal(gradient, other)


def walks(rank, size, options):
    """How often a graph is walked in two steps that use all parameters."""
    counted, original = [], unused._nodes

    def nodes(roots):
        counted.append(1)
        return original(roots)

    unused._nodes = nodes
    try:
        model = DistributedDataParallel(Experts(), **options)
        for _ in range(2):
            model(batch(rank), [0, 1, 2]).sum().backward()
    finally:
        unused._nodes = original
    return len(counted)


def test_the_graph_is_walked_with_the_flag_on_and_never_without(ranks):
    for options in ({}, {"find_unused_parameters": None}, {"static_graph": True}):
        assert ranks.run(walks, options) == [0, 0]
    assert min(ranks.run(walks, {"find_unused_parameters": True})) >= 2
