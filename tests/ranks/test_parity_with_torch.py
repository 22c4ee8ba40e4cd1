"""Argument by argument and hook by hook: the same gradients, weights and buffers as with torch's class, bit for bit.

Both classes train the same model on the same data in the same two ranks. With two ranks the order of a sum does not matter and
dividing by two is exact, so gradients have to be equal, not only close. Where torch's class or hook does not come through by
itself on the CPU, the row has something `around` it, which says why.
"""

import gc
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")

STEPS = 3
KIB = 1 / 1024

# ---- models; ranks begin with different weights, unless a row says otherwise


def plain() -> nn.Module:
    """20 KiB."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def in_channels() -> nn.Module:
    """Weights of whole channels, as quantization_perchannel_hook cuts a bucket, whatever the order of weights in the bucket.

    That order is not the same: in the first step torch's class has that of registration, and ours the reverse.
    """
    layers = [nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False)]
    return nn.Sequential(*layers)


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def with_images() -> nn.Module:
    """Convolutions with channels last."""
    images = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.Conv2d(4, 2, 1), nn.Flatten())
    return images.to(memory_format=torch.channels_last)


class Some(nn.Module):
    """One layer that all forwards use twice, one that only rank 0's use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.of_rank_0, self.of_nobody = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.shared(x).tanh())
        return self.of_rank_0(x) if dist.get_rank() == 0 else x


class OneForAll(Some):
    """As `Some`, but what rank 0 uses all ranks use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_rank_0(self.shared(self.shared(x).tanh()))


# ---- rows


@dataclass(frozen=True)
class Row:
    """What both classes are given; `theirs` is what torch's has in addition or otherwise."""

    options: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = plain
    made: Callable[[nn.Module], dict[str, Any]] | None = None
    """Model -> options that have to be made on the rank. A process_group is destroyed in the end."""
    hook: Callable[[], tuple[Any, Any]] | dist.BuiltinCommHookType | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while either class trains."""
    window: int = 1
    """Micro-batches of a step, all but the last one under no_sync."""
    join: dict[str, Any] | None = None
    """Arguments of `join`; ranks then have unequal numbers of steps."""
    ignored: Sequence[str] = ()
    seeds: tuple[int, int] = (0, 1)
    steps: int = STEPS
    warns: bool = False
    """torch warns of it, and so do we."""


def all_ranks(net: nn.Module) -> dict[str, Any]:
    return {"process_group": dist.new_group(list(range(dist.get_world_size())))}


def each_alone(net: nn.Module) -> dict[str, Any]:
    return {"process_group": [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]}


def mesh(net: nn.Module) -> dict[str, Any]:
    return {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}


def last_layer_behind_the_first(net: nn.Module) -> dict[str, Any]:
    named = dict(net.named_parameters())
    delayed = [(name, named[name]) for name in ("4.weight", "4.bias")]
    return {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": named["0.weight"]}


def waiting_for_sums() -> AbstractContextManager[Any]:
    """torch's class sums delayed gradients and does not wait for the sum: without this, some runs on the CPU end before it."""
    start = dist.all_reduce

    def start_and_wait(*args, **kwargs):
        work = start(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return mock.patch.object(dist, "all_reduce", start_and_wait)


ARGUMENTS = {
    "no argument": Row(),
    "no argument: convolutions": Row(make=with_images),
    "device_ids": Row({"device_ids": None}),
    "output_device": Row({"output_device": None}),
    "dim": Row({"dim": 1}),
    "broadcast_buffers: True": Row({"broadcast_buffers": True}, make=with_buffers, warns=True),
    "broadcast_buffers: False": Row({"broadcast_buffers": False}, make=with_buffers, warns=True),
    "forward_sync_buffers: True": Row({"forward_sync_buffers": True}, make=with_buffers),
    "forward_sync_buffers: False": Row({"forward_sync_buffers": False}, make=with_buffers),
    "init_sync: equal weights": Row({"init_sync": False}, seeds=(0, 0)),
    "init_sync: other weights on each rank": Row({"init_sync": False}),
    "init_sync: buffers from forward": Row({"init_sync": False, "forward_sync_buffers": True}, make=with_buffers),
    "process_group: all": Row(made=all_ranks),
    "process_group: of one rank": Row(made=each_alone),
    "device_mesh": Row(made=mesh),
    "bucket_cap_mb: one parameter": Row({"bucket_cap_mb": 0.001}),
    "bucket_cap_mb: some": Row({"bucket_cap_mb": 5 * KIB}),
    "bucket_cap_mb: all": Row({"bucket_cap_mb": 25}),
    "bucket_cap_mb_list": Row({"bucket_cap_mb_list": [1 * KIB, 17 * KIB]}),
    "find_unused_parameters: False": Row({"find_unused_parameters": False}),
    "find_unused_parameters: True": Row({"find_unused_parameters": True}, make=Some),
    "find_unused_parameters: True, all used": Row({"find_unused_parameters": True}),
    "find_unused_parameters: None": Row({"find_unused_parameters": None}, {"find_unused_parameters": True}, make=Some),
    "check_reduction": Row({"check_reduction": True}),
    "gradient_as_bucket_view: True": Row({"gradient_as_bucket_view": True}, make=with_images),
    "gradient_as_bucket_view: False": Row({"gradient_as_bucket_view": False}, make=with_images),
    "gradient_as_bucket_view: True, unused": Row(
        {"gradient_as_bucket_view": True, "find_unused_parameters": True}, make=OneForAll
    ),
    "static_graph: all used": Row({"static_graph": True}),
    "static_graph: and find_unused_parameters": Row({"static_graph": True, "find_unused_parameters": True}, make=OneForAll),
    "static_graph: unused": Row({"static_graph": True}, make=OneForAll),
    "delay_all_reduce_named_params": Row(made=last_layer_behind_the_first, around=waiting_for_sums),
    "param_to_hook_all_reduce": Row(
        {"gradient_as_bucket_view": True}, made=last_layer_behind_the_first, around=waiting_for_sums
    ),
    "skip_all_reduce_unused_params": Row(
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}, make=OneForAll
    ),
    "batched_grad_copy: True": Row({"batched_grad_copy": True}),
    "batched_grad_copy: False": Row({"batched_grad_copy": False}),
    "ignored parameters": Row(ignored=["2.weight", "4.bias"]),
    "ignored buffers": Row(make=with_buffers, ignored=["1.running_mean"]),
    "no_sync": Row(window=3),
    "no_sync: views, unused": Row({"find_unused_parameters": True, "gradient_as_bucket_view": True}, make=OneForAll, window=2),
    "join: divide by all ranks": Row(join={"divide_by_initial_world_size": True}),
    "join: divide by those with data": Row(join={"divide_by_initial_world_size": False}),
    "join: buffers": Row(join={}, make=with_buffers),
    "join: windows": Row(join={}, window=2),
    "join: several buckets, unused": Row(
        {"bucket_cap_mb": 0.001, "find_unused_parameters": True}, make=OneForAll, join={"divide_by_initial_world_size": False}
    ),
    "join: not enabled": Row(join={"enable": False}),
}

