"""A wrapper can be copied and pickled; the copy trains and reduces by itself."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch}


def step(model, rank):
    model.zero_grad()
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    return model.module.weight.grad.clone()


def copied(rank, size, way):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=0.5, find_unused_parameters=True)
    before = step(model, rank)
    twin = WAYS[way](model)
    own = [step(twin, rank), step(model, rank), step(twin, rank)]
    apart = twin.module.weight is not model.module.weight
    del model
    return before, own, step(twin, rank), apart, twin.find_unused_parameters, twin.reductions


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_reduces_by_itself(ranks, way):
    for before, own, last, apart, flag, reductions in ranks.run(copied, way):
        assert all(torch.equal(before, each) for each in (*own, last))
        assert torch.equal(before, torch.full((2, 3), 3.0))
        assert apart
        assert flag is True
        assert reductions == 3


def refused(rank, size):
    group = dist.new_group(list(range(size)))
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    hooked = DistributedDataParallel(nn.Linear(3, 2))
    hooked.register_comm_hook(None, allreduce_hook)
    words = []
    for each in (model, hooked):
        try:
            copy.deepcopy(each)
        except RuntimeError as error:
            words.append(str(error))
    del model
    dist.destroy_process_group(group)
    return words


def test_a_wrapper_whose_group_or_hook_no_copy_could_have_says_what_to_copy(ranks):
    for own_group, hook in ranks.run(refused):
        assert ".module" in own_group
        assert "process_group of its own" in own_group
        assert "communication hook" in hook


def test_copies_in_a_world_of_one():
    model = DistributedDataParallel(nn.Linear(3, 2))
    twin = copy.deepcopy(model)
    assert torch.equal(step(model, 0), step(twin, 0))
