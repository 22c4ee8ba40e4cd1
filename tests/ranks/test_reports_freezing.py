"""Layers that are frozen, thawed, added or replaced after the model was wrapped: followed by all ranks alike, or an error."""

from typing import Any

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.errors import ReplicaError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

BACKENDS = ("gloo", "shm")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def seeded(layer: type[nn.Module], *sizes: int) -> nn.Module:
    torch.manual_seed(7)
    return layer(*sizes)


def replace_head(net: nn.Sequential) -> None:
    net[6] = seeded(nn.Linear, 4, 3)


def append(net: nn.Sequential) -> None:
    net.append(seeded(nn.Linear, net[-1].out_features, 3))


def remove_middle(net: nn.Sequential) -> None:
    net[4] = nn.Identity()


def freeze(*numbers: int):
    return lambda net: [net[number].requires_grad_(False) for number in numbers]


def thaw(*numbers: int):
    return lambda net: [net[number].requires_grad_(True) for number in numbers]


def freeze_biases(net: nn.Sequential) -> None:
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(False)


def halved(net: nn.Sequential) -> None:
    """A parameter object takes the place of another one under the same name."""
    net[2].weight = nn.Parameter(net[2].weight.detach() / 2)


# What happens to the model before it is wrapped, and then before each step.
STORIES: dict[str, list[list[Any]]] = {
    "the first layer is frozen": [[], [], [freeze(0)], []],
    "the last layer is frozen": [[], [], [freeze(6)], []],
    "a layer in the middle is frozen": [[], [], [freeze(2)], []],
    "all but one are frozen": [[], [], [freeze(0, 2, 3, 4)], []],
    "biases are frozen": [[], [], [freeze_biases], []],
    "frozen and thawed again": [[], [], [freeze(2, 4)], [], [thaw(4)], [thaw(2)], []],
    "frozen in turn": [[], [freeze(2)], [thaw(2), freeze(4)], [thaw(4), freeze(2)], [thaw(2), freeze(4)]],
    "thawed from the top": [[freeze(0, 2, 3, 4)], [], [thaw(4)], [], [thaw(2, 3)], [thaw(0)], []],
    "thawed before the first step": [[freeze(0, 2)], [thaw(0, 2)], []],
    "all that is frozen is thawed, and the rest frozen": [[freeze(0, 2)], [], [thaw(0, 2), freeze(3, 4, 6)], [], []],
    "a layer is added": [[], [], [append], [], []],
    "the head is replaced": [[], [], [replace_head], [], []],
    "the head is replaced before the first step": [[], [replace_head], []],
    "a layer is removed": [[], [], [remove_middle], [], []],
    "a parameter is replaced": [[], [], [halved], []],
    "much at a time": [[freeze(0)], [], [thaw(0), freeze(3), replace_head, remove_middle], [append], [], [thaw(3)], []],
}


def follow(rank, size, story, options, accumulate):
    """Gradients of each step; and whether what was frozen kept the gradient that it had."""
    net = make()
    for change in STORIES[story][0]:
        change(net)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen = []
    for step, changes in enumerate(STORIES[story][1:]):
        model.zero_grad(set_to_none=step % 2 == 0)
        for change in changes:
            change(net)
        frozen = [p for p in net.parameters() if not p.requires_grad]
        for p in frozen:
            p.grad = torch.full_like(p, rank + 0.5)  # the user's own
        if accumulate:
            with model.no_sync():
                model(batch(rank, step + 40)).square().mean().backward()
        model(batch(rank, step)).square().mean().backward()
        kept = all(torch.equal(p.grad, torch.full_like(p, rank + 0.5)) for p in frozen)
        for p in frozen:
            p.grad = None
        seen.append((gradients_of(net), kept))
    return seen, str(model.bucket_layout)


def told(story: str, step: int, accumulate: bool):
    def run(rank: int) -> nn.Module:
        net = make()
        for changes in STORIES[story][: step + 2]:
            for change in changes:
                change(net)
        for number in (step + 40, step) if accumulate else (step,):
            net(batch(rank, number)).square().mean().backward()
        return net

    return mean_of_ranks(2, run)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({}, False),
        ({}, True),
        ({"gradient_as_bucket_view": False}, False),
        ({"find_unused_parameters": True}, False),
        ({"find_unused_parameters": None}, True),
    ],
    ids=["strict", "strict in windows", "copies", "walk", "none in windows"],
)
@pytest.mark.parametrize("story", STORIES)
def test_a_model_that_changes_after_wrapping_is_followed(ranks, story, options, accumulate):
    """Layers are frozen, thawed, added, replaced or taken out between steps, before the first one too, the same on all ranks.

    In every step, that of the change too, gradients are those of one process; what is frozen keeps the gradient that it had.
    In the end the buckets hold what the model has.
    """
    (first, layout), (second, _) = ranks.run(follow, story, options, accumulate)
    for step in range(len(STORIES[story]) - 1):
        assert_mean([first[step][0], second[step][0]], told(story, step, accumulate))
        assert first[step][1]
        assert second[step][1]
    net = make()
    for changes in STORIES[story][:-1]:
        for change in changes:
            change(net)
    assert all(name in layout for name, p in net.named_parameters() if p.requires_grad)


