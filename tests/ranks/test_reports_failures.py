"""Backwards that break off, batches that are skipped: all ranks go on right, or all hear who did not."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep import DistributedDataParallel, all_ranks_agree
from allstep.errors import CollectiveError, RankFailedError
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks
from allstep.testing.ranks import RankPool


class Deep(nn.Module):
    """Layers in a row; a forward can be told where to break off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor, breaks: str = "") -> torch.Tensor:
        if breaks in ("forward", "interrupted"):
            raise KeyboardInterrupt if breaks == "interrupted" else BadSampleError
        for number, layer in enumerate(self.layers):
            again = breaks == f"recomputed {number}"
            x = checkpoint(Recomputed(layer), x, use_reentrant=False) if again else layer(x).tanh()
            if breaks == f"backward {number}":
                x.register_hook(broken)
        return x


class BadSampleError(Exception):
    """What the tests break off with."""


class Recomputed(nn.Module):
    """Runs once; the second time, in backward, it breaks off."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.times = layer, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        if self.times > 1:
            raise BadSampleError
        return self.layer(x).tanh()


def broken(gradient):
    raise BadSampleError


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def step_of(model, rank, step, breaks=""):
    out = model(batch(rank, step), breaks)
    if breaks == "loss":
        raise BadSampleError
    out.square().mean().backward()


def reference(step: int, size: int = 2, accumulated: bool = False):
    def run(rank: int) -> nn.Module:
        net = Deep()
        if accumulated:
            step_of(net, rank, step + 50)
        step_of(net, rank, step)
        return net

    return mean_of_ranks(size, run)


def all_break_off(rank, size, breaks_of_rank, options, set_to_none, accumulate):
    """Steps 1 and 2 break off on every rank, the rest do not."""
    net = Deep()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen = []
    for step in range(5):
        try:
            with model.no_sync() if accumulate else nullcontext():
                if accumulate:
                    step_of(model, rank, step + 50)
            step_of(model, rank, step, breaks_of_rank[rank % 2] if step in (1, 2) else "")
            seen.append(gradients_of(net))
        except BadSampleError:
            seen.append("broke off")
        model.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.parametrize(
    ("options", "set_to_none", "accumulate"),
    [
        ({}, True, False),
        ({}, False, False),
        ({}, True, True),
        ({"gradient_as_bucket_view": False}, True, False),
        ({"gradient_as_bucket_view": False}, False, True),
        ({"find_unused_parameters": True}, False, False),
        ({"find_unused_parameters": None}, True, False),
    ],
    ids=["strict", "strict with zeros", "windows", "copies", "copies with zeros in windows", "walk with zeros", "none"],
)
@pytest.mark.parametrize(
    "breaks",
    [
        ["forward", "forward"],
        ["loss", "loss"],
        ["backward 4", "backward 4"],
        ["backward 0", "backward 0"],
        ["backward 3", "backward 1"],
        ["recomputed 2", "recomputed 2"],
    ],
    ids=str,
)
def test_after_an_exception_on_all_ranks_the_next_step_is_as_if_nothing_had_been(
    ranks, breaks, options, set_to_none, accumulate
):
    """Every rank meets an exception in forward, in the loss, or at some depth of backward, catches it, zeroes and goes on.

    Twice in a row. Nothing has to be called for it; the steps after it are those of one process, with nothing left in `.grad`.
    """
    first, second = ranks.run(all_break_off, breaks, options, set_to_none, accumulate)
    for step in range(5):
        if step in (1, 2):
            assert first[step] == second[step] == "broke off"
        else:
            assert_mean([first[step], second[step]], reference(step, accumulated=accumulate))


class Buffered(Deep):
    """With a buffer, so that a forward begins with a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


def some_break_off(rank, size, breaks, with_buffer):
    """All ranks run four steps; those of `breaks` (rank -> where) break off in step 1. Gradients of each step."""
    net = Buffered() if with_buffer else Deep()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    words, found = [], []
    for step in range(4):
        try:
            step_of(model, rank, step, breaks[rank] if step == 1 and rank in breaks else "")
            words.append("fine")
        except (BadSampleError, KeyboardInterrupt):
            words.append("broke off")
        except RankFailedError as error:
            words.append(str(error))
        found.append(gradients_of(net))
        model.zero_grad()
    return words, found


