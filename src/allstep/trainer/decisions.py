"""Decisions that all ranks have to take alike: what one rank wishes becomes the wish of all, at the same step.

There are two ways. A signal to stop may come at any time, on any rank: it rides with the gradients of each step
(`DistributedDataParallel.raise_hand_if`). What callbacks wish for is brought together behind each event for which some rank
has a callback of the user's own; allstep's own, and those of Hugging Face's that decide when to log, evaluate and save, decide
the same everywhere, so that most runs ask nobody.
"""

from collections.abc import Iterable

from allstep.comm.agreement import any_rank
from allstep.trainer.callbacks.handler import EVENTS, HUGGING_FACE, heard_by, role_of
from allstep.trainer.run import Run
from allstep.trainer.state import TrainerControl

__all__ = ["EVALUATION_EVENTS", "STEP_EVENTS", "agree", "find_deciders", "heed_late_signals", "heed_signals"]

STEP_EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
"""Events up to the first agreement of a step."""

EVALUATION_EVENTS = ("on_log", "on_prediction_step", "on_evaluate")
"""Events of an evaluation."""

_WISHES = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def find_deciders(run: Run) -> None:
    """Collective, at the start: note the events for which some rank has a callback that may wish what others do not."""
    own = {event for callback in run.callbacks.callbacks for event in EVENTS if _may_decide(callback, event)}
    run.deciding_events = frozenset().union(*run.communicator.all_gather_object(own))


def agree(run: Run, events: Iterable[str]) -> None:
    """Collective where it has to be. After `events`: what any rank's callbacks wish is now what all wish.

    A run that was asked to stop saves and ends; what it would have evaluated now is left out.
    """
    control = run.callbacks.control
    if run.communicator.size > 1 and not run.deciding_events.isdisjoint(events):
        bits = any_rank(run.communicator, sum(1 << at for at, name in enumerate(_WISHES) if getattr(control, name)))
        for at, name in enumerate(_WISHES):
            setattr(control, name, bool(bits & 1 << at))
    if run.is_stopping:
        _stop(control)


def heed_signals(run: Run) -> None:
    """After a step: whether some rank had been asked to stop when its gradients were summed; the same on all ranks."""
    totals = run.model.totals
    if totals is not None and not run.is_stopping and float(totals.hands) > 0:
        run.is_stopping = True
        run.callbacks.control.should_save = True


def heed_late_signals(run: Run, is_asked: bool) -> bool:
    """Collective, at the end: whether the run stops on request; `is_asked` says whether this rank has been asked."""
    run.is_stopping = run.is_stopping or bool(any_rank(run.communicator, int(is_asked)))
    return run.is_stopping


def _stop(control: TrainerControl) -> None:
    control.should_training_stop, control.should_evaluate = True, False


def _may_decide(callback: object, event: str) -> bool:
    kind = type(callback)
    if getattr(callback, "decides_alike", False) or (kind.__module__ == HUGGING_FACE and kind.__name__ == role_of(kind)):
        return False
    return heard_by(callback, event) is not None
