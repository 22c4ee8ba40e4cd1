"""Uneven inputs: ranks with unequal numbers of batches train as one process would that has the batches of all."""

import os
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable

from allstep import DistributedDataParallel
from allstep.errors import RankFailedError
from allstep.testing.ranks import RankPool

RATE = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_with_buffers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    return model(batch(rank, number)).square().mean()


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def reference(counts, by_world_size, window=1, optimizer_of=None, make=make_model):
    """One process with the batches of all ranks: the gradient of each step, and the weights at the end.

    A rank's batches count in the step of their window, if the rank still has a batch when that step comes.
    """
    model = make()
    optimizer = optimizer_of(model) if optimizer_of else torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for last in range(window - 1, max(counts), window):
        active = [rank for rank, count in enumerate(counts) if count > last]
        optimizer.zero_grad()
        divisor = len(counts) if by_world_size else len(active)
        for rank in active:
            for number in range(last + 1 - window, last + 1):
                (loss(model, rank, number) / divisor).backward()
        steps.append(gradient(model))
        optimizer.step()
    return steps, weights(model)


def train(rank, model, count, window=1, optimizer=None, **arguments):
    """`count` batches under join; the gradient of each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    optimizer.zero_grad()
    with model.join(**arguments):
        for number in range(count):
            if (number + 1) % window:
                with model.no_sync():
                    loss(model, rank, number).backward()
            else:
                loss(model, rank, number).backward()
                steps.append(gradient(model).clone())
                optimizer.step()
                optimizer.zero_grad()
    return steps


def uneven(rank, size, counts, by_world_size, window, options):
    model = DistributedDataParallel(make_model(), **options)
    steps = train(rank, model, counts[rank], window, divide_by_initial_world_size=by_world_size)
    return steps, weights(model), model.reductions


def check(results, counts, by_world_size, window=1):
    expected, end = reference(counts, by_world_size, window)
    for (steps, found, reductions), count in zip(results, counts, strict=True):
        assert len(steps) == count // window
        for one, two in zip(steps, expected, strict=False):
            close(one, two)
        close(found, end)
        assert torch.equal(found, results[0][1])
        assert reductions == max(counts) // window


@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize("counts", [(2, 5), (5, 2), (0, 3), (3, 0), (2, 2), (0, 0)])
def test_two_ranks_train_as_one_process_with_the_batches_of_both(ranks, counts, by_world_size):
    check(ranks.run(uneven, counts, by_world_size, 1, {"bucket_cap_mb": 1e-5}), counts, by_world_size)


@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize("counts", [(1, 4, 0, 2), (3, 0, 3, 5), (4, 4, 4, 3)])
def test_four_ranks_leave_one_after_another(four_ranks, counts, by_world_size):
    check(four_ranks.run(uneven, counts, by_world_size, 1, {}), counts, by_world_size)


@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize("counts", [(2, 6), (5, 6), (4, 7), (1, 2)])
def test_ranks_without_data_follow_the_windows_of_the_others(ranks, counts, by_world_size):
    check(ranks.run(uneven, counts, by_world_size, 2, {}), counts, by_world_size, window=2)


@pytest.mark.parametrize("flag", [True, None, False])
@pytest.mark.parametrize("as_views", [True, False])
def test_a_rank_without_data_lacks_no_gradient_whatever_the_flags(ranks, flag, as_views):
    options = {"find_unused_parameters": flag, "gradient_as_bucket_view": as_views}
    check(ranks.run(uneven, (1, 4), True, 1, options), (1, 4), True)


def test_a_static_graph_stays_static(ranks):
    check(ranks.run(uneven, (1, 4), True, 1, {"static_graph": True}), (1, 4), True)


def by_both_classes(rank, size, counts, by_world_size, window, accumulates_on):
    found = []
    for wrapper in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wrapper(make_with_buffers())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        seen = []
        with model.join(divide_by_initial_world_size=by_world_size):
            for number in range(counts[rank]):
                with model.no_sync() if (number + 1) % window else nullcontext():
                    loss(model, rank, number).backward()
                seen.append((gradient(model).clone(), buffers(model.module)))
                if not (number + 1) % window:
                    optimizer.step()
                    if not accumulates_on:
                        optimizer.zero_grad()
        found.append((seen, weights(model), buffers(model.module)))
    return found


@pytest.mark.parametrize("accumulates_on", [False, True])
@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize(("counts", "window"), [((2, 0, 5, 3), 1), ((3, 7, 6, 1), 2)])
def test_gradients_weights_and_buffers_are_those_of_torch_s_class(four_ranks, counts, window, by_world_size, accumulates_on):
    results = four_ranks.run(by_both_classes, counts, by_world_size, window, accumulates_on)
    for (seen, end, statistics), (their_seen, their_end, theirs) in results:
        for (mine, own), (other, others) in zip(seen, their_seen, strict=True):
            close(mine, other)
            for name, buffer in own.items():
                torch.testing.assert_close(buffer, others[name])
        close(end, their_end)
        assert torch.equal(end, results[0][0][1])
        for name, buffer in statistics.items():
            torch.testing.assert_close(buffer, theirs[name])
            assert torch.equal(buffer, results[0][0][2][name])


def with_own_buffers(rank, size):
    module = make_with_buffers()
    model = DistributedDataParallel(module, forward_sync_buffers=False)
    train(rank, model, 1 + rank)
    return weights(model), buffers(module)


def test_buffers_that_are_not_sent_stay_each_rank_s_own(ranks):
    (one, own), (two, other) = ranks.run(with_own_buffers)
    assert torch.equal(one, two)
    assert (own["1.num_batches_tracked"], other["1.num_batches_tracked"]) == (1, 2)


def left_over(rank, size, as_views):
    """Windows of two; rank 0 has a batch left when it has no second one for it, and rank 1 two windows more."""
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=as_views)
    seen = []
    for _ in range(2):
        train(rank, model, 3 if rank == 0 else 6, window=2)
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.module.load_state_dict(make_model().state_dict())
    loss(model, rank, 9).backward()
    return seen, gradient(model)


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_that_a_rank_holds_when_it_ends_it_holds_afterwards(ranks, as_views):
    (held, one), (others, two) = ranks.run(left_over, as_views)
    assert others == [[None] * 4] * 2
    alone = make_model()
    nn.utils.vector_to_parameters(reference((2, 2), True, window=2)[1], alone.parameters())
    loss(alone, 0, 2).backward()
    for gradients in held:
        close(torch.cat([each.flatten() for each in gradients]), gradient(alone))
    last = make_model()
    for rank in range(2):
        loss(last, rank, 9).backward()
    close(one, (gradient(alone) + gradient(last)) / 2)  # and they count in the next reduction, as with torch
    assert torch.equal(one, two)


class Branches(nn.Module):
    """Rank 1 uses `right`, rank 0 `left`; nobody uses `spare`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.spare = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return (self.right if rank else self.left)(x)