@pytest.mark.parametrize("with_buffer", [False, True], ids=["", "buffer"])
@pytest.mark.parametrize(
    "breaks",
    [
        {0: "backward 0"},
        {1: "backward 2", 3: "backward 0"},
        {0: "recomputed 1", 1: "backward 3", 2: "backward 3"},
        {2: "forward"},
        {0: "forward", 1: "backward 1"},
        {3: "interrupted"},
    ],
    ids=str,
)
def test_an_exception_on_some_ranks_is_told_to_the_others_and_all_go_on_in_step(four_ranks, breaks, with_buffer):
    """Of four ranks some meet an exception in forward or backward, at different depths, catch it and go on.

    The others, who wait for their gradients, read in that step which ranks failed, and where. Nothing is ever paired with a
    later step: all ranks run equally many, and those that follow are those of one process.
    """
    results = four_ranks.run(some_break_off, breaks, with_buffer)
    for rank, (words, _) in enumerate(results):
        told = words[1]
        assert words == ["fine", told, "fine", "fine"]
        if rank in breaks:
            assert told == "broke off"
            continue
        assert "another rank failed" in told
        for number, where in breaks.items():
            kind = "KeyboardInterrupt" if where == "interrupted" else "BadSampleError"
            in_forward = where in ("forward", "interrupted")
            what = f"its forward failed: {kind}" if in_forward else "its last backward did not come to its end"
            assert f"rank {number}: " in told
            assert what in told
    for step in (0, 2, 3):
        assert_mean([found[step] for _, found in results], reference(step, 4))


def try_again(rank, size, options):
    """The last forward of a window breaks off on every rank, and is run again: what was accumulated before it counts."""
    net = Deep()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    seen = []
    for step in range(3):
        with model.no_sync():
            step_of(model, rank, step + 50)
        with suppress(BadSampleError):
            step_of(model, rank, step, "forward" if step == 1 else "")
        if step == 1:
            step_of(model, rank, step)
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_that_all_ranks_run_again_loses_nothing_of_its_window(ranks, size, options):
    results = ranks.run(try_again, options) if size == 2 else [try_again(0, 1, options)]
    for step in range(3):
        assert_mean([seen[step] for seen in results], reference(step, size, accumulated=True))


def at_the_output(rank, size):
    """On rank 1 the backward of step 1 breaks off before the wrapper hears of it; that rank runs a step more."""
    net = Deep()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    words, found = [], None
    for step in [0, 1, 2, 3] if rank != 1 else [0, 1, 1, 2, 3]:
        try:
            step_of(model, rank, step, "backward 4" if step == 1 and rank == 1 and len(words) == 1 else "")
            words.append("fine")
        except BadSampleError:
            words.append("broke off")
        except RankFailedError as error:
            words.append(str(error))
        found = gradients_of(net)
        model.zero_grad()
    return words, found


def test_a_backward_that_breaks_off_at_the_output_is_a_skipped_one(ranks):
    (words, found), (others, found_there) = ranks.run(at_the_output)
    told = words[1]
    assert words == ["fine", told, "fine", "fine"]
    assert others == ["fine", "broke off", others[2], "fine", "fine"]
    for word in (told, others[2]):
        assert "before it, rank(s) 1 ran a forward that no backward followed" in word
    assert_mean([found, found_there], reference(3))


def one_skips(rank, size, way, with_buffer):
    """Rank 1 leaves out the backward of step 3 and goes on; at the end it takes one step more."""
    net = Buffered() if with_buffer else Deep()
    model = DistributedDataParallel(net)
    words, found = [], []
    for step in range(6 if rank == 0 else 7):
        skips = rank == 1 and step == 3
        try:
            if skips and way == "continue":
                model(batch(rank, step))
                continue
            step_of(model, rank, step, way if skips else "")
            words.append("fine")
        except BadSampleError:
            continue
        except RankFailedError as error:
            words.append(str(error))
        found.append(gradients_of(net))
        model.zero_grad()
    return words, found


