"""One optimizer step: the window's micro-batches forward and backward, buckets reduced meanwhile, clip, step."""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from allstep.comm.watchdog import HERE
from allstep.data.collate import to_device
from allstep.data.grid import MicroBatch
from allstep.data.loader import Feed
from allstep.data.seeding import mixed, seed_generators
from allstep.ddp.tree import TreeSum
from allstep.errors import AllstepError, CollectiveError, RankFailedError
from allstep.trainer.gradients import backward, clip_gradients, drop_gradients, gradient_norm
from allstep.trainer.ledger import note_gradients
from allstep.trainer.meter import StepResult
from allstep.trainer.nonfinite import BufferCopies, report_nonfinite
from allstep.trainer.precision import autocast
from allstep.trainer.run import Run

__all__ = ["take_step"]


def take_step(run: Run, window: Sequence[MicroBatch]) -> StepResult:
    """Run this rank's `window`, and let the optimizer take one step, the same on every rank.

    Raises:
        RankFailedError: another rank could not run its window; the optimizer has not moved.
        Exception: whatever this rank's data or model raised, after the other ranks were told.
    """
    place: MicroBatch | None = None  # where this rank is
    fed: list[tuple[Feed, float]] = []  # what has a weight, for where its gradients are not finite
    policy = run.args.nonfinite_gradients
    copies = BufferCopies(run.bare_model) if policy == "skip" else None
    try:
        weight, losses = 0.0, TreeSum(torch.add)
        reduced = False
        first = run.communicator.rank * (run.grid.micro_batches_per_step // run.communicator.size)
        for micro_batch in window:
            place, HERE.micro_batch = micro_batch, micro_batch.number
            HERE.enter("data")
            feed = next(run.feeds)
            place = feed.micro_batch
            assert place.number == micro_batch.number
            if not feed.sample_ids:  # a stream ended before this place
                continue
            last = micro_batch is window[-1]
            own_weight = run.weigh(feed.inputs)
            weight += own_weight
            if not own_weight and run.ledger is not None:
                run.ledger.note(micro_batch.number, feed.sample_ids, 0, None, feed.inputs)
            if own_weight:  # without a label that counts, a mean loss would be 0/0
                if policy != "ignore":
                    fed.append((feed, own_weight))
                if run.sums_in_order:
                    run.model.begin_micro_batch(micro_batch.number - first)
                with nullcontext() if last else run.model.no_sync():
                    _forward_backward(run, feed, own_weight, weight if last else None, losses)
                reduced = last
            if not last:
                run.callbacks.call("on_substep_end")
        if not reduced:
            total = losses.total()
            run.model.take_part(weight=weight, carried=torch.zeros((), device=run.device) if total is None else total)
    except (CollectiveError, RankFailedError):
        raise
    except Exception as error:
        _tell_others(run, error, place)
        raise
    norm = _norm(run)
    if norm is not None and policy != "ignore" and not math.isfinite(norm):
        return _leave_out(run, fed, copies)
    return _step(run, norm if run.args.max_grad_norm > 0 else None)


def _forward_backward(run: Run, feed: Feed, weight: float, total: float | None, losses: TreeSum[torch.Tensor]) -> None:
    """Accumulate the gradients of weight x loss of one micro-batch, and put that into `losses`.

    With `total`, all that was accumulated is reduced, and divided by the weights of all ranks.
    """
    micro_batch = feed.micro_batch
    seed_generators(mixed(run.args.seed, run.callbacks.state.global_step, micro_batch.number))
    HERE.enter("forward")
    inputs = to_device(feed.inputs, run.device)
    with autocast(run.args, run.device):
        loss = run.compute_loss(run.model, inputs, weight)
    if run.ledger is not None:
        run.ledger.note(micro_batch.number, feed.sample_ids, weight, loss.detach(), feed.inputs)
    losses.put(micro_batch.number, loss.detach().float() * weight)
    if total is not None:
        summed = losses.total()
        assert summed is not None
        run.model.weigh(total, summed)
    HERE.enter("backward")
    backward(loss, weight)


def _norm(run: Run) -> torch.Tensor | None:
    """The norm of the reduced gradients, 0-dim, which are clipped to what the arguments say; None where nobody asks for it."""
    HERE.enter("optimizer")
    note_gradients(run)
    if run.args.max_grad_norm > 0:
        return clip_gradients(run.parameters, run.args.max_grad_norm)
    return None if run.args.nonfinite_gradients == "ignore" else gradient_norm(run.parameters)


def _leave_out(run: Run, fed: Sequence[tuple[Feed, float]], copies: BufferCopies | None) -> StepResult:
    """Collective. The gradients are not finite: raise, or count the step, and leave everything as it was."""
    totals = run.model.totals
    assert totals is not None
    text = report_nonfinite(run, fed)
    run.say(f"{text}\n  This step is left out.")
    if copies is not None:
        copies.put_back()
    drop_gradients(run.optimizer)
    learning_rate = float(run.optimizer.param_groups[0]["lr"])
    return StepResult(totals.carried, totals.weight, None, learning_rate, skipped=True)


def _step(run: Run, norm: torch.Tensor | None) -> StepResult:
    totals = run.model.totals
    assert totals is not None
    run.callbacks.call("on_pre_optimizer_step")
    learning_rate = float(run.optimizer.param_groups[0]["lr"])
    run.optimizer.step()
    run.callbacks.call("on_optimizer_step")
    run.scheduler.step()
    drop_gradients(run.optimizer)
    return StepResult(totals.carried, totals.weight, norm, learning_rate)


def _tell_others(run: Run, error: Exception, place: MicroBatch | None) -> None:
    """The other ranks are on their way into a reduction; meet them there, and say why there will be no step."""
    where = f"rank {run.communicator.rank}, step {run.callbacks.state.global_step + 1}"
    if place is not None:
        where += f", micro-batch {place.number}, samples {_shown(run.feeds.sample_ids(place))}"
    if sys.version_info >= (3, 11):
        error.add_note(f"allstep: {where}")
    with suppress(AllstepError):  # this rank's own error is the one to be raised
        run.model.abandon(f"{type(error).__name__}: {error} ({where})", weight=0.0)


def _shown(sample_ids: list[int]) -> str:
    return ", ".join(map(str, sample_ids[:16])) + (" …" if len(sample_ids) > 16 else "")
