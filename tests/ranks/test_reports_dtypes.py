"""Gradients of every dtype, shape and stride: exact where they can be, in time, without a warning, and once in memory."""

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


def batch(rank: int, step: int, width: int = 4) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


# ---- complex numbers


class Spectral(nn.Module):
    """Complex weights of two dtypes between real ones, and complex buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.after = nn.Linear(4, 2)
        self.register_buffer("window", torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = self.before(x).to(torch.complex64) @ self.weight * self.window + self.phase
        return self.after((spectrum.to(torch.complex128) * self.scale).abs().square().float())


def spectral(rank, size, options, accumulate):
    """The ranks begin with different weights, which become rank 0's."""
    net = Spectral(rank)
    model = DistributedDataParallel(net, **options)
    start = {name: value.detach().clone() for name, value in [*net.named_parameters(), *net.named_buffers()]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seen = []
    for step in range(3):
        if accumulate:
            with model.no_sync():
                model(batch(rank, step + 40)).mean().backward()
        model(batch(rank, step)).mean().backward()
        seen.append(gradients_of(net))
        optimizer.step()
        optimizer.zero_grad()
    return start, seen, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("accumulate", [False, True], ids=["single", "window"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}],
    ids=["default", "tiny caps", "copies", "walk"],
)
def test_complex_parameters_keep_their_imaginary_gradients(ranks, options, accumulate):
    """Complex weights beside real ones: matrices, vectors, single numbers, in two dtypes, and buffers.

    They begin as rank 0's on every rank; real and imaginary gradients are those of one process, and so is training.
    """
    results = ranks.run(spectral, options, accumulate)
    alone = Spectral(0)
    for start, _, _ in results:
        for name, value in [*alone.named_parameters(), *alone.named_buffers()]:
            assert torch.equal(start[name], value.detach()), name
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.001)
    for step in range(3):
        for rank in range(2):
            for number in (step + 40, step) if accumulate else (step,):
                (alone(batch(rank, number)).mean() / 2).backward()
        assert_mean([seen[step] for _, seen, _ in results], gradients_of(alone), rtol=1e-4, atol=1e-5)
        for name in ("weight", "scale", "phase"):
            assert results[0][1][step][name].imag.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


# ---- half precision


