"""The shm backend gives what gloo gives, for every collective, size and dtype; sums in an order that is the same everywhere."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allstep.comm.shm.peers import SMALL
from allstep.comm.shm.reduction import tree
from allstep.comm.shm.staged import EXCHANGED, PAIR_PIECE, SLICED_PIECE
from allstep.testing.ranks import RankPool

OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
SIZES = (0, 1, 7, SMALL // 4, SMALL // 4 + 1, PAIR_PIECE // 4 + 3, SLICED_PIECE + 5)
"""Elements: empty, odd, and around each boundary between ways to sum, for float32."""


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums and products over a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


class Groups:
    """`with Groups() as (shm, gloo)`: one of each, over the same ranks."""

    def __enter__(self) -> tuple[Any, Any]:
        self.groups = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
        assert self.groups[0].peers is not None, self.groups[0].refusal
        return self.groups

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)


# ---- sums


def all_sums(rank: int, size: int) -> list[str]:
    wrong = []
    with Groups() as (shm, gloo):
        for dtype in (*FLOATS, *WHOLE):
            for op in OPS if dtype.is_floating_point else (*OPS, *BITWISE):
                for numel in SIZES if op == dist.ReduceOp.SUM else SIZES[:5]:
                    expected = values(rank, numel, dtype)
                    dist.all_reduce(expected, op=op, group=gloo)
                    private = values(rank, numel, dtype)
                    own = shm.allocate_tensor(numel, dtype=dtype).copy_(private)
                    dist.all_reduce(private, op=op, group=shm)
                    dist.all_reduce(own, op=op, group=shm)
                    wrong += [
                        f"{where} {dtype} {op} {numel}"
                        for where, got in (("private", private), ("own", own))
                        if not torch.equal(got, expected)
                    ]
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_every_dtype_operation_and_size_are_gloos(size: int, ranks: RankPool, four_ranks: RankPool) -> None:
    for wrong in (ranks if size == 2 else four_ranks).run(all_sums, timeout=120):
        assert wrong == []


def sums_of_three(rank: int, size: int) -> list[bool]:
    ranks = [0, 1, 2]
    group = dist.new_group(ranks, backend="shm")
    if rank not in ranks:
        return []
    results = []
    for numel in SIZES[1:]:
        expected = sum(values(other, numel, torch.float32) for other in ranks)
        private = values(rank, numel, torch.float32)
        own = group.allocate_tensor(numel, dtype=torch.float32).copy_(private)
        for tensor in (private, own):
            dist.all_reduce(tensor, group=group)
            results.append(torch.equal(tensor, expected))
    dist.destroy_process_group(group)
    return results


def test_a_subgroup_of_three_sums_by_itself(four_ranks: RankPool) -> None:
    results = four_ranks.run(sums_of_three)
    assert [all(each) for each in results] == [True] * 4
    assert len(results[0]) == 12


def random_sums(rank: int, size: int) -> list[bool]:
    def source(other: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(other)).to(dtype)

    results = []
    with Groups() as (shm, _):
        for dtype in (torch.float32, torch.bfloat16):
            for numel in SIZES[1:]:
                leaves = [source(other, numel, dtype).float() for other in range(size)]
                for left, right in tree(size):
                    leaves[left] = leaves[left] + leaves[right]
                expected = leaves[0].to(dtype)
                private = source(rank, numel, dtype)
                own = shm.allocate_tensor(numel, dtype=dtype).copy_(private)
                for tensor in (private, own):
                    dist.all_reduce(tensor, group=shm)
                    results.append(torch.equal(tensor, expected))
    return results


def test_floats_are_summed_as_a_tree_by_rank_and_half_precision_is_rounded_once(four_ranks: RankPool) -> None:
    for results in four_ranks.run(random_sums):
        assert results == [True] * 24


def averages(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    with Groups() as (shm, _):
        for numel in (3, 100_000):
            for dtype in (torch.float32, torch.float16, torch.int64):
                tensor = torch.full((numel,), 40_000 if dtype is not torch.int64 else 3 + rank, dtype=dtype)
                own = shm.allocate_tensor(numel, dtype=dtype).copy_(tensor)
                for each in (tensor, own):
                    dist.all_reduce(each, op=dist.ReduceOp.AVG, group=shm)
                    results.append(each[[0, -1]].double())
    return results


def test_an_average_of_large_half_precision_numbers_does_not_overflow(ranks: RankPool) -> None:
    for results in ranks.run(averages):
        for number, got in enumerate(results):
            dtype = (torch.float32, torch.float16, torch.int64)[number // 2 % 3]
            assert got.tolist() == ([3.0, 3.0] if dtype is torch.int64 else [40_000.0, 40_000.0]), number


# ---- tensors of any kind


def strided(rank: int, size: int) -> list[bool]:
    results = []
    with Groups() as (shm, gloo):
        for numel in (12, 400_000):
            matrix = values(rank, numel, torch.float32).view(2, -1)
            transposed, expected = matrix.clone().t(), matrix.clone().t().contiguous()
            dist.all_reduce(expected, group=gloo)
            dist.all_reduce(transposed, group=shm)
            results.append(torch.equal(transposed, expected))
            every_second = matrix.clone().view(-1)[::2]
            expected = every_second.clone()
            dist.all_reduce(expected, group=gloo)
            dist.all_reduce(every_second, group=shm)
            results.append(torch.equal(every_second, expected))
        parameter = torch.nn.Parameter(torch.full((5,), float(rank + 1)))
        dist.all_reduce(parameter.data, group=shm)
        results.append(parameter.tolist() == [3.0] * 5)
        number = torch.tensor(float(rank))
        dist.all_reduce(number, group=shm)
        results.append(number.item() == 1.0)
        pair = torch.complex(torch.full((4,), float(rank)), torch.ones(4))
        dist.all_reduce(pair, group=shm)
        results.append(pair.tolist() == [1 + 2j] * 4)
    return results


def test_strided_tensors_parameters_scalars_and_complex_numbers_are_summed(ranks: RankPool) -> None:
    for results in ranks.run(strided):
        assert results == [True] * 7


def mixed(rank: int, size: int) -> list[bool]:
    results = []
    with Groups() as (shm, _):
        for numel in (5, 100_000, 1_000_000):
            for who in range(size):
                tensor = torch.empty(numel)
                if rank == who:
                    tensor = shm.allocate_tensor(numel, dtype=torch.float32)
                tensor.copy_(values(rank, numel, torch.float32))
                expected = sum(values(other, numel, torch.float32) for other in range(size))
                work = dist.all_reduce(tensor, group=shm, async_op=rank == who)  # async: also small ones go in place there
                if work is not None:
                    work.wait()
                results.append(torch.equal(tensor, expected))
        whole = shm.allocate_tensor(1000, dtype=torch.float32).fill_(rank + 1.0)
        dist.all_reduce(whole[10:20], group=shm)
        dist.all_reduce(whole.view(10, 100)[5], group=shm)
        results.append(whole.sum().item() == (1000 - 110) * (rank + 1.0) + 110 * size * (size + 1) / 2)
    return results


def test_a_tensor_in_shared_memory_meets_private_ones_of_other_ranks(ranks: RankPool, four_ranks: RankPool) -> None:
    for pool in (ranks, four_ranks):
        for results in pool.run(mixed):
            assert all(results)


# ---- the other collectives


def everything_else(rank: int, size: int) -> list[str]:
    wrong = []

    def compare(name: str, got: Any, expected: Any) -> None:
        same = all(map(torch.equal, got, expected)) if isinstance(got, list) else torch.equal(got, expected)
        if not same:
            wrong.append(name)

    with Groups() as (shm, gloo):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for numel in (0, 1, 33, EXCHANGED // 8 + 1):
                source = values(rank, numel, dtype)
                parts = [values(rank, numel, dtype, seed=1 + other) for other in range(size)]
                outcome: dict[str, list[Any]] = {}
                for group in (shm, gloo):
                    for root in range(size):
                        tensor = source.clone()
                        dist.broadcast(tensor, root, group=group)
                        outcome.setdefault(f"broadcast {root}", []).append(tensor)
                        gathered = [torch.empty_like(source) for _ in range(size)] if rank == root else None
                        dist.gather(source, gathered, root, group=group)
                        outcome.setdefault(f"gather {root}", []).append(gathered or source)
                        tensor = torch.empty_like(source)
                        dist.scatter(tensor, parts if rank == root else None, root, group=group)
                        outcome.setdefault(f"scatter {root}", []).append(tensor)
                        if dtype is not torch.bool:
                            tensor = source.clone()
                            dist.reduce(tensor, root, group=group)
                            outcome.setdefault(f"reduce {root}", []).append(tensor if rank == root else source)
                    gathered = [torch.empty_like(source) for _ in range(size)]
                    dist.all_gather(gathered, source, group=group)
                    outcome.setdefault("all_gather", []).append(gathered)
                    tensor = torch.empty(size * numel, dtype=dtype)
                    dist.all_gather_into_tensor(tensor, source, group=group)
                    outcome.setdefault("all_gather_into_tensor", []).append(tensor)
                    tensor = torch.empty(size * numel, dtype=dtype)
                    dist.all_to_all_single(tensor, torch.cat(parts), group=group)
                    outcome.setdefault("all_to_all_single", []).append(tensor)
                # gloo has no reduce_scatter of lists and no all_to_all of lists: told from what every rank brings
                if dtype is not torch.bool:
                    total = sum(values(other, numel, dtype, seed=1 + rank) for other in range(size))
                    tensor = torch.empty_like(source)
                    dist.reduce_scatter(tensor, parts, group=shm)
                    compare(f"reduce_scatter {dtype} {numel}", tensor, total)
                    tensor = torch.empty_like(source)
                    dist.reduce_scatter_tensor(tensor, torch.cat(parts), group=shm)
                    compare(f"reduce_scatter_tensor {dtype} {numel}", tensor, total)
                received = [torch.empty_like(source) for _ in range(size)]
                dist.all_to_all(received, parts, group=shm)
                compare(f"all_to_all {dtype} {numel}", received, [values(o, numel, dtype, seed=1 + rank) for o in range(size)])
                for name, (got, expected) in outcome.items():
                    compare(f"{name} {dtype} {numel}", got, expected)
    return wrong


def test_every_other_collective_is_gloos(ranks: RankPool, four_ranks: RankPool) -> None:
    for pool in (ranks, four_ranks):
        for wrong in pool.run(everything_else, timeout=120):
            assert wrong == []


def uneven_all_to_all(rank: int, size: int) -> list[bool]:
    results = []
    with Groups() as (shm, _):
        for unit in (1, 200_000):
            sent = [unit * (rank + 2 * other) for other in range(size)]
            received = [unit * (other + 2 * rank) for other in range(size)]
            output = torch.empty(sum(received), 3)
            given = torch.arange(3.0 * sum(sent)).view(-1, 3) + 1000.0 * rank
            dist.all_to_all_single(output, given, received, sent, group=shm)
            starts = [sum(unit * (other + 2 * before) for before in range(rank)) for other in range(size)]
            expected = torch.cat(
                [
                    (torch.arange(3.0 * unit * (other + 2 * rank)) + 3.0 * starts[other] + 1000.0 * other).view(-1, 3)
                    for other in range(size)
                ]
            )
            results.append(torch.equal(output, expected))
    return results


def test_all_to_all_takes_uneven_parts(ranks: RankPool) -> None:
    for results in ranks.run(uneven_all_to_all):
        assert results == [True, True]


def objects(rank: int, size: int) -> list[Any]:
    with Groups() as (shm, _):
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 << 20 if rank else 5)}, group=shm)
        told = [f"from {rank}"]
        dist.broadcast_object_list(told, src=1, group=shm)
        dist.barrier(group=shm)
        message = torch.tensor([7.0 * rank])
        if rank:
            dist.send(message, 0, group=shm)
        else:
            dist.recv(message, 1, group=shm)
        return [[each["rank"] for each in everyone], len(everyone[1]["text"]), told, message.item()]


def test_objects_and_messages_between_two_ranks_travel(ranks: RankPool) -> None:
    for result in ranks.run(objects):
        assert result == [[0, 1], 10 << 20, ["from 1"], 7.0]


# ---- started and not waited for


def started(rank: int, size: int) -> list[bool]:
    results = []
    with Groups() as (shm, _):
        for make in (torch.zeros, lambda n: shm.allocate_tensor(n, dtype=torch.float32)):
            tensors = [make(n) for n in (3, 50_000, 8, 700_000)]
            for number, tensor in enumerate(tensors):
                tensor.fill_(rank + number)
            works = [dist.all_reduce(tensor, group=shm, async_op=True) for tensor in tensors]
            everyone = [torch.empty(2) for _ in range(size)]
            gathered = dist.all_gather(everyone, torch.full((2,), float(rank)), group=shm, async_op=True)
            works[2].wait()
            results.append(works[0].is_completed())
            results.append(torch.equal(works[3].get_future().wait()[0], tensors[3]))
            number = torch.tensor([1.0])
            dist.all_reduce(number, group=shm)  # goes behind those that were started before
            gathered.wait()
            results.append([each[0].item() for each in everyone] == [float(other) for other in range(size)])
            results.append(number.item() == size)
            results += [
                tensor[[0, -1]].tolist() == [size * number + size * (size - 1) / 2] * 2 for number, tensor in enumerate(tensors)
            ]
    return results


def test_what_was_started_goes_on_in_order_whatever_is_waited_for_first(ranks: RankPool, four_ranks: RankPool) -> None:
    for pool in (ranks, four_ranks):
        for results in pool.run(started):
            assert results == [True] * 16


def in_between(rank: int, size: int) -> float:
    with Groups() as (shm, _):
        total, message = torch.ones(100_000), torch.zeros(1)
        if rank == 0:  # the sum is started before the message on one rank, after it on the other
            work = dist.all_reduce(total, group=shm, async_op=True)
            dist.send(message + 5, 1, group=shm)
        else:
            dist.recv(message, 0, group=shm)
            work = dist.all_reduce(total, group=shm, async_op=True)
        work.wait()
        return total[0].item()


def test_a_started_sum_does_not_hold_up_a_message(ranks: RankPool) -> None:
    assert ranks.run(in_between) == [2.0, 2.0]


def many_started(rank: int, size: int) -> bool:
    with Groups() as (shm, _):
        whole = shm.allocate_tensor(3000 * 16, dtype=torch.float32).fill_(1.0)
        works = [dist.all_reduce(piece, group=shm, async_op=True) for piece in whole.split(16)]
        for work in works:
            work.wait()
        return bool((whole == size).all())


def test_more_are_started_than_can_be_remembered(ranks: RankPool, four_ranks: RankPool) -> None:
    assert ranks.run(many_started) == [True, True]
    assert four_ranks.run(many_started) == [True] * 4


# ---- another program's view


def torch_ddp(rank: int, size: int) -> list[bool]:
    with Groups() as (shm, gloo):
        models = []
        for group in (shm, gloo):
            torch.manual_seed(1)
            layers = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300))
            models.append(torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.1))
        for step in range(4):
            inputs = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            for model in models:
                model.zero_grad()
                model(inputs).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
        same = [torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True)]
        del (
            model,
            models,
        )  # torch's class may not be the last to hold a gloo group: it waits for threads that want the interpreter
    return same


def test_torchs_own_class_trains_as_on_gloo(ranks: RankPool) -> None:
    for results in ranks.run(torch_ddp):
        assert results == [True] * 6


def torch_join(rank: int, size: int) -> list[list[float]]:
    weights = []
    with Groups() as (shm, gloo):
        for group in (shm, gloo):
            torch.manual_seed(1)
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Linear(4, 3), process_group=group, find_unused_parameters=True
            )
            with model.join():
                for step in range(2 + 2 * rank):  # one rank has twice as many batches
                    model.zero_grad()
                    model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= 0.01 * parameter.grad
            weights.append(torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist())
            del model, parameter
    return weights


def test_torchs_join_whose_works_only_its_own_code_holds(ranks: RankPool) -> None:
    for shm, gloo in ranks.run(torch_join):
        assert shm == gloo


def functional(rank: int, size: int) -> list[Any]:
    from torch.distributed import _functional_collectives as functional

    with Groups() as (shm, _):
        summed = functional.all_reduce(torch.full((3,), float(rank)), "sum", shm)
        gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, shm)
        scattered = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, shm)
        return [functional.wait_tensor(each).tolist() for each in (summed, gathered, scattered)]


def test_functional_collectives_go_over_it(ranks: RankPool) -> None:
    for rank, (summed, gathered, scattered) in enumerate(ranks.run(functional)):
        assert summed == [1.0] * 3
        assert gathered == [0.0, 0.0, 1.0, 1.0]
        assert scattered == [4.0 * rank, 4.0 * rank + 2.0]


def two_lines(rank: int, size: int, numel: int) -> list[float]:
    first, second = dist.new_group(backend="shm"), dist.new_group(backend="shm")
    a, b = torch.full((numel,), 1.0 + rank), torch.full((numel,), 10.0 + rank)
    works = [dist.all_reduce(a, group=first, async_op=True), dist.all_reduce(b, group=second, async_op=True)]
    for work in reversed(works) if rank else works:
        work.wait()
    for group in (first, second):
        dist.destroy_process_group(group)
    return [a[-1].item(), b[-1].item()]


@pytest.mark.parametrize("numel", [10, 2_000_000])
def test_ranks_that_wait_in_different_groups_help_each_other_on(numel: int, ranks: RankPool, four_ranks: RankPool) -> None:
    assert ranks.run(two_lines, numel, timeout=20) == [[3.0, 21.0]] * 2
    assert four_ranks.run(two_lines, numel, timeout=20) == [[10.0, 46.0]] * 4


def dropped(rank: int, size: int) -> bool:
    group = dist.new_group(backend="shm")
    for _ in range(20):
        tensor = group.allocate_tensor(100_000, dtype=torch.float32).fill_(1.0)
        dist.all_reduce(tensor, group=group, async_op=True)
        del tensor
        dist.barrier(group=group)
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return total.tolist() == [float(size)] * 3


def test_a_tensor_that_is_dropped_while_it_is_summed_is_held_until_then(ranks: RankPool, four_ranks: RankPool) -> None:
    assert ranks.run(dropped) == [True] * 2
    assert four_ranks.run(dropped) == [True] * 4
