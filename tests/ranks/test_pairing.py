"""Only reductions that belong together pair: what one rank does more than the others is an error that names it."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from allstep import DistributedDataParallel
from allstep.errors import RankFailedError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


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
    """Steps whose wrapper runs with other tensors in the place of its parameters, and plain ones between them."""
    net = Net()
    model = DistributedDataParallel(net)
    scale = torch.ones(1, requires_grad=True)
    found = []
    for step in range(4):
        if step % 2:
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
