"""Constructor arguments under torch's names: what they do here, and what is said where they do not fit."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from allstep import DistributedDataParallel


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))  # 16 KiB each


def sizes(rank, size, options):
    model = DistributedDataParallel(make(), **options)
    model(torch.full((1, 64), float(rank))).sum().backward()
    buckets = [[slot.name for slot in bucket.slots] for bucket in model.bucket_layout.buckets]
    return buckets, [p.grad.clone() for p in model.parameters()]


KIB = 1 / 1024


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"bucket_cap_mb": 32 * KIB}, [2, 2, 2]),
        ({"bucket_cap_mb": [16 * KIB, 32 * KIB]}, [1, 2, 2, 1]),
        ({"bucket_cap_mb_list": [48 * KIB, 16 * KIB]}, [3, 1, 1, 1]),
        ({"bucket_cap_mb": 1 * KIB}, [1] * 6),
        ({}, [6]),
    ],
    ids=str,
)
def test_bucket_sizes_are_those_asked_for(ranks, options, counts):
    reference = ranks.run(sizes, {})[0][1]
    for buckets, gradients in ranks.run(sizes, options):
        assert [len(names) for names in buckets] == counts
        assert [name for names in buckets for name in names] == [f"{i}.weight" for i in range(5, -1, -1)]
        assert all(torch.equal(a, b) for a, b in zip(gradients, reference, strict=True))


def positional(rank, size):
    """torch's order of arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(make(), None, None, 0, False, True, None, 25, True, False, False, False)
    flags = (model.forward_sync_buffers, model.find_unused_parameters, model.gradient_as_bucket_view, model.static_graph)
    return flags, [(w.category.__name__, str(w.message)) for w in caught]


def test_arguments_stand_in_torch_s_order(ranks):
    for flags, caught in ranks.run(positional):
        assert flags == (False, True, False, False)
        assert [category for category, _ in caught] == ["FutureWarning"]
        assert "write forward_sync_buffers=False" in caught[0][1]


def groups(rank, size):
    words = []
    alone = [dist.new_group([each]) for each in range(size)][rank]
    try:
        model = DistributedDataParallel(make(), process_group=alone)
        model(torch.full((1, 64), rank + 1.0)).sum().backward()
        own = next(model.parameters()).grad.clone()
    finally:
        dist.destroy_process_group(alone)
    mesh = init_device_mesh("cpu", (size,))
    model = DistributedDataParallel(make(), device_mesh=mesh)
    model(torch.full((1, 64), rank + 1.0)).sum().backward()
    shared = next(model.parameters()).grad.clone()
    for options in (
        {"process_group": dist.group.WORLD, "device_mesh": mesh},
        {"device_mesh": init_device_mesh("cpu", (size, 1))},
        {"bucket_cap_mb": 0},
        {"device_ids": [0]},
    ):
        try:
            DistributedDataParallel(make(), **options)
        except (RuntimeError, ValueError) as error:
            words.append(f"{type(error).__name__}: {error}")
    return own, shared, words


def test_groups_and_meshes_name_the_ranks(ranks):
    (first, shared, words), (second, other, _) = ranks.run(groups)
    assert torch.equal(first * 2, second)  # each averaged with nobody
    assert torch.equal(shared, other)
    torch.testing.assert_close(shared, first * 1.5)
    assert "Cannot specify both" in words[0]
    assert "Only 1D device mesh" in words[1]
    assert "bucket_cap_mb=0" in words[2]
    assert "device_ids=None" in words[3]


def delayed(rank, size, delay, trigger, options):
    """Per step: order in which buckets were sent, gradients; and the names in each bucket."""
    net = make()
    named = dict(net.named_parameters())
    model = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[(name, named[name]) for name in delay],
        param_to_hook_all_reduce=named[trigger],
        **options,
    )
    gradients = []
    for step in range(3):
        with model.no_sync():
            model(torch.full((1, 64), float(rank + step))).square().sum().backward()
        model(torch.full((1, 64), float(rank - step))).square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
        model.zero_grad()
    buckets = [[slot.name for slot in bucket.slots] for bucket in model.bucket_layout.buckets]
    return buckets, gradients, model.collectives_per_bucket


@pytest.mark.parametrize("delay", [["0.weight", "3.weight"], [f"{i}.weight" for i in range(6)]], ids=["some", "all"])
@pytest.mark.parametrize("trigger", ["5.weight", "0.weight"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_delayed_parameters_are_reduced_together_behind_all_others(ranks, delay, trigger, options):
    """Whenever the trigger's gradient comes, before theirs or after; accumulated first, and averaged once.

    torch's class reduces them when the trigger's gradient comes, even where theirs have not.
    """
    results = ranks.run(delayed, delay, trigger, {"bucket_cap_mb": 16 * KIB, **options})
    expected = []
    for step in range(3):
        net = make()
        for rank in range(2):
            for value in (rank + step, rank - step):
                (net(torch.full((1, 64), float(value))).square().sum() / 2).backward()
        expected.append([p.grad for p in net.parameters()])
    for buckets, gradients, sent in results:
        assert set(buckets[-1]) == set(delay)
        assert len(buckets) == 7 - len(delay)  # the others have one each
        assert len(set(sent)) == 1
        torch.testing.assert_close(gradients, expected)


def refused_delay(rank, size):
    net, other = make(), nn.Parameter(torch.zeros(3))
    weight = net[0].weight
    messages = []
    for options in (
        {"delay_all_reduce_named_params": [("0.weight", weight)]},
        {"param_to_hook_all_reduce": weight},
        {"delay_all_reduce_named_params": [("strange", other)], "param_to_hook_all_reduce": weight},
        {"delay_all_reduce_named_params": [("0.weight", weight)], "param_to_hook_all_reduce": other},
    ):
        with pytest.raises(ValueError, match="param") as raised:
            DistributedDataParallel(net, **options)
        messages.append(str(raised.value))
    return messages


def test_delayed_parameters_that_do_not_fit_are_refused(ranks):
    for without_trigger, without_parameters, stranger, strange_trigger in ranks.run(refused_delay):
        assert "at the same time" in without_trigger
        assert "at the same time" in without_parameters
        assert stranger.startswith("strange: no parameter of the module")
        assert strange_trigger.startswith("param_to_hook_all_reduce: no parameter of the module")


def refused_modules(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    split = nn.Linear(4, 4)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh))
    messages = []
    for module in (nn.Sequential(nn.LazyLinear(3)), split):
        with pytest.raises((RuntimeError, ValueError), match="weight") as raised:
            DistributedDataParallel(module)
        messages.append(str(raised.value))
    return messages


def test_modules_that_cannot_be_replicated_as_they_are_are_refused_by_name(ranks):
    for lazy, split in ranks.run(refused_modules):
        assert lazy.startswith("0.weight, 0.bias of Sequential have no shape yet")
        assert split.startswith("weight of Linear are DTensors")
