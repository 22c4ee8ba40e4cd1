"""What people met with unusual backwards: graphs of gradients, several backwards, two optimizers, layers in another order."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.errors import UnusedParametersError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Net(nn.Module):
    """A trunk and two heads; `shared` makes one head give both outputs."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.a = nn.Linear(4, 2)
        if not shared:
            self.b = nn.Linear(4, 2)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.a(x).chunk(2, 1) if self.shared else (self.a(x), self.b(x))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


# ---- gradients of gradients


def norm_penalty(model, rank, step):
    """Of the input's gradient, by autograd.grad."""
    x = batch(rank, step).requires_grad_()
    a, b = model(x)
    (gradient,) = torch.autograd.grad(a.sum(), x, create_graph=True)
    (a.square().mean() + b.mean() + gradient.square().sum()).backward()


def parameter_penalty(model, rank, step):
    """Of the parameters' gradients, by autograd.grad."""
    a, b = model(batch(rank, step))
    loss = a.square().mean() + b.square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def only_penalty(model, rank, step):
    """The loss itself is left out."""
    x = batch(rank, step).requires_grad_()
    a, b = model(x)
    (gradient,) = torch.autograd.grad((a.square() + b.square()).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def graph_kept(model, rank, step):
    """A graph of the gradients is asked for and not used."""
    a, b = model(batch(rank, step))
    (a.square().mean() + b.mean()).backward(create_graph=True)


PENALTIES = {f.__name__: f for f in (norm_penalty, parameter_penalty, only_penalty, graph_kept)}


def penalised(rank, size, kind, options, set_to_none):
    warnings.simplefilter("ignore")  # torch's, of reference cycles with create_graph
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen = []
    for step in range(3):
        PENALTIES[kind](model, rank, step)
        seen.append(gradients_of(net))
        model.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": None}, {"gradient_as_bucket_view": False}], ids=["none", "copies"]
)
@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_penalties_on_gradients_are_those_of_one_process(ranks, kind, options, set_to_none):
    """Gradients enter the loss: of inputs or parameters, beside the loss or alone, by autograd.grad; or a graph is only kept.

    What autograd.grad gives is this rank's own; the gradients in the end are those of one process, in every step.
    """
    if kind == "only_penalty":  # the last bias has no part in a gradient of the inputs
        options = {**options, "find_unused_parameters": None}
    results = ranks.run(penalised, kind, options, set_to_none)

    for step in range(3):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Net()
            PENALTIES[kind](net, rank, step)
            return net

        expected = mean_of_ranks(2, run)
        if step and not set_to_none:  # what zero_grad has filled with zeros stays that
            expected = {name: torch.zeros(()) if value is None else value for name, value in expected.items()}
        found = [result[step] for result in results]
        assert_mean(
            found, {name: value if value is None or value.dim() else found[0][name] for name, value in expected.items()}
        )


def second_backward(rank, size, options, way):
    """Differentiate through `.grad`, after it was averaged; what was said, and whether the next step is right."""
    warnings.simplefilter("ignore")
    net = Net()
    model = DistributedDataParallel(net, **options)
    word = ""
    a, b = model(batch(rank, 0))
    (a.square().mean() + b.mean()).backward(create_graph=True)
    try:
        norm = sum(p.grad.square().sum() for p in net.parameters())
        if way == "backward":
            norm.backward()
        else:
            torch.autograd.grad(norm, list(net.parameters()), allow_unused=True)
    except RuntimeError as error:
        word = str(error)
    model.zero_grad()
    a, b = model(batch(rank, 1))
    (a.square().mean() + b.mean()).backward()
    return word, gradients_of(net)


