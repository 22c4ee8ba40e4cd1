"""What people met around the wrapper: the module inside it, its attributes, its state, wrappers inside wrappers."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from allstep import DistributedDataParallel
from allstep.checkpoint.weights import read_weights, restore_weights, write_weights
from allstep.errors import UnusedParametersError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Model(nn.Module):
    """With a configuration, and methods of its own."""

    hidden = 4

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.config = {"hidden": self.hidden, "labels": ["a", "b"]}
        self.nothing = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encode(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).tanh()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


# ---- training through the module inside

WAYS = {
    "the module": lambda model, x: model.module(x).square().mean(),
    "a method of the module": lambda model, x: model.module.loss(x),
    "a method through the wrapper": lambda model, x: model.loss(x),
    "its forward": lambda model, x: model.module.forward(x).square().mean(),
    "its parts": lambda model, x: model.head(model.norm(model.encode(x))).square().mean(),
}


def through_the_module(rank, size, way, accumulate, with_wrapper):
    """Three steps; with `with_wrapper` every other forward is the wrapper's."""
    net = Model()
    model = DistributedDataParallel(net)
    seen, words = [], []
    for step in range(3):
        plain = with_wrapper and step % 2 == 0
        forward = (lambda model, x: model(x).square().mean()) if plain else WAYS[way]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if accumulate:
                with model.no_sync():
                    model(batch(rank, step + 40)).square().mean().backward()
            forward(model, batch(rank, step)).backward()
            model.generate(batch(rank, 7))
        words.append([str(warning.message) for warning in caught])
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen, words


@pytest.mark.parametrize(
    ("accumulate", "with_wrapper"), [(False, False), (False, True), (True, False)], ids=["alone", "in turn", "windows"]
)
@pytest.mark.parametrize("way", WAYS)
def test_training_through_the_inner_module_is_reduced_or_said(ranks, way, accumulate, with_wrapper):
    """A forward of the module itself, of a method of it, or of its parts, instead of the wrapper's, and a backward.

    Replicas never become independent in silence: gradients are the mean over ranks in that step, or, where a window was begun
    under no_sync, an error or warning says so before the optimizer steps. What runs without gradients is let alone.
    """

    def run(rank: int, step: int) -> nn.Module:
        net = Model()
        if accumulate:
            net(batch(rank, step + 40)).square().mean().backward()
        net(batch(rank, step)).square().mean().backward()
        return net

    (first, words), (second, others) = ranks.run(through_the_module, way, accumulate, with_wrapper)
    for step in range(3):
        if words[step]:
            assert others[step]
            assert all("module" in word for word in words[step])
            continue
        assert_mean([first[step], second[step]], mean_of_ranks(2, lambda rank, step=step: run(rank, step)))


def part_only(rank, size, flag):
    net = Model()
    model = DistributedDataParallel(net, find_unused_parameters=flag)
    try:
        model.encode(batch(rank, 0)).square().mean().backward()
    except UnusedParametersError as error:
        return str(error)
    return gradients_of(net)


@pytest.mark.parametrize("flag", [False, None])
def test_training_a_part_of_the_module_is_as_with_unused_parameters(ranks, flag):
    """A method that uses some of the parameters: the others are named, or, with the flag, left without a gradient."""

    def run(rank: int) -> nn.Module:
        net = Model()
        net.encode(batch(rank, 0)).square().mean().backward()
        return net

    results: list[Any] = ranks.run(part_only, flag)
    if flag is None:
        assert_mean(results, mean_of_ranks(2, run))
    else:
        assert all("head.weight" in word and "encoder" not in word for word in results)


# ---- attributes


def attributes(rank, size):
    net = Model()
    model = DistributedDataParallel(net)
    net.later = "added"
    generated = model.generate(batch(rank, 0))
    words = []
    for name in ("no_such_thing", "_private", "generates"):
        try:
            getattr(model, name)
        except AttributeError as error:
            words.append(str(error))
    return {
        "read": [model.config, model.hidden, model.size, model.nothing, model.later, model.encoder is net.encoder],
        "generated": torch.equal(generated, net.generate(batch(rank, 0))),
        "has": [hasattr(model, name) for name in ("config", "generate", "no_such_thing", "_private", "shape", "__len__")],
        "own": [model.module is net, isinstance(model, DistributedDataParallel), callable(model.no_sync)],
        "default": getattr(model, "no_such_thing", 3),
        "words": words,
        "listed": "config" in dir(model.module),
    }


