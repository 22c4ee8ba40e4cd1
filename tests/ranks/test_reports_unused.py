"""What people met with parameters that get no gradient: who says so, when, and what the others' gradients are then."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.errors import UnusedParametersError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Layers(nn.Module):
    """Four layers, of which a forward uses those it is told to; one of them hides deep in a tree."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tree = nn.ModuleDict({"branch": nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])})

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        layers = {"1": self.first, "2": self.second, "3": self.third, "t": self.tree["branch"][0]}
        for name in used:
            x = layers[name](x).tanh()
        return x


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


# ---- with the flag off


def trains_strictly(rank, size, windows, options):
    """Each window is a list of micro-batches, each the layers that it uses. What was said, and whether weights moved."""
    net = Layers()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for number, window in enumerate(windows):
        before = [p.detach().clone() for p in net.parameters()]
        word = None
        try:
            with model.no_sync():
                for used in window[:-1]:
                    model(batch(rank, number), used).square().mean().backward()
            model(batch(rank, number), window[-1]).square().mean().backward()
            optimizer.step()
        except UnusedParametersError as error:
            word = str(error)
        moved = any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        told.append((word, moved, gradients_of(net)))
        optimizer.zero_grad()
    return told


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
@pytest.mark.parametrize(
    ("windows", "lacking", "names"),
    [
        ([["123"], ["123t"]], [0], ["tree.branch.0.0.weight", "tree.branch.0.0.bias"]),
        ([["123t"], ["13t"], ["123t"]], [1], ["second.weight", "second.bias"]),
        ([["123t"], ["123t"], ["2"]], [2], ["first.weight", "third.bias", "tree.branch.0.0.weight"]),
        ([["123t", "12"], ["12", "2", "2"]], [1], ["third.weight", "tree.branch.0.0.bias"]),
        ([["1", "2", "3t"]], [], []),
    ],
    ids=["from the first step on", "in a later step", "most of them", "in a whole window", "in parts of a window only"],
)
def test_a_parameter_without_gradient_is_named_in_the_same_step(ranks, windows, lacking, names, options):
    """A layer gets no gradient, flag off: in the first step or a later one, at any depth, in a window of several micro-batches.

    The error comes in the backward of that very step, on every rank, with the full path of each parameter, the ranks and what
    to set; the optimizer has not moved, gradients are not left as each rank's own, and the steps before and after are right.
    """
    first, second = ranks.run(trains_strictly, windows, options)
    for number, window in enumerate(windows):
        for word, moved, _ in (first[number], second[number]):
            assert (word is not None) == (number in lacking)
            assert moved == (number not in lacking)
            if number not in lacking:
                continue
            assert all(name in word for name in names)
            assert "Not used in forward on rank(s) 0, 1" in word
            assert "find_unused_parameters" in word
            used = {"1": "first", "2": "second", "3": "third", "t": "tree"}
            assert not any(f"{used[letter]}." in word for letter in set("".join(window)))
        (_, _, mine), (_, _, other) = first[number], second[number]
        for name, value in mine.items():
            assert (value is None) == (other[name] is None)
            assert value is None or torch.equal(value, other[name]), name


# ---- which outputs are searched


@dataclass
class Output:
    loss: torch.Tensor
    aux: Any


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    aux: Any
    note: str = "text"


class LibraryOutput(OrderedDict):
    """A dict with attributes, as model libraries return."""

    def __getattr__(self, name):
        return self[name]


class Plain:
    def __init__(self, loss, aux):
        self.loss, self.aux, self.itself = loss, aux, self


class Slots:
    __slots__ = ("aux", "loss", "never_set")

    def __init__(self, loss, aux):
        self.loss, self.aux = loss, aux


class MoreSlots(Slots):
    __slots__ = ("more",)


Named = namedtuple("Named", ["loss", "aux"])


class Opaque:
    """Keeps its tensors where nobody can look."""

    __slots__ = ("get",)

    def __init__(self, loss, aux):
        self.get = lambda: (loss, aux)