def branching(rank, size, flag):
    model = DistributedDataParallel(Branches(), find_unused_parameters=flag)
    seen = []
    with model.join():
        for number in range(1 + 2 * rank):
            model.zero_grad()
            model(batch(rank, number), rank).square().mean().backward()
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("flag", [True, None])
def test_what_only_ranks_without_data_would_use_gets_no_gradient(ranks, flag):
    one, two = ranks.run(branching, flag)
    assert [gradient is None for gradient in one[0]] == [False] * 4 + [True] * 2
    for seen in two[1:]:
        assert [gradient is None for gradient in seen] == [True, True, False, False, True, True]
    model = Branches()
    (model(batch(1, 2), 1).square().mean() / 2).backward()
    close(two[-1][2], model.right.weight.grad)
    for before, after in zip(one[0], one[1], strict=True):
        assert before is after is None or torch.equal(before, after)


def left_over_of_a_branch(rank, size):
    """Rank 0 ends with a gradient of `left` that was not reduced; then nobody uses `left`."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=None)
    with model.join():
        if rank == 0:
            with model.no_sync():
                model(batch(0, 0), 0).square().mean().backward()
        else:
            for number in range(2):
                with model.no_sync() if number == 0 else nullcontext():
                    model(batch(1, number), 1).square().mean().backward()
    model(batch(rank, 5), 1).square().mean().backward()
    return model.left.weight.grad


def test_what_is_left_over_on_one_rank_is_reduced_after_join(ranks):
    model = Branches()
    (model(batch(0, 0), 0).square().mean() / 2).backward()
    for found in ranks.run(left_over_of_a_branch):
        close(found, model.left.weight.grad)


def sparse(rank, size):
    torch.manual_seed(4)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)))
    seen = []
    with model.join(divide_by_initial_world_size=False):
        for number in range(1 + rank):
            model.zero_grad()
            model(torch.tensor([rank, number + 2])).square().mean().backward()
            seen.append(model.module[0].weight.grad.to_dense())
    return seen, model.reductions


def test_ranks_without_data_take_part_in_sparse_gradients(ranks):
    (_, reductions), (seen, others) = ranks.run(sparse)
    assert reductions == others == 2
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1))
    model(torch.tensor([1, 3])).square().mean().backward()
    close(seen[1], model[0].weight.grad)


def unused(rank, size):
    model = DistributedDataParallel(Branches(), find_unused_parameters=False)
    with model.join():
        for _ in range(rank):
            model(batch(rank, 0), rank).square().mean().backward()


def test_a_missing_gradient_is_an_error_on_ranks_without_data_too(ranks):
    for outcome in ranks.outcomes(unused):
        assert outcome.error == "UnusedParametersError"
        assert "4 parameters got no gradient" in outcome.message
        assert "on rank(s) 1: left.weight, left.bias, spare.weight, spare.bias." in outcome.message


def hooked(rank, size, counts, by_world_size, name):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=1e-4)
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    steps = train(rank, model, counts[rank], divide_by_initial_world_size=by_world_size)
    return steps, weights(model), model.reductions


@pytest.mark.parametrize("by_world_size", [True, False])
def test_ranks_without_data_take_part_in_hooks(ranks, by_world_size):
    check(ranks.run(hooked, (4, 1), by_world_size, "allreduce"), (4, 1), by_world_size)


def test_hooks_with_a_state_stay_equal(ranks):
    (_, one, _), (_, two, _) = ranks.run(hooked, (6, 3), True, "powerSGD")
    assert torch.equal(one, two)


def hooked_buffers(rank, size, location):
    """The hook is called once a reduction and takes the mean of buffers."""
    module = make_with_buffers()
    model = DistributedDataParallel(module)
    calls = []

    def mean(state, named):
        calls.append(sorted(named))
        work = dist.all_reduce(named["1.running_mean"].data.div_(size), async_op=True)
        return [work.get_future()]

    model._register_buffer_comm_hook(None, mean, location)
    train(rank, model, 2 + 4 * rank, window=2)
    return len(calls), model.reductions, buffers(module)["1.running_mean"]


@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_ranks_without_data_take_part_in_hooks_on_buffers(ranks, location):
    where = getattr(nn.parallel.distributed._BufferCommHookLocation, location)
    (calls, reductions, one), (others, _, two) = ranks.run(hooked_buffers, where)
    assert calls == others == reductions == 3
    assert torch.equal(one, two)


def with_zero(rank, size, counts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module uses a deprecated part of torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

    module = make_model()
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9)
    assert isinstance(model, Joinable)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for number in range(counts[rank]):
            optimizer.zero_grad()
            loss(model, rank, number).backward()
            own = gradient(model).clone()
            optimizer.step()
    return weights(model), torch.equal(gradient(model), own)


def test_an_optimizer_that_is_cut_over_ranks_joins_too(ranks):
    """Under torch's class it would step on ranks without data with gradients of their last batch."""
    counts = (2, 5)
    _, end = reference(counts, False, optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=RATE, momentum=0.9))
    for found, has_own_gradients in ranks.run(with_zero, counts):
        close(found, end)
        assert has_own_gradients