NOT_HERE = {"mixed_precision"}
"""torch's class refuses it on the CPU; see test_mixed_precision.py."""


def power_sgd() -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=3)
    return state, powerSGD_hook.powerSGD_hook


def renamed_bf16(state, bucket):
    """torch's class knows its bf16 hooks by name, and refuses them on the CPU, where they work."""
    return default_hooks.bf16_compress_hook(state, bucket)


def renamed_bf16_wrapper(state, bucket):
    """As `renamed_bf16`."""
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)


class Gathered:
    """The work of an all_gather whose future holds one tensor of all ranks', as torch's quantization hooks expect."""

    def __init__(self, *args, **kwargs):
        self._work = dist.all_gather(*args, **kwargs)

    def get_future(self):
        return self._work.get_future().then(lambda future: [torch.stack(future.value())])


def gathered_in_one() -> AbstractContextManager[Any]:
    """For quantization hooks, which fail on gloo under either class (test_quantization_hooks_fail_on_gloo_by_themselves)."""
    functions = SimpleNamespace(all_gather=Gathered, get_rank=dist.get_rank, group=dist.group)
    return mock.patch.object(quantization_hooks, "dist", functions)


SEVERAL = {"bucket_cap_mb": 5 * KIB}

HOOKS = {
    "allreduce_hook": Row(SEVERAL, hook=lambda: (None, default_hooks.allreduce_hook)),
    "allreduce_hook: of a group": Row(SEVERAL, hook=lambda: (dist.group.WORLD, default_hooks.allreduce_hook)),
    "fp16_compress_hook": Row(SEVERAL, hook=lambda: (None, default_hooks.fp16_compress_hook)),
    "bf16_compress_hook": Row(SEVERAL, hook=lambda: (None, renamed_bf16)),
    "fp16_compress_wrapper": Row(
        SEVERAL, hook=lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    ),
    "bf16_compress_wrapper": Row(SEVERAL, hook=lambda: (None, renamed_bf16_wrapper)),
    # these three in one bucket: with several in flight, torch's class lets gloo pair collectives of different buckets
    "powerSGD_hook": Row(hook=power_sgd, steps=5),
    "quantization_pertensor_hook": Row(
        hook=lambda: (None, quantization_hooks.quantization_pertensor_hook), around=gathered_in_one
    ),
    "quantization_perchannel_hook": Row(
        make=in_channels, hook=lambda: (None, quantization_hooks.quantization_perchannel_hook), around=gathered_in_one
    ),
    "post_localSGD_hook": Row(
        SEVERAL,
        hook=lambda: (local_sgd.PostLocalSGDState(None, dist.group.WORLD, 2), local_sgd.post_localSGD_hook),
        steps=4,
    ),
    "noop_hook": Row(SEVERAL, hook=lambda: (None, noop_hook)),
    "builtin: ALLREDUCE": Row(SEVERAL, hook=dist.BuiltinCommHookType.ALLREDUCE),
    "builtin: FP16_COMPRESS": Row(SEVERAL, hook=dist.BuiltinCommHookType.FP16_COMPRESS),
}

