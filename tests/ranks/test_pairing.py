"""Only reductions that belong together pair: what one rank does more than the others is an error that names it."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from allstep import DistributedDataParallel, SyncBatchNorm
from allstep.errors import RankFailedError, ReplicaError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

BACKENDS = ("gloo", "shm")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, with_side: bool = True) -> torch.Tensor:
        return self.body(x).tanh() + (self.side(x) if with_side else 0)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def once_more(rank, size, way, options):
    """In step 1 rank 0 runs a second backward on the same forward."""
    model = DistributedDataParallel(Net(), **options)
    words = []
    for step in range(3 if rank else 2):
        try:
            out = model(batch(rank, step))
            again = rank == 0 and step == 1
            out.square().mean().backward(retain_graph=again)
            words.append("fine")
            if again:
                (out.square() if way == "retain" else out.abs()).mean().backward()
                words.append("fine")
        except RankFailedError as error:
            words.append(str(error))
    return words


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": None}], ids=str)
@pytest.mark.parametrize("way", ["retain", "another loss"])
def test_a_backward_more_on_one_rank_does_not_pair_with_the_next_step(ranks, way, options):
    for words in ranks.run(once_more, way, options):
        assert words[:2] == ["fine", "fine"]
        assert (
            "in reduction 2, counted from 0: in it, rank(s) 0 ran a backward that is not the first one of its forward"
            in words[2]
        )


def deviate(rank, size):
    """With static_graph, rank 1 leaves out a layer in step 2; then both go on as before."""
    net = Net()
    model = DistributedDataParallel(net, static_graph=True, bucket_cap_mb=1e-5)
    seen = []
    for step in range(5):
        model(batch(rank, step), with_side=not (rank == 1 and step == 2)).square().mean().backward()
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


def test_a_static_graph_is_that_of_the_first_backward(ranks):
    first, second = ranks.run(deviate)
    for step in range(5):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Net()
            net(batch(rank, step), with_side=not (rank == 1 and step == 2)).square().mean().backward()
            return net

        assert_mean([first[step], second[step]], mean_of_ranks(2, run))


def functional(rank, size):
    """Steps whose wrapper runs with other tensors in the place of its parameters, and a plain one between them."""
    net = Net()
    model = DistributedDataParallel(net)
    scale = torch.ones(1, requires_grad=True)
    found = []
    for step in range(4):
        if step in (0, 1, 3):
            scaled = {name: parameter * scale for name, parameter in model.named_parameters()}
            functional_call(model, scaled, (batch(rank, step),)).square().mean().backward()
        else:
            model(batch(rank, step)).square().mean().backward()
        found.append(gradients_of(net))
        model.zero_grad()
    return found


def test_tensors_in_the_place_of_parameters_lead_to_the_parameters(ranks):
    first, second = ranks.run(functional)
    for step in range(4):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Net()
            net(batch(rank, step)).square().mean().backward()
            return net

        assert_mean([first[step], second[step]], mean_of_ranks(2, run))


def two_wrappers(rank, size, different_order):
    """Two wrappers of like models; on rank 1 their backwards run in the other order, where asked."""
    nets = [Net(), Net()]
    models = [DistributedDataParallel(net) for net in nets]
    losses = [model(batch(rank, number)).square().mean() for number, model in enumerate(models)]
    words = []
    for loss in losses[::-1] if different_order and rank else losses:
        try:
            loss.backward()
            words.append("fine")
        except ReplicaError as error:
            words.append(str(error))
    return words, [gradients_of(net) for net in nets]


@pytest.mark.parametrize("different_order", [False, True])
def test_gradients_of_two_wrappers_are_not_averaged_with_each_other(ranks, different_order):
    results = ranks.run(two_wrappers, different_order)
    if different_order:
        for words, _ in results:
            assert all("different wrappers to one reduction: rank 0 those of wrapper" in word for word in words)
        return
    for number in range(2):

        def run(rank: int, number: int = number) -> nn.Module:
            net = Net()
            net(batch(rank, number)).square().mean().backward()
            return net

        assert_mean([nets[number] for _, nets in results], mean_of_ranks(2, run))


class Experts(nn.Module):
    """Layers with statistics over ranks between experts, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(SyncBatchNorm(4) for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        for norm, experts in zip(self.norms, self.experts, strict=True):
            x = experts[expert](norm(x)).tanh()
        return x


def with_statistics(rank, size):
    net = Experts()
    model = DistributedDataParallel(net, find_unused_parameters=None, bucket_cap_mb=1e-5)
    for step in range(5):
        net.zero_grad()
        model(batch(rank, step), (rank + step) % 2).square().mean().backward()
    return gradients_of(net)


def test_statistics_over_ranks_never_pair_with_buckets(ranks):
    """SyncBatchNorm's collectives run inside backward, while buckets leave at other times on each rank."""
    first, second = ranks.run(with_statistics)
    net = Experts()
    x = torch.cat([batch(rank, 4) for rank in range(2)])
    for norm, experts in zip(net.norms, net.experts, strict=True):
        x = nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        x = torch.cat([experts[(rank + 4) % 2](half).tanh() for rank, half in enumerate(x.chunk(2))])
    x.square().mean().backward()
    expected = gradients_of(net)
    assert_mean([first, second], expected, rtol=1e-4)