# ---- what is not a plain step


def two_forwards(rank, size):
    model = DistributedDataParallel(make_model())
    with model.join():
        for number in range(1 + rank):
            model.zero_grad()
            (loss(model, rank, number) + loss(model, rank, number + 5)).backward()
    return gradient(model), model.reductions


def test_two_forwards_of_one_backward_are_one_iteration(ranks):
    model = make_model()
    ((loss(model, 1, 1) + loss(model, 1, 6)) / 2).backward()
    (_, reductions), (found, others) = ranks.run(two_forwards)
    assert reductions == others == 2
    close(found, gradient(model))


def leaves_out(rank, size, left_out):
    """Rank 1 runs no backward for some of its batches."""
    model = DistributedDataParallel(make_model())
    with model.join():
        for number in range(4):
            model.zero_grad()
            value = loss(model, rank, number)
            if rank == 0 or number not in left_out:
                value.backward()
    return gradient(model), model.reductions


@pytest.mark.parametrize("left_out", [[3], [2, 3]])
def test_last_batches_that_a_rank_leaves_out_make_it_end_earlier(ranks, left_out):
    model = make_model()
    (loss(model, 0, 3) / 2).backward()
    (found, reductions), (_, others) = ranks.run(leaves_out, left_out)
    assert reductions == others == 4
    close(found, gradient(model))