def trains(rank, size, story):
    net = make()
    for change in STORIES[story][0]:
        change(net)
    model = DistributedDataParallel(net)
    for step, changes in enumerate(STORIES[story][1:]):
        for change in changes:
            change(net)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    model.check_consistency()
    return [p.detach().clone() for p in net.parameters()], model.reductions


@pytest.mark.parametrize("story", ["thawed from the top", "much at a time"])
def test_replicas_stay_equal_when_a_model_changes(four_ranks, story):
    """The same on four ranks, with an optimizer that moves: one reduction a step, and equal weights after the last."""
    results = four_ranks.run(trains, story)
    for weights, reductions in results:
        assert reductions == len(STORIES[story]) - 1
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][0], strict=True))


# ---- on some ranks only


def other_head(net: nn.Sequential) -> None:
    net[6] = nn.Linear(4, 2)  # made from this rank's own random numbers


# story -> (changes on rank 0, changes on rank 1, what the message says)
APART = {
    "frozen here": ([], [freeze(2)], "'2.weight' is trained on rank 0 and frozen on rank 1"),
    "frozen there": ([freeze(6)], [], "'6.weight' is frozen on rank 0 and trained on rank 1"),
    "one each": ([freeze(2)], [freeze(4)], "'2.weight' is frozen on rank 0 and trained on rank 1"),
    "thawed": ([], [thaw(0)], "'0.weight' is not there on rank 0 and new: float32[4, 4]"),
    "added": ([append], [], "'7.weight' is new: float32[3, 2]"),
    "replaced": ([], [replace_head], "'6.weight' is trained on rank 0 and new: float32[3, 4]"),
    "other values": ([other_head], [other_head], "'6.weight' is new: float32[2, 4], checksum"),
}


def apart(rank, size, story, options):
    net = make()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(rank)
    model(batch(rank, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for change in APART[story][rank]:
        change(net)
    before = [p.detach().clone() for p in net.parameters()]
    try:
        model(batch(rank, 1)).square().mean().backward()
        optimizer.step()
    except ReplicaError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    return "", False


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": None}], ids=["strict", "none"])
@pytest.mark.parametrize("story", APART)
def test_a_change_on_some_ranks_only_is_an_error_on_all(ranks, story, options):
    """One rank freezes, thaws, adds or replaces a layer and the other does not, or gives a new layer other values.

    In that step's backward, before the optimizer moves, every rank reads which parameter it is and how each side has it.
    """
    for word, unmoved in ranks.run(apart, story, options):
        assert "The ranks do not train the same parameters" in word
        assert APART[story][2] in word
        assert unmoved


def repaired(rank, size):
    """Rank 1 freezes a layer alone, hears of it, and takes it back."""
    net = make()
    model = DistributedDataParallel(net)
    words = []
    for step in range(3):
        if rank == 1:
            net[2].requires_grad_(step != 1)
        try:
            model(batch(rank, step)).square().mean().backward()
            words.append("fine")
        except ReplicaError:
            words.append("ReplicaError")
        found = gradients_of(net)
        model.zero_grad()
    return words, found


def test_after_such_an_error_training_can_go_on(ranks):
    """The change is taken back on the rank that made it, and the next step is that of one process."""

    def run(rank: int) -> nn.Module:
        net = make()
        net(batch(rank, 2)).square().mean().backward()
        return net

    results = ranks.run(repaired)
    assert [words for words, _ in results] == [["fine", "ReplicaError", "fine"]] * 2
    assert_mean([found for _, found in results], mean_of_ranks(2, run))


def without_data(rank, size):
    """Rank 1 has no batch when layers are thawed and added, and weights count."""
    net = make()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, find_unused_parameters=None)
    seen = []
    for step in range(3):
        if step == 1:
            thaw(0)(net)
            append(net)
        share = 0.0 if rank == 1 and step == 1 else 1.0 + rank
        if share:
            loss = model(batch(rank, step)).square().mean() * share
            model.weigh(share)
            loss.backward()
        else:
            model.take_part(weight=0.0)
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


def test_a_rank_without_a_batch_follows_a_change_too(ranks):
    """It runs no forward in the step of the change, and has the weighted mean all the same."""
    results = ranks.run(without_data)
    for step, shares in enumerate([(1 / 3, 2 / 3), (1.0, 0.0), (1 / 3, 2 / 3)]):
        net = make()
        net[0].requires_grad_(step > 0)
        if step:
            append(net)
        for rank, share in enumerate(shares):
            (net(batch(rank, step)).square().mean() * share).backward()
        assert_mean([result[step] for result in results], gradients_of(net))