@pytest.mark.parametrize("way", ["backward", "grad"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
def test_to_differentiate_what_was_averaged_is_one_clear_error(ranks, options, way):
    """backward(create_graph=True), and then a derivative of the `.grad`s, which by now are means over ranks.

    No rank can have it, as the graphs of the other ranks are not there; the error says so, and names autograd.grad.
    """

    def run(rank: int) -> nn.Module:
        net = Net()
        a, b = net(batch(rank, 1))
        (a.square().mean() + b.mean()).backward()
        return net

    results = ranks.run(second_backward, options, way)
    for word, _ in results:
        assert "mean over ranks" in word
        assert "torch.autograd.grad" in word
    assert_mean([gradients for _, gradients in results], mean_of_ranks(2, run))


# ---- several backwards


def twice(model, rank, step):
    a, b = model(batch(rank, step))
    loss = a.square().mean() + b.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def three_times(model, rank, step):
    a, b = model(batch(rank, step))
    loss = a.square().mean() + b.square().mean()
    for number in range(3):
        loss.backward(retain_graph=number < 2)


def one_loss_after_the_other(model, rank, step):
    a, b = model(batch(rank, step))
    a.square().mean().backward(retain_graph=True)
    b.square().mean().backward()


def forwards_before_backwards(model, rank, step):
    losses = [sum(out.square().mean() for out in model(batch(rank, 50 + step + number))) for number in range(3)]
    for loss in losses:
        loss.backward()


BACKWARDS = {f.__name__: f for f in (twice, three_times, one_loss_after_the_other, forwards_before_backwards)}


def several(rank, size, kind, shared, options, accumulate):
    """Two windows; in each, an ordinary micro-batch under no_sync where that is asked for, and then the backwards of `kind`."""
    net = Net(shared)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen: list[Any] = []
    for step in range(2):
        try:
            if accumulate:
                with model.no_sync():
                    sum(out.mean() for out in model(batch(rank, 90 + step))).backward()
            BACKWARDS[kind](model, rank, step)
            seen.append(gradients_of(net))
        except UnusedParametersError as error:
            seen.append(str(error))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("accumulate", [False, True], ids=["alone", "in a window"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": None}, {"static_graph": True}],
    ids=["strict", "copies", "none", "static"],
)
@pytest.mark.parametrize("shared", [True, False], ids=["one head", "two heads"])
@pytest.mark.parametrize("kind", BACKWARDS)
def test_several_backwards_of_one_step_add_up_as_in_one_process(ranks, kind, shared, options, accumulate):
    """A retained graph is run backward again; or two losses of one forward, or three forwards, each have their own backward.

    Gradients are those of one process on every rank. Where each backward was promised a gradient of every parameter and one
    loss does not reach some, that is an error which names them; replicas never differ in silence.
    """
    results = ranks.run(several, kind, shared, options, accumulate)
    promised = "find_unused_parameters" not in options and "static_graph" not in options
    for step in range(2):
        found = [result[step] for result in results]
        if kind == "one_loss_after_the_other" and not shared and promised:
            missing = "a.weight, a.bias" if accumulate else "b.weight, b.bias"  # in the second backward, or in the first
            assert all(missing in word for word in found)
            continue
        if kind == "one_loss_after_the_other" and not shared and isinstance(found[0], str):
            assert "static_graph" in options
            assert all("got a gradient that was not expected" in word and "a." in word for word in found)
            continue

        def run(rank: int, step: int = step) -> nn.Module:
            net = Net(shared)
            if accumulate:
                sum(out.mean() for out in net(batch(rank, 90 + step))).backward()
            BACKWARDS[kind](net, rank, step)
            return net

        assert_mean(found, mean_of_ranks(2, run))


# ---- two sides of one model, with an optimizer each


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None, detach: bool) -> torch.Tensor:
        fake = self.generator(noise)
        if real is None:
            return self.critic(fake).mean()
        return self.critic(fake.detach() if detach else fake).mean() - self.critic(real).mean()


def in_turn(model, net, loss_of_both, way, steps):
    """Critic and generator in turn; the gradients that each optimizer was given, and those of the other side then."""
    sides = {"critic": net.critic, "generator": net.generator}
    optimizers = {name: torch.optim.Adam(side.parameters(), lr=0.02) for name, side in sides.items()}
    seen = []
    for step in range(steps):
        name, other = ("critic", "generator") if step % 2 == 0 else ("generator", "critic")
        optimizers[name].zero_grad()
        kept = [None if p.grad is None else p.grad.clone() for p in sides[other].parameters()]
        if way.startswith("frozen"):
            sides[other].requires_grad_(False)
        loss = loss_of_both(model, step, name, way)
        if way == "frozen in forward only":
            sides[other].requires_grad_(True)
        loss.backward()
        sides[other].requires_grad_(True)
        untouched = all(
            before is p.grad or (before is not None and torch.equal(before, p.grad))
            for before, p in zip(kept, sides[other].parameters(), strict=True)
        )
        seen.append(([p.grad.clone() for p in sides[name].parameters()], untouched))
        optimizers[name].step()
    return seen, [p.detach().clone() for p in net.parameters()]


def loss_on_rank(rank: int):
    def loss(model, step, name, way):
        noise, real = batch(rank, step)[:, :2], batch(rank, 100 + step)
        return model(noise, real, way == "detached") if name == "critic" else -model(noise, None, False)

    return loss


def train_gan(rank, size, way, options):
    net = Gan()
    return in_turn(DistributedDataParallel(net, bucket_cap_mb=1e-5, **options), net, loss_on_rank(rank), way, 20)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("frozen", {}),
        ("frozen", {"gradient_as_bucket_view": False}),
        ("frozen", {"find_unused_parameters": True}),
        ("frozen", {"find_unused_parameters": None}),
        ("frozen in forward only", {}),
        ("frozen in forward only", {"find_unused_parameters": None}),
        ("detached", {"find_unused_parameters": True}),
        ("detached", {"find_unused_parameters": None}),
        ("both get gradients", {}),
    ],
    ids=str,
)
def test_two_sides_of_one_model_are_trained_in_turn(ranks, way, options):
    """Two losses and two optimizers over one wrapper: the side whose turn it is not is frozen, cut off, or simply ignored.

    Twenty steps: each optimizer gets the gradients of one process, and what the other side had in `.grad` keeps every bit,
    where no gradient goes to it.
    """

    def mean_loss(model, step, name, way):
        return sum(loss_on_rank(rank)(model, step, name, way) for rank in range(2)) / 2

    net = Gan()
    expected, weights = in_turn(net, net, mean_loss, way, 20)
    results = ranks.run(train_gan, way, options)
    for seen, trained in results:
        for step, ((gradients, untouched), (reference, _)) in enumerate(zip(seen, expected, strict=True)):
            for mine, other in zip(gradients, reference, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
            reaches_other = way == "both get gradients" or (way == "detached" and step % 2 == 1)
            assert untouched or reaches_other
        for mine, other in zip(trained, weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


# ---- layers in another order on each rank


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x.square().mean()


def order_of(rank: int, step: int) -> list[int]:
    """Registration order on rank 0, reversed on rank 1, shuffled elsewhere; others in later steps."""
    order = list(range(6))
    if rank == 1:
        order.reverse()
    if rank > 1 or step > 1:
        random.Random(10 * rank + step).shuffle(order)
    return order


def train_ordered(rank, size, options):
    net = Ordered()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6, **options)
    seen = []
    for step in range(5):
        model(batch(rank, step), order_of(rank, step)).backward()
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen, model.collectives_per_bucket


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=["strict", "walk", "static"]
)
def test_ranks_may_run_their_layers_in_different_orders(four_ranks, options):
    """Layers of equal shape run in another order on each rank and in each step, with a bucket for each parameter.

    Buckets fill in different orders then, but collectives never meet others than their own: gradients are those of one process.
    """
    results = four_ranks.run(train_ordered, options)
    for step in range(5):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Ordered()
            net(batch(rank, step), order_of(rank, step)).backward()
            return net

        assert_mean([seen[step] for seen, _ in results], mean_of_ranks(4, run))
    assert all(len(collectives) >= 12 and len(set(collectives)) == 1 for _, collectives in results)
