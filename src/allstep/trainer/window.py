"""The window of one optimizer step: this rank's micro-batches forward and backward, buckets reduced meanwhile."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from allstep.comm.watchdog import HERE
from allstep.data.grid import Grid, MicroBatch
from allstep.data.loader import Feed
from allstep.data.seeding import mixed, seed_generators
from allstep.ddp.tree import TreeSum
from allstep.errors import AllstepError, CollectiveError, RankFailedError
from allstep.trainer.optimization.gradients import backward, drop_gradients
from allstep.trainer.run import Run

__all__ = ["reduce_gradients"]


def reduce_gradients(run: Run, window: Sequence[MicroBatch]) -> list[tuple[MicroBatch, float]]:
    """Collective. Run this rank's `window`: every rank then holds the mean of all gradients of the step.

    Gives the micro-batches that counted, with their weights. Every rank comes to the reduction, and raises in it or not at all.

    Raises:
        RankFailedError: another rank could not run its window.
        Exception: whatever this rank's data or model raised, after the other ranks were told.
    """
    place: MicroBatch | None = None  # where this rank is
    counted: list[tuple[MicroBatch, float]] = []
    try:
        weight, losses = 0.0, TreeSum(torch.add)
        reduced = is_raw = False
        first = run.communicator.rank * (run.grid.micro_batches_per_step // run.communicator.size)
        _call_as_often_as_others(run, len(window))
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
                counted.append((place, own_weight))
                if run.sums_in_order:
                    run.model.begin_micro_batch(micro_batch.number - first)
                reduced = last and not run.has_own_step
                with nullcontext() if reduced else run.model.no_sync():
                    turn = _Turn(run, feed, own_weight, weight if reduced else None, losses)
                    turn.take()
                is_raw = turn.is_raw
            if not last:
                run.callbacks.call("on_substep_end")
        if not reduced:
            total = losses.total()
            run.model.take_part(
                weight=float(bool(counted)) if is_raw else weight,
                carried=torch.zeros((), device=run.device) if total is None else total,
            )
    except (CollectiveError, RankFailedError):
        raise
    except Exception as error:
        _tell_others(run, error, place)
        raise
    return counted


class _Turn:
    """One micro-batch, forward and backward: gradients of weight x loss are accumulated, and that goes into `losses`.

    With `total`, all that was accumulated is reduced in its backward, and divided by the weights of all ranks. That takes one
    backward, and its loss before it: a training step of the user's may go backward more often, or by `loss.backward()`.
    """

    def __init__(self, run: Run, feed: Feed, weight: float, total: float | None, losses: TreeSum[torch.Tensor]) -> None:
        self._run, self._feed, self._weight, self._total, self._losses = run, feed, weight, total, losses
        self.is_raw = run.has_own_step
        """Whether nothing went through `Accelerator.backward`, so that gradients are not weighted."""

    def take(self) -> None:
        """Run the training step."""
        run, inputs = self._run, self._feed.inputs
        run.meter.count(inputs)
        seed_generators(mixed(run.args.seed, run.callbacks.state.global_step, self._feed.micro_batch.number))
        HERE.enter("forward")
        loss = run.training_step(run.model, dict(inputs) if type(inputs) is dict else inputs, self._weight, self.backward)
        if run.has_own_step:
            if self.is_raw and run.scaler is not None:
                raise RuntimeError(
                    "This Trainer's training_step calls loss.backward(), with fp16=True: expected "
                    "self.accelerator.backward(loss), which scales the loss, so that small gradients are not lost in float16."
                )
            loss = torch.as_tensor(loss, device=run.device).detach().reshape(())
            self._note(loss, 1.0 if self.is_raw else self._weight)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of weight x `loss`."""
        run = self._run
        self.is_raw = False
        if not run.has_own_step:
            self._note(loss.detach(), self._weight)
        if self._total is not None:
            summed = self._losses.total()
            assert summed is not None
            run.model.weigh(self._total, summed)
        HERE.enter("backward")
        backward(loss, self._weight if run.scaler is None else self._weight * run.scaler.factor)

    def _note(self, loss: torch.Tensor, weight: float) -> None:
        feed, ledger = self._feed, self._run.ledger
        if ledger is not None:
            ledger.note(feed.micro_batch.number, feed.sample_ids, weight, loss, feed.inputs)
        self._losses.put(feed.micro_batch.number, loss.float() * weight)


def _call_as_often_as_others(run: Run, own: int) -> None:
    """Where other ranks have more than the `own` micro-batches of this one, call what the user overrode as often as they do.

    It may talk to the other ranks (`accelerator.gather`), which would wait for this one for ever. Nothing of it counts: a
    micro-batch of rank 0, which has the most, goes forward once more (test_overrides.py).
    """
    if run.communicator.size == 1 or not run.has_own_parts or not isinstance(run.grid, Grid):
        return
    for micro_batch in run.grid.window(run.position.epoch, run.position.step, 0, run.communicator.size)[own:]:
        HERE.enter("forward")
        feed = run.feeds.again(micro_batch)
        with run.model.no_sync():
            run.training_step(run.model, feed.inputs, run.weigh(feed.inputs), lambda loss: None)
        drop_gradients(run.optimizer)  # of a loss.backward()


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