@pytest.mark.parametrize("left_out", [[1], [0, 1]])
def test_a_batch_that_a_rank_leaves_out_before_others_is_the_engine_s_error(ranks, left_out):
    for outcome in ranks.outcomes(leaves_out, left_out, timeout=30):
        assert outcome.error == "RankFailedError"
        assert "rank(s) 1 ran a forward that no backward followed" in outcome.message


def evaluates_alone(rank, size):
    model = DistributedDataParallel(make_model())
    with model.join():
        for number in range(1 + rank):
            loss(model, rank, number).backward()
            if rank == 1:
                with torch.no_grad():
                    loss(model, rank, number)
    return model.reductions


def test_a_forward_without_gradients_needs_no_other_rank(ranks):
    assert ranks.run(evaluates_alone) == [2, 2]


def takes_part(rank, size):
    """In the second window of three, rank 1 has nothing, but is not at its end."""
    model = DistributedDataParallel(make_model())
    with model.join(divide_by_initial_world_size=False):
        for number in range(3 if rank else 4):
            model.zero_grad()
            if rank == 1 and number == 1:
                model.take_part(weight=0.0)
            else:
                loss(model, rank, number).backward()
            if number == 1:
                middle = gradient(model).clone()
    return middle, gradient(model), model.reductions


def test_an_active_rank_may_reduce_without_a_backward(ranks):
    (one, end, reductions), (two, _, others) = ranks.run(takes_part)
    assert reductions == others == 4
    for found, number in ((one, 1), (two, 1), (end, 3)):
        model = make_model()
        loss(model, 0, number).backward()
        close(found, gradient(model))


def weighed(rank, size):
    model = DistributedDataParallel(make_model())
    with model.join(divide_by_initial_world_size=False):
        for number in range(1 + rank):
            model.zero_grad()
            value = loss(model, rank, number) * 3
            model.weigh(3.0)
            value.backward()
    return gradient(model), float(model.totals.weight)


def test_weights_of_ranks_without_data_are_zero(ranks):
    model = make_model()
    loss(model, 1, 1).backward()
    (_, total), (found, other) = ranks.run(weighed)
    assert total == other == 3.0
    close(found, gradient(model))


def weighs_in_vain(rank, size):
    model = DistributedDataParallel(make_model())
    with model.join():
        loss(model, rank, 0).backward()
        loss(model, rank, 1)
        try:
            model.weigh(2.0)
        except ValueError as error:
            return str(error)


def test_weights_and_the_world_size_cannot_both_divide(ranks):
    for words in ranks.run(weighs_in_vain):
        assert "write join(divide_by_initial_world_size=False)" in words


def disagrees(rank, size, counts):
    model = DistributedDataParallel(make_model())
    with model.join():
        for number in range(counts[rank]):
            with model.no_sync() if rank == 1 and number == 1 else nullcontext():
                loss(model, rank, number).backward()


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (2, 2, 1, 0)])
def test_windows_that_do_not_fit_are_an_error_on_every_rank(four_ranks, counts):
    others = [rank for rank in (0, 2, 3) if counts[rank] == 2]
    for rank, outcome in enumerate(four_ranks.outcomes(disagrees, counts, timeout=30)):
        assert outcome.error == "RuntimeError"
        assert f"Rank {rank}: under join" in outcome.message
        assert f"rank(s) 1 ran a forward under no_sync, and rank(s) {', '.join(map(str, others))} one" in outcome.message


# ---- errors


class Fails(Exception):
    pass


def fails(gradient=None):
    raise Fails("a bad batch")