class Half(nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def half_precision(rank, size, dtype, values, options):
    net = Half(dtype, values.shape[1])
    DistributedDataParallel(net, **options)(values[rank]).backward()
    return net.weight.grad.clone()


OPTIONS = [{}, {"gradient_as_bucket_view": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=["views", "copies"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_a_mean_in_half_precision_is_rounded_once_and_never_overflows(ranks, four_ranks, size, dtype, options):
    """Gradients near the largest number of their dtype, tiny ones, and such as nearly cancel, on two ranks and four.

    Each mean is the float32 mean, rounded, to one unit in the last place; a sum that would overflow does not.
    """
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(size, 400, generator=generator)
    cancelling = plain.clone()
    cancelling[-1] = -plain[:-1].sum(0) + torch.randn(400, generator=generator) / 50
    large = torch.full((size, 8), 40000.0)
    large[:, 4:] = torch.finfo(torch.float16).max
    small = torch.randn(size, 50, generator=generator) * 1e-4
    values = torch.cat([plain, cancelling, large, small], 1).to(dtype)
    results = (ranks if size == 2 else four_ranks).run(half_precision, dtype, values, options)
    mean = values.double().mean(0)
    expected = mean.to(dtype)
    for gradient in results:
        assert torch.equal(gradient, results[0])
        assert torch.isfinite(gradient).all()
        away = (gradient.double() - expected.double()).abs()
        unit = torch.nextafter(expected.abs(), torch.full_like(expected, torch.inf)).double() - expected.abs().double()
        finite = torch.isfinite(unit)  # beyond the largest number there is no next one
        assert torch.all(away[finite] <= unit[finite])
        assert torch.all(away[~finite] <= 32)


# ---- dtypes that stand alone


class Motley(nn.Module):
    """Layers of several dtypes, a number of its own dtype here and there, parameters without elements, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(kind) for kind in kinds)
        self.lone_half = nn.Parameter(torch.tensor(0.5, dtype=torch.float16))
        self.lone_double = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(3, 0, 2))
        self.empty_double = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.frozen_half = nn.Parameter(torch.tensor(2.0, dtype=torch.float16), requires_grad=False)
        self.frozen_numbers = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        nothing = self.empty.sum() + self.empty_double.sum()
        return x * self.lone_half * self.lone_double * self.frozen_half + nothing + self.frozen_numbers.sum()


def motley(rank, size, options):
    net = Motley()
    model = DistributedDataParallel(net, **options)
    seen = []
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("cap", [1e-6, 1e-4, 25])
@pytest.mark.parametrize("options", OPTIONS, ids=["views", "copies"])
def test_a_parameter_of_a_dtype_of_its_own_holds_up_no_other(ranks, options, cap):
    """One model with four floating dtypes, single numbers and empty parameters among them, and frozen ones of any dtype.

    With buckets of any size nothing waits for ever: each gradient is that of one process, in its own dtype and shape.
    """

    def run(rank: int, step: int) -> nn.Module:
        net = Motley()
        net(batch(rank, step)).square().mean().backward()
        return net

    results = ranks.run(motley, {**options, "bucket_cap_mb": cap})
    kinds = {name: (p.dtype, p.shape) for name, p in Motley().named_parameters()}
    for step in range(3):
        first, second = results[0][step], results[1][step]
        for name, value in mean_of_ranks(2, lambda rank, step=step: run(rank, step)).items():
            assert (first[name] is None) == (value is None) == name.startswith("frozen"), name
            if value is not None:
                assert (first[name].dtype, first[name].shape) == kinds[name]
                assert torch.equal(first[name], second[name])
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(value.dtype, 1e-5)
                torch.testing.assert_close(first[name], value, rtol=tolerance, atol=1e-5)


# ---- strides


class Strided(nn.Module):
    """Convolutions with channels last, among them 1x1 and depthwise ones, and weights that lie turned in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.images = nn.Sequential(
            nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 1, 1), nn.Conv2d(1, 4, (1, 3)), nn.Tanh()
        ).to(memory_format=torch.channels_last)
        self.volumes = nn.Conv3d(4, 2, 1).to(memory_format=torch.channels_last_3d)
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.single = nn.Parameter(torch.randn(1, 3, 1).transpose(0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :, None, None].expand(-1, -1, 6, 6).contiguous(memory_format=torch.channels_last)
        volume = self.volumes(self.images(image)[:, :, None]).mean((2, 3, 4))
        return (volume @ self.turned) * self.single.flatten()


def strided(rank, size, options):
    """Any warning is an error here."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = Strided()
            model = DistributedDataParallel(net, **options)
            seen, strides = [], set()
            for step in range(3):
                model(batch(rank, step)).square().mean().backward()
                seen.append(gradients_of(net))
                strides |= {(name, p.shape, p.stride(), p.grad.stride()) for name, p in net.named_parameters()}
                model.zero_grad(set_to_none=step == 1)
            return seen, strides
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("options", [*OPTIONS, {"bucket_cap_mb": 1e-6}], ids=["views", "copies", "tiny caps"])
def test_gradients_lie_in_memory_as_their_parameters_do_and_no_warning_is_seen(ranks, options):
    """Parameters whose memory is dense but in another order: channels last, transposed, dimensions of one.

    Gradients are those of one process, have the strides of their parameters, and nothing warns.
    """
    results = ranks.run(strided, options)
    for step in range(3):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Strided()
            net(batch(rank, step)).square().mean().backward()
            return net

        assert_mean([seen[step] for seen, _ in results], mean_of_ranks(2, run), rtol=1e-4)
    for _, strides in results:
        for name, shape, of_parameter, of_gradient in strides:
            if options.get("gradient_as_bucket_view", True):
                assert of_parameter == of_gradient, name
            else:  # autograd's own tensors; the stride of a dimension of one says nothing
                pairs = zip(shape, of_parameter, of_gradient, strict=True)
                assert all(one == two for size, one, two in pairs if size > 1), name


# ---- memory


def wide() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def bytes_alive() -> int:
    """Of all storages that any tensor of this process holds, gradients too."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]  # a compiler's have no memory
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def in_memory(rank, size, options, set_to_none):
    """Bytes that are alive beside parameters and gradients after the last step; and the gradients of each."""
    net = wide()
    before = bytes_alive()
    model = DistributedDataParallel(net, bucket_cap_mb=0.05, **options)
    seen = []
    for step, to_none in enumerate([*set_to_none, True]):
        model(batch(rank, step, 64)).square().mean().backward()
        seen.append(gradients_of(net))
        if step == len(set_to_none):
            break
        model.zero_grad(set_to_none=to_none)
        if step == 2:
            for p in net.parameters():  # as some optimizers and loops do
                p.grad = None if p.grad is None else p.grad.detach().clone()
    gradients = sum(p.grad.nbytes for p in net.parameters())
    held = sum(gradient.nbytes for each in seen for gradient in each.values())
    largest = max(bucket.nbytes for bucket in model.bucket_layout.buckets)
    return bytes_alive() - before - gradients - held, gradients, largest, seen


@pytest.mark.parametrize("set_to_none", [[True] * 4, [False] * 4, [True, False] * 2, [False, True, True, False]], ids=str)
@pytest.mark.parametrize("views", [True, False])
def test_gradients_exist_once_in_memory_however_they_are_zeroed(ranks, views, set_to_none):
    """`.grad` is zeroed in place, set to None, or replaced by another tensor, in any order of these.

    Gradients are those of one process each time. With views, what the wrapper keeps beside them is at most a twentieth of
    their bytes; otherwise at most their bytes and one bucket.
    """
    results = ranks.run(in_memory, {"gradient_as_bucket_view": views}, set_to_none)
    for step in range(len(set_to_none) + 1):

        def run(rank: int, step: int = step) -> nn.Module:
            net = wide()
            net(batch(rank, step, 64)).square().mean().backward()
            return net

        assert_mean([seen[step] for *_, seen in results], mean_of_ranks(2, run))
    for extra, gradients, largest, _ in results:
        allowed = gradients * 0.05 if views else gradients * 1.001 + largest
        assert 0 <= extra <= allowed, (extra, gradients)


# ---- sizes of buckets


def layouts(rank, size, caps, width):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 4 * width))
    found: list[Any] = []
    for cap in caps:
        model = DistributedDataParallel(net, bucket_cap_mb=cap)
        buckets = [
            (bucket.gradients * bucket.itemsize, [slot.name for slot in bucket.slots]) for bucket in model.bucket_layout.buckets
        ]
        found.append((buckets, str(model.bucket_layout)))
        model.release()
    return found, {name: p.numel() * p.element_size() for name, p in net.named_parameters()}


def test_bucket_sizes_are_what_was_asked_for_and_can_be_read(ranks):
    """Caps of 1, 25 and 200 MiB and the default, on a model of 40 MB with a parameter of 16 MB.

    No bucket is larger than its cap, unless it holds one single parameter; neighbours that would fit together are together;
    every parameter is in one bucket; and the layout lists bucket, bytes and names, the same on every rank.
    """
    caps = [1, 25, 200, None]
    (found, sizes), (there, _) = ranks.run(layouts, caps, 1024)
    assert found == there
    for cap, (buckets, text) in zip(caps, found, strict=True):
        limit = (5 if cap is None else cap) * 2**20
        assert sorted(name for _, names in buckets for name in names) == sorted(sizes)
        for number, (nbytes, names) in enumerate(buckets):
            assert nbytes == sum(sizes[name] for name in names)
            assert nbytes <= limit or len(names) == 1
            assert f"bucket {number}: " in text
            assert all(name in text for name in names)
        if cap is not None:
            for (one, _), (_, names) in itertools.pairwise(buckets[:-1]):
                assert one + sizes[names[0]] > limit
        else:
            assert all(nbytes <= 2**20 or len(names) == 1 for nbytes, names in (buckets[0], buckets[-1]))
    assert len(found[2][0]) == 1  # the whole model in one bucket
