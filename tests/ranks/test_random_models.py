"""Whatever the model, the buckets and the loop: gradients on two ranks are the mean over ranks, as one process computes it.

Models, options and loops are drawn at random, the same ones in every run. RANDOM_MODELS=1500 in the environment draws so many
new ones instead.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks
from allstep.testing.ranks import one_thread

SIZE = 2
WIDTH = 4
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-7}
"""Of the largest number in a gradient. On two ranks the mean itself is exact, so this is for kernels that round otherwise."""

# ---- models, made from a description of plain dicts, which can be pickled: {"kind": ..., "used": ...}


class Layer(nn.Module):
    """(samples, WIDTH) -> the same shape, with parameters of one kind."""

    def __init__(self, spec: dict[str, Any], linears: list[nn.Linear]) -> None:
        super().__init__()
        self.spec, self.kind = spec, spec["kind"]
        dtype = self.dtype = getattr(torch, spec["dtype"])
        if self.kind == "linear" or (self.kind == "tied" and not linears):
            self.inner = nn.Linear(WIDTH, WIDTH, bias=spec["number"] % 3 > 0).to(dtype)
            linears.append(self.inner)
        elif self.kind == "tied":
            other = linears[spec["number"] % len(linears)]
            self.inner = nn.Linear(WIDTH, WIDTH).to(other.weight.dtype)
            self.inner.weight, self.dtype = other.weight, other.weight.dtype
        elif self.kind == "conv":
            size, groups = [(1, 1), (3, 1), (3, WIDTH), (1, WIDTH)][spec["number"] % 4]
            self.inner = nn.Conv2d(WIDTH, WIDTH, size, padding=size // 2, groups=groups).to(dtype)
            self.inner.to(memory_format=torch.channels_last)
        elif self.kind == "norm":
            self.inner = nn.LayerNorm(WIDTH).to(dtype)
        else:
            self.weight = nn.Parameter(plain_parameter(self.kind, spec["number"]).to(dtype))
        if spec["frozen"] == "all":
            self.requires_grad_(False)
        elif spec["frozen"] == "one":
            next(self.parameters()).requires_grad_(False)

    def forward(self, x: torch.Tensor, turn: tuple[int, int], aside: list[torch.Tensor]) -> torch.Tensor:
        if not is_used(self.spec["used"], *turn):
            return x
        y = self.compute(x.to(self.dtype)).tanh()
        if self.spec["used"] == "aside":
            aside.append(y)
            return x
        return y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "conv":
            image = x[:, :, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last)
            return self.inner(image).mean((2, 3))
        if self.kind == "scalar":
            return x * self.weight
        if self.kind == "empty":
            return x + self.weight.sum()
        if self.kind in ("turned", "gapped"):
            return x + x[:, :2] @ self.weight
        return self.inner(x)


def plain_parameter(kind: str, number: int) -> torch.Tensor:
    if kind == "scalar":
        return torch.rand(()) + 0.5
    if kind == "empty":
        return torch.zeros([(0,), (3, 0, 2), (0, 4)][number % 3])
    if kind == "turned":
        return torch.randn(WIDTH, 2).t()
    return torch.randn(2, 2 * WIDTH)[:, ::2]


def is_used(used: str, rank: int, number: int) -> bool:
    """Whether a forward uses a layer: on this rank, in the micro-batch of that number, of which a step has ten at most."""
    if used == "turns":
        return (rank + number) % 2 == 0
    if used == "every other step":
        return number // 10 % 2 == 0
    return used in ("all", "aside", f"rank {rank}")


class Group(nn.Module):
    """Layers and groups, one behind the other; averaged with what came in, or checkpointed."""

    def __init__(self, spec: dict[str, Any], linears: list[nn.Linear]) -> None:
        super().__init__()
        self.kind = spec["kind"]
        parts = [(Group if "parts" in part else Layer)(part, linears) for part in spec["parts"]]
        self.parts = nn.ModuleDict({f"part{i}": part for i, part in enumerate(parts)})

    def forward(self, x: torch.Tensor, turn: tuple[int, int], aside: list[torch.Tensor]) -> torch.Tensor:
        y = checkpoint(self.run, x, turn, aside, use_reentrant=False) if self.kind == "checkpoint" else self.run(x, turn, aside)
        return (x + y) / 2 if self.kind == "skip" else y

    def run(self, x: torch.Tensor, turn: tuple[int, int], aside: list[torch.Tensor]) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x, turn, aside)
        return x


class Net(nn.Module):
    """The described body, and a head that every forward uses."""

    def __init__(self, spec: dict[str, Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = Group(spec, [])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, turn: tuple[int, int]) -> dict[str, Any]:
        aside: list[torch.Tensor] = []
        return {"out": (self.head(self.body(x, turn, aside).float()),), "aside": aside}


# ---- the loop, for a wrapper on its rank and for one process in the place of each rank


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x, (rank, number))["out"][0].square().mean()


def window(
    model: nn.Module, rank: int, step: dict[str, Any], first: int, local: Callable[[], AbstractContextManager[None]]
) -> bool:
    """The micro-batches of a rank before a reduction; False where it has none that reduces."""
    for number in range(first, first + step["local"][rank]):
        with local():
            loss(model, rank, number).backward()
    if step["absent"] == rank:
        return False
    sum(loss(model, rank, first + 5 + number) for number in range(step["forwards"])).backward()
    return True


def clear(net: nn.Module, how: str) -> None:
    """Gradients away before a window, as loops and optimizers do it; or kept, so that the window adds to them."""
    for index, parameter in enumerate(net.parameters()):
        if how == "none" or (how == "mixed" and index % 2):
            parameter.grad = None
        elif parameter.grad is not None and how == "copied":
            parameter.grad = torch.zeros_like(parameter.grad)
        elif parameter.grad is not None and how != "kept":
            parameter.grad.zero_()


def give(net: nn.Module, gradients: dict[str, Any]) -> None:
    """Copies of `gradients`, which lie in memory as the parameters do."""
    for name, parameter in net.named_parameters():
        gradient = gradients[name]
        parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def train(rank, size, case):
    """Per step: gradients, strides of parameters and of their gradients, and weights. Only rank 0 begins with seed 0."""
    net = Net(case["body"], seed=rank)
    model = DistributedDataParallel(net, **case["options"])
    if case["hook"]:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = sgd(net)
    seen = []
    for index, step in enumerate(case["steps"]):
        clear(net, step["clear"])
        if not window(model, rank, step, 10 * index, model.no_sync):
            model.take_part()
        strides = {name: (p.shape, p.stride(), p.grad.stride()) for name, p in net.named_parameters() if p.grad is not None}
        gradients = gradients_of(net)
        optimizer.step()
        seen.append((gradients, strides, weights_of(net)))
    assert model.reductions == len(seen)
    return seen


# ---- what is drawn

LAYERS = ["linear", "linear", "tied", "conv", "norm", "scalar", "empty", "turned", "gapped"]


def layers(used: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(LAYERS),
            "dtype": st.sampled_from(["float32", "float32", "float64", "bfloat16"]),
            "number": st.integers(0, 11),
            "frozen": st.sampled_from(["no", "no", "no", "one", "all"]),
            "used": st.sampled_from(used),
        }
    )


def lists(items: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[list[Any]]:
    """Of all lengths alike; `st.lists` by itself prefers short ones."""
    return st.integers(least, most).flatmap(lambda length: st.lists(items, min_size=length, max_size=length))


def groups(parts: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"kind": st.sampled_from(["chain", "skip", "checkpoint"]), "parts": lists(parts, least, most)})


STEP = st.fixed_dictionaries(
    {
        "local": st.tuples(st.integers(0, 2), st.integers(0, 2)),
        "forwards": st.sampled_from([1, 1, 2]),
        "absent": st.sampled_from([None, None, None, 0, 1]),
        "clear": st.sampled_from(["none", "none", "zero", "copied", "mixed", "kept"]),
    }
)
CAP = st.sampled_from([1, 70, 200, 1000, 1 << 20]).map(lambda size: size / (1 << 20))
CAPS = st.one_of(st.none(), CAP, st.lists(CAP, min_size=1, max_size=3))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    flags = draw(st.sampled_from([(None, False), (True, False), (False, True), (True, True), (False, False)]))
    find_unused, static = flags
    changing = [] if static else ["turns", "every other step"]
    used = ["all", "all", "nobody", "rank 0", "rank 1", "aside", *changing]
    if flags == (False, False):
        used = ["all"]
    options = {
        "find_unused_parameters": find_unused,
        "static_graph": static,
        "gradient_as_bucket_view": draw(st.booleans()),
        "bucket_cap_mb": draw(CAPS),
    }
    part = st.one_of(layers(used), layers(used), groups(st.one_of(layers(used), groups(layers(used), 0, 3)), 1, 3))
    return {
        "body": draw(groups(part, 2, 6)),
        "options": options,
        "hook": draw(st.sampled_from([False, False, False, True])),
        "steps": draw(lists(STEP, 2, 4)),
    }


EXAMPLES = int(os.environ.get("RANDOM_MODELS", "0"))


@settings(
    max_examples=EXAMPLES or 80,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_gradients_are_the_mean_over_ranks_whatever_the_model_and_the_loop(ranks, case):
    """Layers of every kind, dtype and stride, tied, frozen, without elements, unused by some or all ranks, in turns or aside.

    After each reduction both ranks hold the same bits, the mean, and None exactly where no rank has a gradient. Gradients lie
    in memory as their parameters do. Weights, after an optimizer with momentum, are those of one process.
    """
    results = ranks.run(train, case)
    with one_thread():
        compare_with_one_process(results, case)


def compare_with_one_process(results: list[Any], case: dict[str, Any]) -> None:
    alone = Net(case["body"], seed=0)
    optimizer = sgd(alone)
    for index, step in enumerate(case["steps"]):
        clear(alone, step["clear"])
        before = gradients_of(alone)

        def run(rank: int, before: Any = before, step: Any = step, first: int = 10 * index) -> nn.Module:
            give(alone, before)
            window(alone, rank, step, first, nullcontext)
            return alone

        expected = mean_of_ranks(SIZE, run)
        compare([result[index][0] for result in results], expected)
        for _, strides, _ in (result[index] for result in results):
            check_strides(strides, exact=case["options"]["gradient_as_bucket_view"])
        give(alone, expected)
        optimizer.step()
        compare([result[index][2] for result in results], weights_of(alone))
        with torch.no_grad():  # go on from the same weights, where kernels rounded otherwise
            for name, parameter in alone.named_parameters():
                parameter.copy_(results[0][index][2][name])


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        near = 0.0 if value is None else TOLERANCE[value.dtype]
        largest = 0.0 if value is None or not value.numel() else float(value.abs().max())
        assert_mean([{name: found[name]} for found in ranks], {name: value}, rtol=near, atol=near * largest)


def check_strides(strides: dict[str, Any], *, exact: bool) -> None:
    """As the parameter's, where those are dense; of autograd's own tensors a dimension of one says nothing."""
    for name, (shape, of_parameter, of_gradient) in strides.items():
        if 0 in shape or not is_dense(shape, of_parameter):
            continue
        if exact:
            assert of_parameter == of_gradient, name
        else:
            pairs = zip(shape, of_parameter, of_gradient, strict=True)
            assert all(one == two for size, one, two in pairs if size > 1), name


def is_dense(shape: Any, strides: Any) -> bool:
    """Whether the elements fill memory without gap or overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