def one_fails(rank, size, where, failing, counts, window):
    """Ranks of `failing` fail in their second batch; then all train on."""
    model = DistributedDataParallel(make_with_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    word = "no error"
    try:
        with model.join():
            for number in range(counts[rank]):
                bad = rank in failing and number == 1
                if bad and where == "data":
                    fails()
                with model.no_sync() if (number + 1) % window else nullcontext():
                    if bad and where == "forward":
                        handle = model.module[1].register_forward_hook(lambda *_: fails())
                        try:
                            loss(model, rank, number)
                        finally:
                            handle.remove()
                    out = model(batch(rank, number))
                    if bad and where == "loss":
                        fails()
                    if bad and where == "backward":
                        out.register_hook(fails)
                    out.square().mean().backward()
                if bad and where == "step":
                    fails()
                optimizer.step()
                optimizer.zero_grad()
    except (RuntimeError, Fails) as error:
        word = f"{type(error).__name__}: {error}"
    model.zero_grad(set_to_none=False)
    model.take_part()  # whatever was left on this rank
    model.zero_grad()
    model.module.load_state_dict(make_with_buffers().state_dict())
    return word, train(rank, model, 1 + rank), weights(model)


def check_went_on(results):
    expected, end = reference((1, 2), True, make=make_with_buffers)
    for (_, steps, found), count in zip(results, (1, 2), strict=True):
        assert len(steps) == count
        for one, two in zip(steps, expected, strict=False):
            close(one, two)
        close(found, end)


WHERE = ["data", "forward", "loss", "backward", "step"]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("counts", [(4, 4), (1, 4)])
@pytest.mark.parametrize("where", WHERE)
def test_an_exception_on_one_rank_is_told_to_the_others_and_they_can_go_on(ranks, where, counts, window):
    results = ranks.run(one_fails, where, [1], counts, window, timeout=30)
    told, own = (word for word, *_ in results)
    assert own == "Fails: a bad batch"
    assert told.startswith("RankFailedError: Rank 0 stops because another rank failed: rank 1: ")
    assert "Fails: a bad batch" in told
    check_went_on(results)


@pytest.mark.parametrize("where", WHERE)
def test_an_exception_on_every_rank_stays_each_rank_s_own(ranks, where):
    results = ranks.run(one_fails, where, [0, 1], (4, 4), 1, timeout=30)
    assert [word for word, *_ in results] == ["Fails: a bad batch"] * 2
    check_went_on(results)


def fails_after_another(rank, size):
    """What a rank raises because it heard of an error is not told a second time."""
    model = DistributedDataParallel(make_model())
    try:
        with model.join():
            try:
                loss(model, rank, 0).backward()
                if rank == 1:
                    fails()
                loss(model, rank, 1).backward()
            except RankFailedError as error:
                raise Fails("stopped") from error
    except Fails as error:
        return str(error), type(error.__cause__).__name__


def test_an_error_that_comes_from_another_s_is_not_told_again(ranks):
    assert ranks.run(fails_after_another, timeout=30) == [("stopped", "RankFailedError"), ("a bad batch", "NoneType")]


def dies(rank, size):
    model = DistributedDataParallel(make_model())
    with model.join():
        loss(model, rank, 0).backward()
        if rank == 1:
            os._exit(3)
        loss(model, rank, 1).backward()


def test_a_rank_that_is_gone_is_told_in_the_engine_s_words():
    with RankPool(2) as pool:
        told, gone = pool.outcomes(dies)
    assert gone.error == "Died"
    assert told.error == "CollectiveError"
    assert told.message.startswith("Rank 0 of 2: ")
    assert "broke off: " in told.message


def broken_off(rank, size):
    """The last backward breaks off, and the error is swallowed."""
    model = DistributedDataParallel(make_model())
    with model.join():
        out = model(batch(rank, 0))
        if rank == 1:
            out.register_hook(fails)
        with suppress(Fails):
            out.mean().backward()


def test_a_backward_that_broke_off_last_is_an_error_on_both(ranks):
    for outcome in ranks.outcomes(broken_off, timeout=30):
        assert outcome.error == "RankFailedError"
        assert "rank 1: its last backward did not come to its end" in outcome.message


class WithCollective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)  # nobody could join in this one
        return self.net(x)


def ends_early(rank, size, counts, window):
    model = DistributedDataParallel(WithCollective())
    done, word = 0, "no error"
    try:
        with model.join(throw_on_early_termination=True):
            for number in range(counts[rank]):
                with model.no_sync() if (number + 1) % window else nullcontext():
                    loss(model, rank, number).backward()
                done += 1
    except RuntimeError as error:
        word = f"{type(error).__name__}: {error}"
    model.zero_grad(set_to_none=False)
    model.take_part()
    loss(model, rank, 0).backward()
    return done, word, gradient(model)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("counts", [(2, 4, 2, 3), (0, 1, 1, 1)])
