"""SyncBatchNorm on two ranks is BatchNorm on the whole batch, also with unequal batches, on the CPU."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel, SyncBatchNorm


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3 + 5


def make(kind: str) -> nn.Module:
    torch.manual_seed(2)
    if kind == "image":
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    if kind == "plain":
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, momentum=None), nn.Linear(4, 2))
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


SHAPES = {"image": (7, 3, 6, 6), "plain": (7, 3), "rows": (7, 3)}


def train(rank, size, kind, split):
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(make(kind)), find_unused_parameters=None)
    parts = whole(SHAPES[kind]).split(split)
    inputs = parts[rank].clone().requires_grad_()
    for _ in range(2):
        model.zero_grad()
        inputs.grad = None
        out = model(inputs)
        model.weigh(len(inputs))
        (out.square().sum(1).sum()).backward()
    buffers = {name: b.clone() for name, b in model.module.named_buffers()}
    model.eval()
    return {
        "gradients": {name: p.grad.clone() for name, p in model.module.named_parameters()},
        "input": inputs.grad,
        "buffers": buffers,
        "eval": model(whole(SHAPES[kind])).detach(),
    }


@pytest.mark.parametrize("split", [[4, 3], [6, 1], [7, 0]], ids=str)
@pytest.mark.parametrize("kind", ["image", "plain", "rows"])
def test_gradients_and_statistics_are_those_of_the_whole_batch(ranks, kind, split):
    results = ranks.run(train, kind, split)
    model = make(kind)
    inputs = whole(SHAPES[kind]).requires_grad_()
    for _ in range(2):
        model.zero_grad()
        inputs.grad = None
        model(inputs).square().sum(1).mean().backward()
    input_gradient = inputs.grad * len(inputs)  # ranks hold the gradient of their sum
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([result["input"] for result in results]), input_gradient, **close)
    for result in results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["gradients"][name], parameter.grad, **close)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(result["buffers"][name], buffer, **close)
    model.eval()
    torch.testing.assert_close(results[0]["eval"], model(whole(SHAPES[kind])).detach(), **close)


def precise(rank, size):
    """Values far from zero with a small spread: a sum of squares would cancel."""
    x = (torch.arange(8.0)[4 * rank : 4 * rank + 4, None] / 8 + 10_000).expand(4, 2)
    layer = SyncBatchNorm(2)
    return layer(x).detach(), layer.running_var


def test_variance_does_not_cancel(ranks):
    x = (torch.arange(8.0)[:, None] / 8 + 10_000).expand(8, 2)
    reference = nn.BatchNorm1d(2)
    expected = reference(x).detach()
    results = ranks.run(precise)
    torch.testing.assert_close(torch.cat([output for output, _ in results]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][1], reference.running_var)


def one_value(rank, size):
    SyncBatchNorm(3)(torch.ones(1 if rank == 0 else 0, 3))


def test_a_single_value_a_channel_is_an_error_on_every_rank(ranks):
    for outcome in ranks.outcomes(one_value):
        assert outcome.error == "ValueError"
        assert "more than one value" in outcome.message


def test_in_a_world_of_one_it_is_batch_normalisation():
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    ours, reference = SyncBatchNorm(3), nn.BatchNorm1d(3)
    for _ in range(3):
        torch.testing.assert_close(ours(x), reference(x))
    ours.eval()
    reference.eval()
    torch.testing.assert_close(ours(x), reference(x))
    assert ours.num_batches_tracked == 3


def test_conversion_keeps_state_and_what_is_no_batch_norm():
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"norm": nn.BatchNorm1d(3)}), nn.SyncBatchNorm(3))
    before = dict(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[1]["norm"]) is SyncBatchNorm
    assert type(converted[2]) is SyncBatchNorm
    assert converted[1]["norm"].weight.data_ptr() == before["1.norm.weight"].data_ptr()
    assert dict(converted.state_dict()).keys() == before.keys()
