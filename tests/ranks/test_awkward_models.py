"""Models that are hard on an engine: the gradients of each are the mean of those of one process, whatever the settings."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel


class Shared(nn.Module):
    """One weight under two names, in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.hidden(self.embed(x)).tanh())


class Frozen(nn.Module):
    """Frozen layers at the beginning, in the middle, and a lone frozen number of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.layers[0].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return self.layers(x) * self.number.float()


class Sizes(nn.Module):
    """Parameters without elements, without dimensions, with one element; and one that is large beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1, 1, 1))
        self.large = nn.Parameter(torch.randn(4, 500) / 10)
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(60))

    def forward(self, x):
        out = (x @ self.large) * self.scalar + self.one[0] + self.empty.sum()
        return out + sum(number * (index % 3) for index, number in enumerate(self.tiny))


class Dtypes(nn.Module):
    """Layers of four floating dtypes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(kind) for kind in kinds)
        self.lone = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float() * self.lone.float()


class AllHalf(nn.Module):
    """No float32 parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(torch.bfloat16)

    def forward(self, x):
        return self.layers(x.bfloat16()).float()


class ChannelsLast(nn.Module):
    """Convolutions whose memory runs over channels first, 1x1 and depthwise among them, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        )
        self.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x):
        image = x[:, :2, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.convolutions(image).mean((2, 3)) @ self.turned


class Complex(nn.Module):
    """Complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.doubles = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x):
        spectrum = (self.before(x).to(torch.complex64) @ self.weight) * self.doubles.to(torch.complex64)
        return self.after(spectrum.abs().square())


class Gapped(nn.Module):
    """A parameter whose memory has gaps: its gradient cannot have the same strides."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.rest = nn.Linear(3, 1)

    def forward(self, x):
        return self.rest(x @ self.columns)


MODELS = {model.__name__: model for model in (Shared, Frozen, Sizes, Dtypes, AllHalf, ChannelsLast, Complex, Gapped)}
OPTIONS = {
    "default": {},
    "tiny caps": {"bucket_cap_mb": 1e-6},
    "walk": {"find_unused_parameters": True, "bucket_cap_mb": 1e-4},
    "own gradients": {"gradient_as_bucket_view": False, "bucket_cap_mb": 1e-4},
}


def make(name: str) -> nn.Module:
    torch.manual_seed(8)
    return MODELS[name]()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def train(rank, size, name, options, weighted):
    """Three windows of two micro-batches; `weighted` gives rank 1's three times the weight."""
    net = make(name)
    model = DistributedDataParallel(net, **options)
    share = [1.0, 3.0][rank] if weighted else 1.0
    seen, strides = [], []
    for window in range(3):
        with model.no_sync():
            (model(batch(rank, 2 * window)).square().mean() * share).backward()
        loss = model(batch(rank, 2 * window + 1)).square().mean() * share
        if weighted:
            model.weigh(share)
        loss.backward()
        seen.append(gradients(net))
        strides += [(n, p.stride(), p.grad.stride()) for n, p in net.named_parameters() if p.grad is not None]
        model.zero_grad(set_to_none=window != 1)
    return seen, strides


def reference(name, window, weighted):
    """In float64, so that what is left between us is the engine's own rounding."""
    shares = [0.25, 0.75] if weighted else [0.5, 0.5]
    total = {}
    for rank in range(2):
        model = make(name)
        for step in (2 * window, 2 * window + 1):
            model(batch(rank, step)).square().mean().backward()
        for key, value in gradients(model).items():
            if value is not None:
                wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
                total[key] = total.get(key, 0) + wide * shares[rank]
    return total


TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(ranks, name, options, weighted):
    (first, strides), (second, _) = ranks.run(train, name, options, weighted)
    for window in range(3):
        expected = reference(name, window, weighted)
        assert {key for key, value in first[window].items() if value is not None} == expected.keys()
        for key, value in expected.items():
            mine = first[window][key]
            assert torch.equal(mine, second[window][key]), key
            assert mine.shape == value.shape
            # in a chain of half-precision layers a loss times three rounds otherwise on its way back, in every dtype
            tolerance = 3e-2 if name == "Dtypes" and weighted else TOLERANCE.get(mine.dtype, 1e-5)
            largest = value.abs().max() if value.numel() else 0
            assert torch.all((mine.to(value.dtype) - value).abs() <= tolerance * largest), key
    if name != "Gapped":
        for key, of_parameter, of_gradient in strides:
            assert of_parameter == of_gradient, key


def large_half(rank, size, views):
    weight = nn.ParameterDict({"w": torch.zeros(3, dtype=torch.float16)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return (self.weight["w"] * x).sum()

    model = DistributedDataParallel(Net(), gradient_as_bucket_view=views)
    model(torch.full((3,), 40000.0, dtype=torch.float16)).backward()
    return weight["w"].grad.clone()


@pytest.mark.parametrize("views", [True, False])
def test_a_sum_of_half_precision_gradients_does_not_overflow(ranks, views):
    for gradient in ranks.run(large_half, views):
        assert gradient.tolist() == [40000.0] * 3


def optimized(rank, size, name):
    """Weights after three fused AdamW steps, whose loops need gradients with the strides of their parameters."""
    net = make(name)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("name", ["ChannelsLast", "Sizes", "Shared"])
def test_a_fused_optimizer_takes_the_gradients(ranks, name):
    first, second = ranks.run(optimized, name)
    net = make(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        sum(net(batch(rank, step)).square().mean() for rank in range(2)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, other, expected in zip(first, second, net.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected.detach(), rtol=2e-4, atol=1e-4)


def kept_gradients(rank, size, own):
    """A parameter that nobody uses has a gradient of the user's, another on each rank."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model = DistributedDataParallel(Two(net), find_unused_parameters=None, gradient_as_bucket_view=own)
    net["unused"].weight.grad = torch.tensor([[1.0, 3.0]]) * (rank + 1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return net["unused"].weight.grad.clone(), net["unused"].bias.grad


class Two(nn.Module):
    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net["used"](x)


@pytest.mark.parametrize("views", [True, False])
def test_what_nobody_used_keeps_its_gradient_bit_for_bit_on_each_rank(ranks, views):
    for rank, (weight, bias) in enumerate(ranks.run(kept_gradients, views)):
        assert weight.tolist() == [[1.0 * (rank + 1), 3.0 * (rank + 1)]]
        assert bias is None


def frozen_later(rank, size, flag):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    torch.manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p)
    model = DistributedDataParallel(net, find_unused_parameters=flag)
    seen = []
    for step in range(3):
        if step == 1:
            net[1].requires_grad_(False)
        model(batch(rank, step)[:, :2]).square().mean().backward()
        seen.append(gradients(net))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("flag", [False, None, True])
def test_a_layer_that_is_frozen_after_wrapping_does_not_disturb_the_others(ranks, flag):
    first, second = ranks.run(frozen_later, flag)
    for step, (mine, other) in enumerate(zip(first, second, strict=True)):
        for key, value in mine.items():
            assert (value is None) == (step > 0 and key.startswith("1."))
            assert value is None or torch.equal(value, other[key])
