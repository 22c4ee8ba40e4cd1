"""Four ranks that believe to be on two hosts: inside each over memory, between them over gloo."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import allstep.comm.shm.peers
from allstep import DistributedDataParallel
from allstep.comm.shm.hosts import ranks_of_hosts
from allstep.testing.ranks import RankPool


def group_on(hosts: list[str], rank: int) -> Any:
    """A shm group in which rank r believes to be on hosts[r]."""
    original = allstep.comm.shm.peers.host_key
    allstep.comm.shm.peers.host_key = lambda: hosts[rank]  # type: ignore[assignment]
    try:
        return dist.new_group(backend="shm")
    finally:
        allstep.comm.shm.peers.host_key = original


def sums(rank: int, size: int) -> list[bool]:
    group = group_on(["a", "b", "a", "b"], rank)
    assert group.peers is None
    assert group.across is not None
    assert group.across.first.size == 2
    results = []
    for numel in (0, 1, 5, 1000, 70_001, 1_500_003):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.arange(numel).remainder(7).add(rank).to(dtype)
            expected = (torch.arange(numel).remainder(7) * 4 + 6).to(dtype)
            dist.all_reduce(tensor, group=group)
            results.append(torch.equal(tensor, expected))
    strided = torch.full((20, 3), float(rank)).t()
    dist.all_reduce(strided, op=dist.ReduceOp.AVG, group=group)
    results.append(bool((strided == 1.5).all()))
    largest = torch.tensor([rank, -rank])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    results.append(largest.tolist() == [3, 0])
    many = [torch.full((30_000,), float(rank + number)) for number in range(5)]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in many]
    works[3 if rank % 2 else 0].wait()  # each host looks after another one first
    for work in works:
        work.wait()
    results += [each[-1].item() == 6.0 + 4 * number for number, each in enumerate(many)]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, rank, group=group)
    results.append(gathered == [0, 1, 2, 3])
    dist.destroy_process_group(group)
    return results


def test_sums_over_two_hosts_of_two_ranks_each(four_ranks: RankPool) -> None:
    for results in four_ranks.run(sums):
        assert all(results)


def train(rank: int, size: int) -> list[bool]:
    models = []
    group = group_on(["a", "a", "b", "b"], rank)
    for each in (group, dist.new_group(backend="gloo")):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(10, 400), nn.GELU(), nn.Linear(400, 400), nn.Linear(400, 1))
        models.append(DistributedDataParallel(layers, process_group=each, bucket_cap_mb=0.2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return [torch.allclose(a, b, atol=1e-6) for a, b in zip(*(model.parameters() for model in models), strict=True)]


def test_the_engine_trains_over_two_hosts(four_ranks: RankPool) -> None:
    for results in four_ranks.run(train):
        assert results == [True] * 6


def uneven(rank: int, size: int) -> tuple[str, float]:
    group = group_on(["a", "a", "a", "b"], rank)
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    return group.refusal, tensor[0].item()


def test_hosts_with_different_numbers_of_ranks_use_gloo(four_ranks: RankPool) -> None:
    assert four_ranks.run(uneven) == [("they are on 2 hosts, or in containers of their own", 4.0)] * 4


def test_hosts_are_told_apart_by_their_keys() -> None:
    assert ranks_of_hosts(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert ranks_of_hosts(["a"] * 3) == [[0, 1, 2]]
    assert ranks_of_hosts(["a", "b", "b"]) == []
    assert ranks_of_hosts(["a", "b"]) == []
