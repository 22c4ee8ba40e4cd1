"""Sparse gradients: rows of all ranks together, and nothing for what nobody used."""

from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Tables(nn.Module):
    """Two tables and a bag, of which a forward uses those it is told to; `sparse` says what kind their gradients are."""

    def __init__(self, sparse: bool = True, dense_part: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({"a": nn.Embedding(8, 3, sparse=sparse), "b": nn.Embedding(8, 3, sparse=sparse)})
        self.bag = nn.EmbeddingBag(8, 3, mode="sum", sparse=sparse)
        self.head = nn.Linear(3, 2) if dense_part else nn.Identity()

    def forward(self, rows: torch.Tensor, used: str) -> torch.Tensor:
        found = [self.bag(rows) if name == "g" else self.tables[name](rows).sum(1) for name in used]
        return self.head(torch.stack(found).sum(0))


def rows_of(rank: int, step: int) -> torch.Tensor:
    """(2, 3); some rows on one rank only, some on all, some twice."""
    return torch.tensor([[rank, rank + 1, 5], [step % 8, 5, 7 - rank]])


def layouts(net: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.layout for name, p in net.named_parameters()}


def train(rank, size, plan, options, accumulate, dense_part):
    """A step for each entry of `plan`, which says what each rank uses."""
    net = Tables(dense_part=dense_part)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen: list[Any] = []
    for step, used in enumerate(plan):
        if accumulate:
            with model.no_sync():
                model(rows_of(rank, step + 3), used[rank]).square().mean().backward()
        model(rows_of(rank, step), used[rank]).square().mean().backward()
        seen.append((gradients_of(net), layouts(net)))
        model.zero_grad()
    return seen


def reference(plan, step, accumulate, dense_part, size):
    def run(rank: int) -> nn.Module:
        net = Tables(sparse=False, dense_part=dense_part)
        for number in (step + 3, step) if accumulate else (step,):
            net(rows_of(rank, number), plan[step][rank]).square().mean().backward()
        return net

    return mean_of_ranks(size, run)


PLANS = {
    "all": [["abg"] * 4] * 3,
    "one of them": [["a"] * 4] * 2,
    "in turn": [["a"] * 4, ["b"] * 4, ["ag"] * 4, ["a"] * 4],
    "another on each rank": [["a", "b", "g", "a"], ["b", "bg", "a", "g"]],
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["single", "window"])
@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"find_unused_parameters": None}, {"find_unused_parameters": None, "views": False}],
    ids=["walk", "none", "copies"],
)
@pytest.mark.parametrize("plan", PLANS)
def test_sparse_gradients_are_the_mean_over_the_rows_of_all_ranks(ranks, plan, options, accumulate):
    """Embeddings with sparse gradients: all used, some unused, others on each rank, and different rows on each rank.

    Over the union of rows the mean equals that of dense tables in one process; it stays sparse, and what no rank used is None.
    """
    options = {"gradient_as_bucket_view" if key == "views" else key: value for key, value in options.items()}
    check(ranks.run(train, PLANS[plan], options, accumulate, True), PLANS[plan], accumulate, True, 2)


def check(results, plan, accumulate, dense_part, size):
    for step in range(len(plan)):
        expected = reference(plan, step, accumulate, dense_part, size)
        assert_mean([result[step][0] for result in results], expected, rtol=1e-6, atol=1e-6)
        for result in results:
            for name, layout in result[step][1].items():
                kind = torch.strided if name.startswith("head") else torch.sparse_coo
                assert layout is (None if expected[name] is None else kind), name


def test_four_ranks_each_use_other_tables(four_ranks):
    """The same on four ranks, of which some use no table that another one uses."""
    plan = PLANS["another on each rank"]
    check(four_ranks.run(train, plan, {"find_unused_parameters": None}, False, True), plan, False, True, 4)


@pytest.mark.parametrize("flag", [False, None])
def test_a_model_may_consist_of_sparse_tables_alone(ranks, flag):
    """No parameter at all with a dense gradient, so that there is no gradient in any bucket."""
    plan = [["abg"] * 2] * 3
    check(ranks.run(train, plan, {"find_unused_parameters": flag}, False, False), plan, False, False, 2)


