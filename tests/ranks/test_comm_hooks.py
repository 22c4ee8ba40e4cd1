"""torch's communication hooks run unchanged, with the result that they have under torch's own class."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from allstep import DistributedDataParallel


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def hook_of(name: str):
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=3)
        return state, powerSGD_hook.powerSGD_hook
    if name == "post localSGD":
        return local_sgd.PostLocalSGDState(None, dist.group.WORLD, 2), local_sgd.post_localSGD_hook
    if name == "fp16 around allreduce":
        return None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    simple = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "noop": noop_hook,
        "own": halves,
    }
    return None, simple[name]


def halves(state, bucket):
    """A user's hook: nothing is sent, gradients are halved into a tensor of its own."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def train(rank, wrapper, name, options):
    model = wrapper(make_model(), bucket_cap_mb=0.005, **options)
    model.register_comm_hook(*hook_of(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def both(rank, size, name):
    ours = train(rank, DistributedDataParallel, name, {})
    theirs = train(rank, nn.parallel.DistributedDataParallel, name, {})
    return ours, theirs


@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16 around allreduce", "post localSGD", "noop", "own"])
def test_hooks_give_the_gradients_that_they_give_under_torch(ranks, name):
    for ours, theirs in ranks.run(both, name):
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), f"step {step}"


def alone(rank, size, name):
    return train(rank, DistributedDataParallel, name, {})


def test_bf16_works_on_the_cpu_where_torch_refuses_it(ranks):
    compressed, exact = ranks.run(alone, "bf16"), ranks.run(alone, "allreduce")
    assert all(torch.equal(a, b) for a, b in zip(compressed[0][-1], compressed[1][-1], strict=True))
    for ours, reference in zip(compressed[0][0], exact[0][0], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-2, atol=1e-4)


def test_powersgd_keeps_replicas_equal_and_its_first_steps_exact(ranks):
    """With several buckets in flight torch's own class aborts here: gloo pairs collectives of different buckets."""
    first, second = ranks.run(alone, "powerSGD")
    exact = ranks.run(alone, "allreduce")[0]
    for step in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first[step], second[step], strict=True))
    for step in range(2):  # before start_powerSGD_iter
        assert all(torch.equal(a, b) for a, b in zip(first[step], exact[step], strict=True))
    assert not torch.equal(first[4][2], exact[4][2])


def weighted(rank, size):
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))[: 3 if rank == 0 else 1]
    model.weigh(len(x))
    (model(x).square().mean() * len(x)).backward()
    return model.module[0].weight.grad.clone(), float(model.totals.weight)


def test_weights_and_hooks_go_together(ranks):
    model = make_model()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    parts = [model(x[:3]).square().mean() * 3, model(x[:1]).square().mean()]
    (sum(parts) / 4).backward()
    for gradient, weight in ranks.run(weighted):
        assert weight == 4.0
        torch.testing.assert_close(gradient, model[0].weight.grad)


def builtin(rank, size):
    model = DistributedDataParallel(make_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model(torch.full((2, 8), float(rank))).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_builtin_hooks_are_torch_s_functions(ranks):
    first, second = ranks.run(builtin)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def misused(rank, size):
    words = []
    for hook in ("no function", lambda state, bucket: bucket.buffer(), lambda state, bucket: shorter(bucket)):
        model = DistributedDataParallel(make_model())
        try:
            model.register_comm_hook(None, hook)
            model(torch.ones(2, 8)).sum().backward()
        except (TypeError, RuntimeError) as error:
            words.append(f"{type(error).__name__}: {error}")
    try:
        model.register_comm_hook(None, noop_hook)
    except RuntimeError as error:
        words.append(str(error))
    return words


def shorter(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:3])
    return future


def test_a_wrong_hook_is_told_what_is_expected(ranks):
    for words in ranks.run(misused):
        assert "callable as hook(state, bucket); got str" in words[0]
        assert "returned Tensor" in words[1]
        assert "this one holds (3,)" in words[2]
        assert "was called before" in words[3]