ROWS = {**ARGUMENTS, **HOOKS}

# ---- on the ranks


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x).square().mean()


def train(rank, size, wrapper, row, more):
    """Gradients of each step, weights, buffers, and keys of the state."""
    torch.manual_seed(row.seeds[rank])
    net = row.make()
    if row.ignored:
        wrapper._set_params_and_buffers_to_ignore_for_model(net, row.ignored)
    made = row.made(net) if row.made else {}
    model = wrapper(net, **row.options | more | made)
    if isinstance(row.hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(row.hook)
    elif row.hook:
        model.register_comm_hook(*row.hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    uneven = 0 if row.join is None or row.join.get("enable") is False else 2 * rank
    seen = []
    with nullcontext() if row.join is None else model.join(**row.join):
        for step in range(row.steps + uneven):
            for micro in range(row.window):
                with nullcontext() if micro == row.window - 1 else model.no_sync():
                    loss(model, rank, row.window * step + micro).backward()
            seen.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del model, optimizer  # before the group, and before the other class wraps
    gc.collect()
    if "process_group" in made:  # that of the mesh is the default group
        dist.destroy_process_group(made["process_group"])
    return seen, state


def both(rank, size, name):
    """Ours under warnings as errors, but for those that torch has too; and torch's, which warns as it likes."""
    row = ROWS[name]
    gc.freeze()  # `train` then collects quickly, as only what it has made is looked at
    try:
        with row.around(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always" if row.warns else "error")
            ours = train(rank, size, DistributedDataParallel, row, {})
        with row.around(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = train(rank, size, nn.parallel.DistributedDataParallel, row, row.theirs)
    finally:
        gc.unfreeze()
    return ours, theirs, [str(warning.message) for warning in caught]


# ---- what is expected


ONLY_ON_GLOO = {
    "builtin: FP16_COMPRESS": "torch's class asks in C++ for a future that was made there",
    "quantization_pertensor_hook": "the row helps torch's hook over what gloo gathers",
    "quantization_perchannel_hook": "the row helps torch's hook over what gloo gathers",
}


@pytest.mark.parametrize("name", list(ROWS))
def test_training_is_that_of_torch_bit_for_bit(ranks, backend, name):
    """Gradients of each step, None where torch has None; weights and buffers in the end, under the same keys."""
    if backend == "shm" and name in ONLY_ON_GLOO:
        pytest.skip(ONLY_ON_GLOO[name])
    for ours, theirs, warned in ranks.run(both, name):
        assert len(ours[0]) == len(theirs[0]) > 0
        for step, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
            assert_same(mine, other, f"gradient in step {step}")
        assert_same(ours[1], theirs[1], "state")
        assert bool(warned) == ROWS[name].warns, warned


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        mine = ours[name]
        if value is None or mine is None:
            assert mine is value, f"{what}: {name}"
        else:
            assert mine.dtype == value.dtype
            assert torch.equal(mine, value), f"{what}: {name} differs by up to {(mine - value).abs().max()}"


def quantized_on_gloo(rank, size, wrapper, name):
    model = wrapper(plain())
    model.register_comm_hook(None, getattr(quantization_hooks, name))
    with pytest.raises(RuntimeError, match="IndexError") as raised:
        loss(model, rank, 0).backward()
    del model
    gc.collect()
    return "quantization_hooks.py" in str(raised.value)


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_quantization_hooks_fail_on_gloo_by_themselves(ranks, backend, wrapper, name):
    """They take what gloo gathers for one tensor, so they run under neither class; the rows above help them over that."""
    if backend == "shm":
        pytest.skip(ONLY_ON_GLOO[name])
    assert ranks.run(quantized_on_gloo, wrapper, name) == [True, True]


def test_every_argument_of_torch_has_a_row():
    arguments = set(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters) - {"self", "module"}
    assert arguments - {name.partition(":")[0] for name in ARGUMENTS} == NOT_HERE