OUTPUTS = {
    "tuple": lambda loss, aux: (loss, aux),
    "dict": lambda loss, aux: {"loss": loss, "aux": aux},
    "dataclass": Output,
    "frozen dataclass": Frozen,
    "dataclass in a dataclass": lambda loss, aux: Output(loss, Output(aux, None)),
    "library output": lambda loss, aux: LibraryOutput(loss=loss, aux=aux),
    "named tuple": Named,
    "nested lists": lambda loss, aux: [[loss], [[None, [aux]]]],
    "deque": lambda loss, aux: deque([loss, aux]),
    "plain object": Plain,
    "namespace": lambda loss, aux: SimpleNamespace(loss=loss, aux=aux),
    "slots": Slots,
    "inherited slots": MoreSlots,
    "all kinds": lambda loss, aux: {"a": [Plain(Named(loss, 1), Output(Slots(aux, "text"), None))]},
    "opaque": Opaque,
    "opaque in part": lambda loss, aux: (loss, Opaque(aux, None)),
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that the test itself has put into an output."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Opaque):
        return [t for t in value.get() if t is not None]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple, deque)):
        return [t for item in value for t in tensors_of(item)]
    found = [getattr(value, name) for name in ("loss", "aux") if hasattr(value, name)]
    return [t for item in found for t in tensors_of(item)]