def strict(rank, size):
    model = DistributedDataParallel(Tables())
    words = []
    for used in ("ab", "abg"):
        try:
            model(rows_of(rank, 0), used).square().mean().backward()
            words.append("fine")
        except RuntimeError as error:
            words.append(str(error))
        model.zero_grad()
    return words


def test_with_the_flag_off_an_unused_table_is_named_in_the_same_step(ranks):
    """A sparse table that gets no gradient is told as any other parameter is."""
    for word, then in ranks.run(strict):
        assert "Not used in forward on rank(s) 0, 1: bag.weight." in word
        assert then == "fine"


def optimized(rank, size, sparse):
    net = Tables(sparse)
    model = DistributedDataParallel(net)
    dense = [p for name, p in net.named_parameters() if name.startswith("head")]
    tables = [p for name, p in net.named_parameters() if not name.startswith("head")]
    optimizers = [torch.optim.SGD(dense, lr=0.1), (torch.optim.SparseAdam if sparse else torch.optim.SGD)(tables, lr=0.1)]
    for step in range(3):
        model(rows_of(rank, step), "abg").square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_the_optimizer_for_sparse_gradients_takes_them(ranks):
    """SparseAdam refuses dense gradients; replicas are equal after its steps, and rows that nobody used have not moved."""
    first, second = ranks.run(optimized, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    used = torch.cat([rows_of(rank, step).flatten() for rank in range(2) for step in range(3)]).unique()
    unused = [row for row in range(8) if row not in used]
    assert unused
    for table, before in zip(first, Tables().parameters(), strict=False):
        if table.shape[0] == 8:
            assert torch.equal(table[unused], before[unused])
            assert not torch.equal(table, before)


def weighted(rank, size):
    """Rank 0 has three times the samples of rank 1, which in the second step has none at all."""
    net = Tables()
    model = DistributedDataParallel(net, find_unused_parameters=None)
    seen = []
    for step, shares in enumerate([(3.0, 1.0), (2.0, 0.0)]):
        share = shares[rank]
        if share:
            loss = model(rows_of(rank, step), "ag").square().mean() * share
            model.weigh(share)
            loss.backward()
        else:
            model.take_part(weight=0.0)
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


def test_weights_count_for_sparse_gradients_too(ranks):
    """The mean is weighted, and a rank without a batch takes part."""
    results = ranks.run(weighted)
    for step, shares in enumerate([(0.75, 0.25), (1.0, 0.0)]):
        net = Tables(sparse=False)
        for rank, share in enumerate(shares):
            (net(rows_of(rank, step), "ag").square().mean() * share).backward()
        assert_mean([result[step] for result in results], gradients_of(net), rtol=1e-6, atol=1e-6)


class Tied(nn.Module):
    """A sparse table whose weight also has a dense use."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(6, 4, sparse=sparse)

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        found = self.table(rows).sum(1)
        return found @ self.table.weight.t() if both else found


def tied(rank, size):
    net = Tied(True)
    model = DistributedDataParallel(net)
    seen = []
    for both in ((True, True), (True, False)):
        model(rows_of(rank, 0).clamp(max=5), both[rank]).square().mean().backward()
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


def test_a_table_with_a_dense_use_beside_the_sparse_one_is_averaged_whole(ranks):
    """The gradient of a tied weight is dense, on all ranks or on one of them only."""
    results = ranks.run(tied)
    for step, both in enumerate(((True, True), (True, False))):
        each = []
        for rank in range(2):
            net = Tied(False)
            net(rows_of(rank, 0).clamp(max=5), both[rank]).square().mean().backward()
            each.append(net.table.weight.grad)
        assert_mean([result[step] for result in results], {"table.weight": (each[0] + each[1]) / 2}, rtol=1e-6)


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.weight, sparse=True)


def undeclared(rank, size):
    model = DistributedDataParallel(Undeclared())
    try:
        model(torch.tensor([rank])).sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


def test_a_sparse_gradient_that_no_module_declares_is_refused_by_name(ranks):
    """A function makes the gradient of a plain parameter sparse, which nobody could know when buckets were laid out."""
    for message in ranks.run(undeclared):
        assert message is not None
        assert "The gradient of 'weight' is sparse" in message
        assert "sparse=False" in message