def test_attributes_and_methods_of_the_module_are_read_through_the_wrapper(ranks):
    """Configuration, methods, properties, class attributes, and what is set later, as on the bare model.

    What neither has stays missing, with both names in the error; the wrapper's own attributes are its own.
    """
    for found in ranks.run(attributes):
        assert found["read"] == [{"hidden": 4, "labels": ["a", "b"]}, 4, Model().size, None, "added", True]
        assert found["generated"]
        assert found["has"] == [True, True, False, False, False, False]
        assert found["own"] == [True, True, True]
        assert found["default"] == 3
        assert len(found["words"]) == 3
        assert all("Model" in word and "DistributedDataParallel" in word for word in found["words"])


class Failing(nn.Module):
    """A property of it raises an AttributeError of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @property
    def broken(self) -> int:
        return self.missing_part.size


def test_a_property_that_fails_inside_the_module_still_says_what_is_missing():
    """The name in the error is enough to find it, though it is not the one that was asked for."""
    with pytest.raises(AttributeError, match=r"broken|missing_part"):
        _ = DistributedDataParallel(Failing()).broken


# ---- state


def states(rank, size, folder):
    """Every way in which state goes from one of bare, wrapped and compiled to another; what does not load whole."""
    torch.manual_seed(rank)
    wrapped = DistributedDataParallel(Model(1))
    compiled = torch.compile(Model(2), backend="eager")
    around = torch.compile(DistributedDataParallel(Model(3)), backend="eager")
    inside = DistributedDataParallel(torch.compile(Model(4), backend="eager"))
    theirs = nn.parallel.DistributedDataParallel(Model(5))
    bare = Model(6)
    sources = {
        "bare": bare.state_dict(),
        "wrapped": wrapped.state_dict(),
        "compiled": compiled.state_dict(),
        "compiled around": around.state_dict(),
        "compiled inside": inside.state_dict(),
        "torch's": theirs.state_dict(),
    }
    trouble = []
    for name, state in sources.items():
        expected = [value.clone() for value in state.values()]
        for target in (DistributedDataParallel(Model(7)), DistributedDataParallel(torch.compile(Model(8), backend="eager"))):
            kept = dict(state)
            said = target.load_state_dict(state, strict=True)
            found = list(target.state_dict().values())
            if said.missing_keys or said.unexpected_keys or dict(state).keys() != kept.keys():
                trouble.append((name, str(said)))
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                trouble.append((name, "values"))
    bare.load_state_dict(wrapped.module.state_dict(), strict=True)
    prefixed = wrapped.state_dict()
    consume_prefix_in_state_dict_if_present(prefixed, "module.")
    bare.load_state_dict(prefixed, strict=True)
    theirs.load_state_dict(wrapped.state_dict(), strict=True)
    wrong = wrapped.state_dict()
    wrong["module.extra"] = wrong.pop("module.head.bias")
    try:
        wrapped.load_state_dict(wrong)
    except RuntimeError as error:
        trouble.append(("wrong", "module.head.bias" in str(error) and "module.extra" in str(error)))
    own = folder / f"rank-{rank}"
    own.mkdir()
    write_weights(wrapped, own)
    saved = read_weights(own)
    restore_weights(Model(9), saved, own)
    restore_weights(DistributedDataParallel(Model(9)), saved, own)
    return trouble, list(wrapped.state_dict()), list(saved)


def test_state_goes_from_bare_to_wrapped_and_back(ranks, tmp_path):
    """State of bare, wrapped and compiled modules, and of torch's wrapper, loads strictly into a wrapper around either.

    The wrapper's own keys are torch's; `.module.state_dict()` is the bare model's; files that are written have no prefix and
    load into both. Keys that really differ are still an error.
    """
    bare = list(Model().state_dict())
    for trouble, keys, saved in ranks.run(states, tmp_path):
        assert trouble == [("wrong", True)]
        assert keys == [f"module.{name}" for name in bare]
        assert sorted(saved) == sorted(bare)


class HasModule(nn.Module):
    """Its own part is named as a wrapper's is."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("wrap", [lambda net: net, DistributedDataParallel], ids=["bare", "wrapped"])
