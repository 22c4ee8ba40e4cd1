"""Groups of every make: torch's own over parts of the ranks and over other stores, and groups put together by hand.

torch's registry knows nothing of a group made by hand; a wrapper trains over it all the same, also where no default group
exists.
"""

import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from allstep import DistributedDataParallel
from allstep.comm.agreement import all_ranks_agree
from allstep.comm.communicator import GroupCommunicator, communicator_for
from allstep.comm.missing import missing_ranks
from allstep.errors import CollectiveError, ReplicaError

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=30)


def by_hand(store, rank, size, timeout=TIMEOUT, with_default=True):
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    if with_default:
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def over_file(rank, size, file, **arguments):
    return by_hand(dist.FileStore(str(file), size), rank, size, **arguments)


def over_prefix(rank, size, file):
    return by_hand(dist.PrefixStore("inner", dist.PrefixStore("outer", dist.FileStore(str(file), size))), rank, size)


def over_file_without_default_backend(rank, size, file):
    return over_file(rank, size, file, with_default=False)


def of_torch_with_own_timeout(rank, size, file):
    return dist.new_group(list(range(size)), timeout=TIMEOUT)


MAKERS = {
    "file": over_file,
    "prefix": over_prefix,
    "no default backend": over_file_without_default_backend,
    "new_group": of_torch_with_own_timeout,
}


class Branching(nn.Module):
    """A batch norm, a shared layer, and one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.shared = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.shared(self.norm(x)).tanh())


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def build(seed: int) -> Branching:
    torch.manual_seed(seed)
    return Branching()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def mean_of_alone(size: int, numbers: list[int], branch_of) -> dict[str, torch.Tensor]:
    """The mean over ranks of what each one computes alone, from rank 0's weights."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(size):
        model = build(0)
        for number in numbers:
            model(batch(rank, number), branch_of(rank)).square().mean().backward()
        for name, gradient in gradients(model).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient / size
    return total


def train(rank, size, maker, file):
    """Weights differ before wrapping; ranks use different branches; two micro-batches a reduction."""
    group = MAKERS[maker](rank, size, file)
    model = DistributedDataParallel(build(rank), process_group=group, find_unused_parameters=True)
    with model.no_sync():
        model(batch(rank, 0), rank % 2).square().mean().backward()
    model(batch(rank, 1), rank % 2).square().mean().backward()
    found = gradients(model.module)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    everyone = communicator_for(group).all_gather_object({n: p.detach() for n, p in model.module.named_parameters()})
    same = all(torch.equal(everyone[0][name], each[name]) for each in everyone for name in everyone[0])
    if maker == "new_group":
        dist.destroy_process_group(group)
    return found, same, model._communicator.backend


