"""Native mixed precision on the CPU, where torch's class refuses it: compute low, keep parameters and gradients in full."""

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


class Watched(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 2)
        self.register_buffer("shift", torch.full((2,), 0.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[torch.dtype] = []

    def forward(self, x, labels):
        self.seen = [x.dtype, labels.dtype, self.first.weight.dtype, self.shift.dtype, self.count.dtype]
        return self.second(self.first(x).tanh()) + self.shift


def train(rank, size, dtypes, as_views):
    model = DistributedDataParallel(Watched(), mixed_precision=_MixedPrecision(**dtypes), gradient_as_bucket_view=as_views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    for step in range(4):
        out = model(x, labels=torch.arange(8))
        out.float().square().mean().backward()
        kinds = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return model.module.seen, kinds, gradients, [p.detach().clone() for p in model.parameters()], out.dtype


def reference():
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.cat([torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    for _ in range(4):
        optimizer.zero_grad()
        model(x, torch.arange(16)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_compute_is_low_and_parameters_and_gradients_are_full(ranks, low, as_views):
    dtypes = {"param_dtype": low, "reduce_dtype": low, "buffer_dtype": low}
    (seen, kinds, gradients, weights, out), (_, _, others, _, _) = ranks.run(train, dtypes, as_views)
    assert seen == [low, torch.int64, low, low, torch.int64]
    assert kinds == {torch.float32}
    assert out is low
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    for ours, expected in zip(weights, reference(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=5e-3)


def test_reducing_in_full_precision_keeps_what_a_low_sum_would_lose(ranks):
    compute = {"param_dtype": torch.bfloat16}
    full = ranks.run(train, {**compute, "reduce_dtype": torch.float32}, True)[0][2]
    low = ranks.run(train, compute, True)[0][2]  # torch: the reduction's dtype is the parameters', unless it is given
    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in low)
    assert not all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in full)