def test_a_part_that_is_itself_called_module_is_not_mistaken_for_a_wrapper(wrap):
    """Names that look like a wrapper's prefix belong to the model where it has them."""
    source = HasModule()
    target = DistributedDataParallel(HasModule())
    target.load_state_dict(wrap(source).state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters(), strict=True))


# ---- wrappers inside wrappers


class Outer(nn.Module):
    """Parts of which some are wrapped already."""

    def __init__(self, wrap) -> None:
        super().__init__()
        torch.manual_seed(3)
        parts = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)]
        self.parts = nn.ModuleList(wrap(part) if number in (0, 2) else part for number, part in enumerate(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


def plain(part: nn.Module) -> nn.Module:
    return part


def nested_model(kind: str, group: Any) -> nn.Module:
    if kind == "all wrapped twice":
        return DistributedDataParallel(Outer(plain))
    if kind == "own groups":
        return Outer(lambda part: DistributedDataParallel(part, process_group=group))
    return Outer(DistributedDataParallel)


def nested(rank, size, kind, flag):
    group = dist.new_group(list(range(size))) if kind == "own groups" else None
    try:
        net = nested_model(kind, group)
        model = DistributedDataParallel(net, find_unused_parameters=flag, bucket_cap_mb=1e-5)
        inner = [layer for layer in net.modules() if isinstance(layer, DistributedDataParallel)]
        seen, flags = [], []
        for step in range(3):
            inner[0].require_backward_grad_sync = step != 2
            try:
                with model.no_sync():
                    model(batch(rank, step + 40)).square().mean().backward()
                    flags.append([wrapper.require_backward_grad_sync for wrapper in (model, *inner)])
                    local = gradients_of(net)
                    if step == 1:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            flags.append([wrapper.require_backward_grad_sync for wrapper in (model, *inner)])
            inner[0].require_backward_grad_sync = True
            model(batch(rank, step)).square().mean().backward()
            seen.append((local, gradients_of(net)))
            model.zero_grad()
        return seen, flags
    finally:
        model = net = inner = None
        if group is not None:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("flag", [False, None])
@pytest.mark.parametrize("kind", ["some parts", "all wrapped twice", "own groups"])
def test_no_sync_reaches_the_wrappers_inside_and_gives_back_their_flags(ranks, kind, flag):
    """A wrapper around a model of which some parts, or all of it, are wrapped already, in the same group or in their own.

    no_sync on the outer one keeps every gradient on its rank, and leaves each wrapper's flag as it was, after an exception
    too; without it gradients are reduced once, and are those of one process.
    """

    def run(rank: int, numbers: tuple[int, ...]) -> nn.Module:
        net = Outer(plain)
        for number in numbers:
            net(batch(rank, number)).square().mean().backward()
        return net

    def renamed(gradients):
        return {name.replace("module.", ""): value for name, value in gradients.items()}

    results = ranks.run(nested, kind, flag)
    for rank, (seen, flags) in enumerate(results):
        inner = len(flags[0]) - 1
        assert inner == (1 if kind == "all wrapped twice" else 2)
        for step, (local, _) in enumerate(seen):
            alone = gradients_of(run(rank, (step + 40,)))
            assert_mean([renamed(local)], alone)
            assert flags[2 * step] == [False] * (inner + 1)
            assert flags[2 * step + 1] == [True, step != 2, *[True] * (inner - 1)]
    for step in range(3):
        expected = mean_of_ranks(2, lambda rank, step=step: run(rank, (step + 40, step)))
        assert_mean([renamed(seen[step][1]) for seen, _ in results], expected)


# ---- nothing to train


def frozen(rank, size):
    net = Model().requires_grad_(False)
    try:
        DistributedDataParallel(net)
    except RuntimeError as error:
        word = str(error)
    net.head.requires_grad_(True)  # the group is still of use
    model = DistributedDataParallel(net)
    model(batch(rank, 0)).square().mean().backward()
    return word, net.head.weight.grad.clone()


def test_a_module_without_anything_to_train_is_one_plain_error(ranks):
    """A frozen network is wrapped, as one that only computes a loss is; every rank reads what to do instead, and can go on."""
    (word, gradient), (other, there) = ranks.run(frozen)
    assert word == other
    assert "Model has no parameter that requires a gradient" in word
    assert "without the wrapper" in word
    assert torch.equal(gradient, there)