@pytest.mark.parametrize("maker", MAKERS)
def test_a_wrapper_over_any_group_trains_on_the_mean(ranks, tmp_path, maker):
    expected = mean_of_alone(2, [0, 1], lambda rank: rank % 2)
    for found, same, backend in ranks.run(train, maker, tmp_path / "store"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert same
        assert backend == "gloo"


def buffers_and_checks(rank, size, file):
    group = over_file(rank, size, file)
    model = DistributedDataParallel(build(rank), process_group=group)
    seen = [model.module.norm.running_mean.clone()]
    model.module.norm.running_mean.fill_(rank + 1.0)
    (model(batch(rank, 0), 0) + model.module.branches[1](batch(rank, 1))).sum().backward()
    seen.append(model.module.norm.running_mean - batch(rank, 0).mean(0) * 0.1)  # 0.9 * rank 0's
    model.module.norm.running_mean.zero_()
    model.module.norm.running_var.fill_(1.0)
    model.check_consistency(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.module.shared.weight.add_(rank)
    with pytest.raises(ReplicaError, match=r"shared\.weight on rank\(s\) 1 is not as on rank 0"):
        model.check_consistency()
    with pytest.raises(ReplicaError, match="The ranks hold different models"):
        DistributedDataParallel(nn.Linear(2, 2 + rank), process_group=group)
    return [each.tolist() for each in seen], all_ranks_agree(rank == 0, group), all_ranks_agree(True, group)


def test_buffers_checks_and_votes_go_over_a_group_made_by_hand(ranks, tmp_path):
    for (at_wrap, after), one, all_of_them in ranks.run(buffers_and_checks, tmp_path / "store"):
        assert at_wrap == [0.0] * 4
        assert after == pytest.approx([0.9] * 4)
        assert (one, all_of_them) == (False, True)


def hooked(rank, size, name, file):
    group = over_file(rank, size, file)
    state, hook = {
        "allreduce": (group, default_hooks.allreduce_hook),
        "bf16": (group, default_hooks.bf16_compress_hook),
        "power_sgd": (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5),
            powerSGD_hook.powerSGD_hook,
        ),
    }[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model.register_comm_hook(state, hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
    return model.module.weight.grad, model.module.bias.grad


@pytest.mark.parametrize("name", ["allreduce", "bf16", "power_sgd"])
def test_hooks_of_torch_average_over_a_group_made_by_hand(ranks, tmp_path, name):
    for weight, bias in ranks.run(hooked, name, tmp_path / "store"):
        torch.testing.assert_close(weight, torch.full((4, 4), 3.0), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(bias, torch.full((4,), 2.0), rtol=1e-2, atol=1e-2)


# The communicator.


def every_collective(rank, size, file):
    communicator = GroupCommunicator(over_file(rank, size, file))
    x, z = torch.full((3,), rank + 1.0), torch.full((2,), complex(rank, 1))
    communicator.all_reduce(x).wait()
    communicator.all_reduce(z).wait()
    sent = [torch.full((2, 2), float(rank)), torch.tensor(rank)]
    communicator.broadcast(sent, source=size - 1)
    communicator.barrier()
    objects = communicator.all_gather_object(["long"] * 1000 * rank)
    with pytest.raises(TypeError, match=f"Rank {rank} cannot send a function"):
        communicator.all_gather_object(lambda: None)
    return {
        "who": (communicator.rank, communicator.size, communicator.backend),
        "sum": x.tolist(),
        "complex": z.tolist(),
        "sent": [tensor.tolist() for tensor in sent],
        "lengths": [len(each) for each in objects],
        "from 0": communicator.broadcast_object(f"rank {rank}"),
    }


def expected_of(rank, size):
    last, ranks = size - 1, range(size)
    return {
        "who": (rank, size, "gloo"),
        "sum": [float(sum(r + 1 for r in ranks))] * 3,
        "complex": [complex(sum(ranks), size)] * 2,
        "sent": [[[last, last], [last, last]], last],
        "lengths": [1000 * r for r in ranks],
        "from 0": "rank 0",
    }


def test_a_group_made_by_hand_carries_every_collective(ranks, tmp_path):
    assert ranks.run(every_collective, tmp_path / "store") == [expected_of(rank, 2) for rank in range(2)]


def among_three(rank, size, file):
    if rank == 1:
        return None
    return every_collective([0, None, 1, 2][rank], 3, file)


@pytest.mark.long
def test_some_of_the_ranks_may_put_a_group_together(four_ranks, tmp_path):
    zero, none, one, two = four_ranks.run(among_three, tmp_path / "store")
    assert none is None
    assert [zero, one, two] == [expected_of(rank, 3) for rank in range(3)]


def wrapped_over_parts(rank, size):
    """Three of four ranks, and a pair; the pair has another timeout."""
    three = dist.new_group([0, 2, 3])
    pair = dist.new_group([3, 1], timeout=timedelta(seconds=45))
    gradient = {}
    for name, group, members in (("three", three, [0, 2, 3]), ("pair", pair, [1, 3])):
        if rank in members:
            torch.manual_seed(rank)
            model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
            model(torch.full((1, 2), float(rank))).sum().backward()
            gradient[name] = model.module.weight.grad.tolist()
        else:
            with pytest.raises(ValueError, match="Invalid process group specified: this rank is not one of"):
                DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    communicator_for(None).barrier()
    for group in (three, pair):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return gradient


def test_groups_of_some_ranks_average_over_those(four_ranks):
    three, pair = [[pytest.approx(5 / 3)] * 2], [[2.0, 2.0]]
    found = four_ranks.run(wrapped_over_parts)
    assert found == [{"three": three}, {"pair": pair}, {"three": three}, {"three": three, "pair": pair}]


@contextmanager
def in_threads(size):
    """A HashStore joins the threads of one process."""
    store, outcomes = dist.HashStore(), [None] * size
    threads = []

    def run(body):
        def one(rank):
            outcomes[rank] = body(by_hand(store, rank, size), rank)

        threads.extend(threading.Thread(target=one, args=(rank,)) for rank in range(size))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    yield run
    assert not any(thread.is_alive() for thread in threads)


def test_threads_of_one_process_join_over_a_hash_store(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def body(group, rank):
        base = GroupCommunicator(group)
        x, y = torch.full((2,), float(rank)), torch.ones(1)
        base.all_reduce(x).wait()
        channel = base.channel()
        channel.all_reduce(y).wait()
        return x.tolist(), y.tolist(), base.all_gather_object(rank), channel is not base

    with in_threads(3) as run:
        assert run(body) == [([3.0, 3.0], [3.0], [0, 1, 2], True)] * 3


# Errors.


def one_leaves(rank, size, file):
    group = over_file(rank, size, file, timeout=timedelta(seconds=1.5))
    base = GroupCommunicator(group)
    base.barrier()
    said = []
    if rank == 0:
        for collective in (lambda: base.all_reduce(torch.ones(4)).wait(), lambda: base.all_gather_object("x")):
            with pytest.raises(CollectiveError) as caught:
                collective()
            said.append(str(caught.value))
        said.append(missing_ranks(group))
    communicator_for(None).barrier()
    return said


def test_an_error_over_a_group_made_by_hand_names_who_did_not_come(ranks, tmp_path):
    (reduced, gathered, missing), _ = ranks.run(one_leaves, tmp_path / "store")
    assert reduced.startswith("Rank 0 of 2: all_reduce of 4 torch.float32 broke off: ")
    assert gathered.startswith("Rank 0 of 2: all_gather of an object broke off: ")
    assert "Rank(s) 1 failed, left" in reduced
    assert missing == [1]


SCRIPT = textwrap.dedent(
    """
    import json, sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    import allstep

    def train(rank, size, file):
        store = dist.FileStore(file, size)
        group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        torch.manual_seed(rank)
        model = allstep.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), rank + number + 1.0)).sum().backward()
            optimizer.step()
        model.check_consistency(optimizer)
        assert not dist.is_initialized()
        print(json.dumps(model.module.weight.grad.tolist()))

    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    allstep.leave()  # no global name holds the group, and now no wrapper does: its threads end before the interpreter
    """
)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_no_default_group_is_needed(tmp_path, size):
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "script.py", str(rank), str(size), str(tmp_path / "store")],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [(process.communicate(timeout=120), process.returncode) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for (output, errors), code in ended:
        assert code == 0, errors
        assert json.loads(output) == [[pytest.approx(2 + (size + 1) / 2)] * 2]
