"""Where a backend adds in an order of its own, the engine can make it a tree by rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allstep import DistributedDataParallel
from allstep.comm.communicator import communicator_for

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def values_of(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=dtype if dtype.is_complex else torch.float64).to(dtype)


def tree_of(size, numel, dtype):
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    parts = [values_of(rank, numel, dtype).to(wide) for rank in range(size)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].to(dtype)


def ordered(rank, size, numels):
    communicator = communicator_for(None)
    tensors = [values_of(rank, numel, dtype) for numel in numels for dtype in DTYPES]
    pending = None
    started = []
    for tensor in tensors:
        if pending is not None:
            pending.go_on()
        pending = communicator.all_reduce_in_order(tensor)
        started.append(pending)
    for each in started:
        each.wait()
    return communicator.adds_in_order, tensors


def test_sums_are_the_tree_by_rank_of_every_length_and_dtype(four_ranks):
    numels = [0, 1, 3, 4, 5, 1000, 4097]
    for adds_in_order, tensors in four_ranks.run(ordered, numels):
        assert not adds_in_order
        expected = [tree_of(4, numel, dtype) for numel in numels for dtype in DTYPES]
        assert all(map(torch.equal, tensors, expected))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Linear(17, 17) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


def gradients(rank, size, backend, cap, dtype, average):
    group = dist.new_group(backend=backend)
    net = Net().to(dtype)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap, deterministic_reduction=True)
    found = []
    for step in range(6):  # over the rebuild and the plan
        x = torch.randn(3, 17, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        net.zero_grad()
        if not average:
            model.weigh(1.0)
        (model(x).square().mean() * 7).backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    model.release()
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("average", [False, True], ids=["weighed", "mean"])
@pytest.mark.parametrize("cap", [None, 1e-3])
def test_gloo_gives_the_bits_of_shm_on_four_ranks(four_ranks, cap, average):
    on_gloo = four_ranks.run(gradients, "gloo", cap, torch.float32, average)
    on_shm = four_ranks.run(gradients, "shm", cap, torch.float32, average)
    for rank in range(4):
        for ours, other in zip(on_gloo[rank], on_shm[rank], strict=True):
            assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_too(four_ranks, dtype):
    on_gloo = four_ranks.run(gradients, "gloo", None, dtype, False)
    on_shm = four_ranks.run(gradients, "shm", None, dtype, False)
    assert all(map(torch.equal, on_gloo[0][-1], on_shm[0][-1]))