@pytest.mark.parametrize("with_buffer", [False, True], ids=["", "buffer"])
@pytest.mark.parametrize("way", ["continue", "loss"])
def test_a_batch_that_one_rank_skips_is_an_error_that_names_rank_and_reduction(ranks, way, with_buffer):
    """One rank sees that its batch is bad, after the forward or in the loss, and goes on to the next one.

    Its peer waits in that backward; what it meets there is the rank's next step. Both then read who left out a backward, in
    which reduction, and what to write instead, before the optimizer moves; and both can go on.
    """
    (mine, found), (other, found_there) = ranks.run(one_skips, way, with_buffer)
    for words in (mine, other):
        assert [word == "fine" for word in words] == [True] * 3 + [False] + [True] * 2
        assert "in reduction 3, counted from 0: before it, rank(s) 1 ran a forward that no backward followed" in words[3]
        assert "all_ranks_agree" in words[3]
    for step in (0, 1, 2):
        assert_mean([found[step], found_there[step]], reference(step))
    for one, two in zip(found, found_there, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def skip_together(rank, size, bad):
    """Each rank has bad batches of its own; all skip where one has to, before or after the forward."""
    net = Deep()
    model = DistributedDataParallel(net)
    seen = []
    for step in range(6):
        if step % 2 == 0 and not all_ranks_agree(step not in bad[rank]):
            continue
        loss = model(batch(rank, step)).square().mean()
        if step % 2 == 1 and not all_ranks_agree(step not in bad[rank]):
            continue
        loss.backward()
        seen.append((step, gradients_of(net)))
        model.zero_grad()
    return seen


def test_a_skip_that_all_ranks_agree_on_disturbs_nothing(ranks):
    """`all_ranks_agree` makes a skip collective, before a forward or after it; the steps that are taken are right."""
    first, second = ranks.run(skip_together, [[1, 4], [2]])
    assert [step for step, _ in first] == [step for step, _ in second] == [0, 3, 5]
    for (step, mine), (_, other) in zip(first, second, strict=True):
        assert_mean([mine, other], reference(step))


def looks(rank, size, way):
    """Rank 0 alone runs a forward between two steps, to look at something."""
    net = Deep()
    model = DistributedDataParallel(net)
    seen = []
    for step in range(3):
        if rank == 0 or way == "in training, on all ranks":
            model.train(way != "in eval")
            with torch.no_grad() if way == "without gradients" else nullcontext():
                model(batch(0, 90))
            model.train()
        step_of(model, rank, step)
        seen.append(gradients_of(net))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("way", ["without gradients", "in eval", "in training, on all ranks"])
def test_a_forward_that_is_only_looked_at_is_no_skipped_batch(ranks, way):
    """One rank looks at a forward without gradients or in eval mode, or all ranks do in training: the steps are right."""
    first, second = ranks.run(looks, way)
    for step in range(3):
        assert_mean([first[step], second[step]], reference(step))


def leaves(rank, size):
    """Rank 1 skips step 2 before its forward, and has nothing left to do when rank 0 comes to its last step."""
    model = DistributedDataParallel(Deep())
    done = 0
    for step in range(4):
        if rank == 1 and step == 2:
            continue
        try:
            step_of(model, rank, step)
        except CollectiveError as error:
            return done, str(error)
        done += 1
        model.zero_grad()
    return done, ""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_does_not_come_is_named_when_the_timeout_runs_out(size):
    """A batch is skipped before its forward: no one can know that until the rank has no step left and does not come.

    The others wait no longer than the timeout of their group, and then read which rank did not come, and to which reduction.
    """
    with RankPool(size, timeout=3) as pool:
        outcomes = pool.run(leaves, timeout=50)
    assert outcomes[1] == (3, "")
    for rank in set(range(size)) - {1}:
        done, word = outcomes[rank]
        assert done == 3
        assert "Rank(s) 1 failed, left, or did not come within the timeout" in word
        assert "in reduction 3, counted from 0" in word


def test_in_a_world_of_one_every_rank_agrees_with_itself():
    """The same script runs with one process."""
    assert all_ranks_agree(True)
    assert not all_ranks_agree(False)
