"""Libraries that know torch's class find what they look for in this one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

accelerate = pytest.importorskip("accelerate", reason="it looks for parts of torch's class")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def states(rank, size):
    net = make()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank, 0)).square().mean().backward()
    optimizer.step()
    return (
        isinstance(model, nn.parallel.DistributedDataParallel),
        isinstance(net, nn.parallel.DistributedDataParallel),
        accelerate.utils.extract_model_from_parallel(model) is net,
        list(get_model_state_dict(model)),
        list(get_optimizer_state_dict(model, optimizer)["state"]),
    )


def test_it_counts_as_torchs_class(ranks):
    """For isinstance, for accelerate's unwrapping, and for torch's distributed checkpoints, whose names carry no prefix."""
    names = list(make().state_dict())
    for results in ranks.run(states):
        assert results == (True, False, True, names, names)


def synced_backward(rank, size, options):
    """Two forwards under no_sync, then a backward that stays here, and one that accelerate asks to reduce."""
    net = make()
    model = DistributedDataParallel(net, **options)
    with model.no_sync():
        first, second = (model(batch(rank, number)).square().mean() for number in range(2))
    first.backward()
    own = gradients_of(net)
    with accelerate.Accelerator.trigger_sync_in_backward(model):
        second.backward()
    return own, gradients_of(net), model.reductions, model.require_backward_grad_sync


def test_a_backward_can_be_asked_to_reduce_after_its_forward(ranks):
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}):
        results = ranks.run(synced_backward, options)

        def run(rank: int) -> nn.Module:
            net = make()
            for number in range(2):
                net(batch(rank, number)).square().mean().backward()
            return net

        assert_mean([gradients for _, gradients, *_ in results], mean_of_ranks(2, run))
        for rank, (own, _, reductions, flag) in enumerate(results):
            net = make()
            net(batch(rank, 0)).square().mean().backward()
            assert_mean([own], gradients_of(net))
            assert (reductions, flag) == (1, True)


def subgroup_checkpoint(rank, size):
    """A wrapper over a group of its own is read by torch's checkpoints too."""
    group = dist.new_group(list(range(size)))
    names = list(get_model_state_dict(DistributedDataParallel(make(), process_group=group)))
    dist.destroy_process_group(group)
    return names


def test_a_wrapper_with_a_group_of_its_own_is_read_too(ranks):
    assert ranks.run(subgroup_checkpoint) == [list(make().state_dict())] * 2
