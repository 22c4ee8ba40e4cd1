"""In a loop of one's own `begin_micro_batch` makes gradients those of a tree over places, whatever happens in a window."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.ddp.tree import TreeSum
from allstep.errors import RankFailedError

BACKENDS = ("gloo", "shm")


class Net(nn.Module):
    """Its second layer is used by even places only, and its third one by the first place only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.always, self.even, self.first = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x, place):
        y = self.always(x)
        if place % 2 == 0:
            y = y + self.even(x)
        if place == 0:
            y = y + self.first(x)
        return y


def loss_of(model, place, step):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + place))
    return model(x, place).square().mean() * (1 + place)


def of_tree(places, step):
    """The sum over places of one process, as a tree by definition; None for what no place used."""
    net, sums = Net(), {name: TreeSum(torch.add) for name, _ in Net().named_parameters()}
    for place in places:
        net.zero_grad()
        loss_of(net, place, step).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                sums[name].put(place, parameter.grad.clone())
    return {name: total.total() for name, total in sums.items()}


def windows(rank, size, blocks, set_to_none, fail_at, apart=False):
    """Gradients after each of four windows; `blocks[rank]` are the places of this rank; weights are one a window in all."""
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=None, deterministic_reduction=True)
    first, found = rank * 4, []
    for step in range(4):
        net.zero_grad(set_to_none=set_to_none)
        places = blocks[rank]
        weight = 1.0 if rank == 0 else 0.0
        try:
            for place in places:
                model.begin_micro_batch(place - first)
                if step == fail_at and rank == 1 and place == places[-1]:
                    raise ValueError("no data")
                if place == places[-1] and not apart:
                    loss = loss_of(model, place, step)
                    model.weigh(weight)
                    loss.backward()
                else:
                    with model.no_sync():
                        loss_of(model, place, step).backward()
            if apart or not places:
                model.take_part(weight=weight)
        except ValueError as error:
            with pytest.raises(RankFailedError):
                model.abandon(str(error), weight=0.0)
        except RankFailedError:
            pass
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
    kept = model.gradients_aside
    model.release()
    return found, kept


def assert_are_trees(found, places, steps=range(4), *, zeros=False):
    for step in steps:
        expected = of_tree(places, step)
        for name, gradient in found[step].items():
            if expected[name] is None:
                assert gradient is None or (zeros and not gradient.any())
            else:
                assert torch.equal(gradient, expected[name]), (step, name)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "blocks",
    [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], []], [[0, 1], [4]], [[0, 3], [6, 7]], [[1, 2, 3], [5, 7]], [[0], [4, 6]]],
    ids=str,
)
def test_unequal_windows_and_parameters_used_in_some_places_give_the_tree(ranks, blocks, set_to_none):
    for found, kept in ranks.run(windows, blocks, set_to_none, None):
        assert_are_trees(found, [*blocks[0], *blocks[1]], zeros=not set_to_none)
        assert kept <= 1


def test_a_window_whose_last_place_has_nothing_to_add_gives_the_tree(ranks):
    """All forwards ran under no_sync, and the reduction comes without a backward: labels of the last one did not count."""
    for found, _ in ranks.run(windows, [[0, 1, 2], [4, 5, 6, 7]], True, None, True):
        assert_are_trees(found, [0, 1, 2, 4, 5, 6, 7])


def test_a_window_that_a_rank_breaks_off_leaves_nothing_for_the_next(ranks):
    blocks = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for found, _ in ranks.run(windows, blocks, True, 1):
        assert_are_trees(found, range(8), [0, 2, 3])


def alone(rank, size):
    net, found = Net(), []
    model = DistributedDataParallel(net, find_unused_parameters=None)
    for step in range(2):
        net.zero_grad()
        for place in range(8):
            model.begin_micro_batch(place)
            model.weigh(1.0)
            if place < 7:
                with model.no_sync():
                    loss_of(model, place, step).backward()
            else:
                loss_of(model, place, step).backward()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
    return found, model.gradients_aside


def test_one_process_gives_the_tree():
    found, kept = alone(0, 1)
    assert_are_trees(found, range(8), range(2))
    assert kept == 2