def test_early_termination_is_an_error_on_every_rank(four_ranks, counts, window):
    results = four_ranks.run(ends_early, counts, window, timeout=30)
    for rank, (done, word, found) in enumerate(results):
        assert done == min(counts)
        early = f"RuntimeError: Rank {rank} exhausted all inputs."
        assert word.startswith(early if counts[rank] == done else "RuntimeError: Detected at least one rank that exhausted")
        assert torch.equal(found, results[0][2])


def test_equal_numbers_of_batches_terminate_nobody_early(four_ranks):
    for done, word, _ in four_ranks.run(ends_early, (2, 2, 2, 2), 1, timeout=30):
        assert (done, word) == (2, "no error")


# ---- before and after


class Calls:
    """Counts all-reduces of torch's groups while it is entered."""

    def __enter__(self) -> "Calls":
        original = dist.ProcessGroup.allreduce
        self.number, self._original = 0, vars(dist.ProcessGroup)["allreduce"]  # what the class reads from it cannot go back

        def counted(group, *arguments, **named):
            self.number += 1
            return original(group, *arguments, **named)

        dist.ProcessGroup.allreduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.ProcessGroup.allreduce = self._original


def counted(rank, size):
    model = DistributedDataParallel(make_model())
    warnings.resetwarnings()
    numbers, filters = [], list(warnings.filters)
    for context in (nullcontext, lambda: model.join(enable=False), model.join, nullcontext):
        with Calls() as calls, context():
            for number in range(3):
                loss(model, rank, number).backward()
        numbers.append(calls.number)
    # a forward that is not announced any more needs no other rank
    if rank == 0:
        with model.no_sync():
            loss(model, rank, 0).backward()
    return numbers, filters == warnings.filters, model._join_config.enable


def test_outside_and_with_enable_false_it_costs_nothing_and_leaves_nothing(ranks):
    for (plain, disabled, joined, after), same_filters, enabled in ranks.run(counted):
        assert plain == disabled == after
        assert joined == plain + 2 * 3 + 1
        assert same_filters
        assert not enabled


def again(rank, size):
    """Three joins of one wrapper, and plain steps between them."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=1e-5)
    seen = []
    for counts, by_world_size in [((1, 3), False), ((2, 0), True), ((2, 2), True)]:
        model.module.load_state_dict(make_model().state_dict())
        steps = train(rank, model, counts[rank], divide_by_initial_world_size=by_world_size)
        seen.append((steps, weights(model)))
        model.zero_grad()
        loss(model, rank, 0).backward()
        seen.append(gradient(model).clone())
    return seen


def test_a_wrapper_can_join_again(ranks):
    for rank, seen in enumerate(ranks.run(again)):
        for place, (counts, by_world_size) in enumerate([((1, 3), False), ((2, 0), True), ((2, 2), True)]):
            steps, found = seen[2 * place]
            expected, end = reference(counts, by_world_size)
            assert len(steps) == counts[rank]
            for one, two in zip(steps, expected, strict=False):
                close(one, two)
            close(found, end)
            model = make_model()
            nn.utils.vector_to_parameters(end, model.parameters())
            for other in range(2):
                (loss(model, other, 0) / 2).backward()
            close(seen[2 * place + 1], gradient(model))


def in_a_group(rank, size):
    """Ranks 1 and 3 are a group of their own; the last joiner is number 0 in it."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    model = DistributedDataParallel(make_model(), process_group=group)
    train(rank, model, {1: 3, 3: 1}[rank])
    return weights(model)


def test_a_group_handed_over_joins_among_its_own_ranks(four_ranks):
    results = four_ranks.run(in_a_group)
    assert torch.equal(results[1], results[3])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(3):
        optimizer.zero_grad()
        for rank in (1, 3)[: 2 if number == 0 else 1]:
            (loss(model, rank, number) / 2).backward()
        optimizer.step()
    close(results[1], weights(model))


@pytest.mark.parametrize("throws", [True, False])
def test_a_world_of_one_joins_nobody(throws):
    model = DistributedDataParallel(make_model())
    steps = train(0, model, 3, throw_on_early_termination=throws)
    expected, end = reference((3,), True)
    for one, two in zip(steps, expected, strict=True):
        close(one, two)
    close(weights(model), end)