class Toggled(nn.Module):
    """A trunk, and two branches of which a forward uses one; the result is wrapped in whatever `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.aux = nn.Linear(4, 1)
        self.kind = kind

    def forward(self, x: torch.Tensor, branch: int) -> Any:
        x = self.trunk(x).tanh()
        return OUTPUTS[self.kind](self.branches[branch](x).square().mean(), self.aux(x).mean())


def toggles(rank, size, kind, flag):
    """Two steps, a branch each; the gradients of each, or what was said."""
    net = Toggled(kind)
    model = DistributedDataParallel(net, find_unused_parameters=flag, bucket_cap_mb=1e-5)
    seen: list[Any] = []
    for step in range(2):
        try:
            sum(tensors_of(model(batch(rank, step), step))).backward()
            seen.append(gradients_of(net))
        except RuntimeError as error:
            seen.append(str(error))
        model.zero_grad()
    return seen


def toggled(step: int):
    def run(rank: int) -> nn.Module:
        net = Toggled("tuple")
        sum(tensors_of(net(batch(rank, step), step))).backward()
        return net

    return run


@pytest.mark.parametrize("flag", [True, None])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_found_in_whatever_holds_them(ranks, kind, flag):
    """A forward that uses now one branch, now another, returns its tensors inside some object, and the flag is on.

    Containers, dataclasses, objects with attributes or slots, and all of these nested, are searched: gradients are those of one
    process, and None for the branch that nobody used. Where nothing can be searched, that is known, and gradients are right all
    the same; where only a part is hidden, either they are right or an error says which parameter and that outputs hide tensors.
    """
    first, second = ranks.run(toggles, kind, flag)
    for step in range(2):
        found = (first[step], second[step])
        if kind == "opaque in part" and flag:
            for word in found:
                assert "'aux." in word
                assert "hides tensors" in word
                assert "find_unused_parameters=None" in word
            continue
        assert_mean(found, mean_of_ranks(2, toggled(step)))
        assert found[0][f"branches.{1 - step}.weight"] is None


# ---- what an optimizer makes of it


def decays(rank, size, options, set_to_none, steps):
    """Momentum and weight decay on a model with a layer that nobody uses."""
    net = Layers()
    model = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    unused = []
    for step in range(steps):
        model(batch(rank, step), "12t").square().mean().backward()
        unused.append(net.third.weight.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return {name: p.detach().clone() for name, p in net.named_parameters()}, unused


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": None},
        {"static_graph": True},
        {"find_unused_parameters": True, "static_graph": True},
        {"find_unused_parameters": None, "gradient_as_bucket_view": False},
    ],
    ids=["walk", "none", "static", "walk and static", "copies"],
)
def test_a_layer_that_nobody_uses_does_not_move_under_momentum_and_weight_decay(ranks, options, set_to_none):
    """A parameter that no rank uses, and an optimizer that moves whatever has a gradient, be it zero.

    None stays None, so its weights keep every bit; the others are those of one process.
    """
    results = ranks.run(decays, options, set_to_none, 4)
    start, alone = Layers(), Layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        sum(alone(batch(rank, step), "12t").square().mean() for rank in range(2)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    for weights, unused in results:
        assert unused == [None] * 4
        assert torch.equal(weights["third.weight"], start.third.weight)
        assert torch.equal(weights["third.bias"], start.third.bias)
        for name, p in alone.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])


# ---- outputs that do not enter the loss


class Heads(nn.Module):
    """Two heads that are returned, and a layer that no forward uses."""

    def __init__(self, dead: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        if dead:
            self.dead = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.a(x), self.b(x)


def half_of_the_outputs(rank, size, options, dead, keep):
    net = Heads(dead)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen: list[Any] = []
    for step in range(2):
        try:
            if keep:
                a, _kept = model(batch(rank, step))
            else:
                a = model(batch(rank, step))[0]
            a.square().mean().backward()
            seen.append(gradients_of(net))
        except UnusedParametersError as error:
            seen.append(str(error))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("keep", [True, False], ids=["both kept", "one dropped"])
@pytest.mark.parametrize("dead", [False, True], ids=["all used", "one layer dead"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"find_unused_parameters": None}], ids=str)
def test_an_output_that_does_not_enter_the_loss_is_told_from_a_layer_that_forward_does_not_use(ranks, options, dead, keep):
    """Only some of what forward returns enters the loss; the rest is kept by the caller, or thrown away.

    With a flag the gradients of the used path are right and the other head's are None. Without it, the error of that step says
    which parameters were used in forward by outputs that did not enter the loss, and, apart from them, which were not used.
    """
    results = ranks.run(half_of_the_outputs, options, dead, keep)
    for step in range(2):
        if options:

            def run(rank: int, step: int = step) -> nn.Module:
                net = Heads(dead)
                net(batch(rank, step))[0].square().mean().backward()
                return net

            assert_mean([result[step] for result in results], mean_of_ranks(2, run))
            continue
        for result in results:
            sentence = (
                "Used in forward on rank(s) 0, 1, but the outputs that use them did not enter the loss: b.weight, b.bias."
            )
            assert sentence in result[step]
            assert ("Not used in forward on rank(s) 0, 1: dead.weight, dead.bias." in result[step]) == dead
            assert "a.weight" not in result[step]
            assert "trunk" not in result[step]


# ---- ranks that use different parts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(5))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.trunk(x)
        return sum(self.experts[index](x) for index in used).square().mean()


def routes(rank, size, options, used_of_rank):
    net = Experts()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen: list[Any] = []
    for step in range(2):
        try:
            model(batch(rank, step), used_of_rank[rank]).backward()
            seen.append(gradients_of(net))
        except UnusedParametersError as error:
            seen.append(str(error))
        model.zero_grad()
    return seen


ROUTES = [[[0], [1], [2], [3]], [[0, 1], [1, 2], [2, 3], [3, 0]], [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0]]]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"find_unused_parameters": None}], ids=["walk", "none"])
@pytest.mark.parametrize("used", ROUTES, ids=str)
def test_ranks_that_use_different_experts_sum_what_each_has(four_ranks, used, options):
    """Each rank sends its batch to other sub-modules than its peers, on four ranks.

    Gradients are equal on all ranks: the sum of what those who used a sub-module have, over the number of all ranks.
    """
    results = four_ranks.run(routes, options, used)
    for step in range(2):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Experts()
            net(batch(rank, step), used[rank]).backward()
            return net

        expected = mean_of_ranks(4, run)
        assert expected["experts.4.weight"] is None
        assert_mean([result[step] for result in results], expected)


@pytest.mark.parametrize("used", ROUTES, ids=str)
def test_with_the_flag_off_each_expert_is_named_with_the_ranks_that_lacked_it(four_ranks, used):
    """The same without a flag: one error on every rank, with each parameter beside the ranks that did not use it."""
    for told in four_ranks.run(routes, {}, used):
        for word in told:
            for expert in range(5):
                lacking = [str(rank) for rank in range(4) if expert not in used[rank]]
                if not lacking:
                    assert f"experts.{expert}." not in word
                    continue
                (sentence,) = [part for part in word.split(". ") if f"experts.{expert}.weight" in part]
                assert sentence.startswith(f"Not used in forward on rank(s) {', '.join(lacking)}: ")
                assert f"experts.{expert}.bias" in sentence
            assert "trunk" not in word
