"""Callbacks that every run has: what decides when to log, evaluate and save, and what shows it to a person."""

from collections.abc import Iterable
from typing import Any

from allstep.arguments import TrainingArguments
from allstep.trainer.callbacks.handler import TrainerCallback, role_of
from allstep.trainer.state import TrainerControl, TrainerState

__all__ = ["DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "with_defaults"]


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates and saves when the arguments say so."""

    decides_alike = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set what is due after this step; the last one of a run evaluates and saves wherever steps do."""
        step, last = state.global_step, state.global_step >= state.max_steps
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == "steps" and (step % state.eval_steps == 0 or last) and step >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or (state.save_steps > 0 and step % state.save_steps == 0)):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set what is due after this epoch."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


class ProgressCallback(TrainerCallback):
    """While it is there, rank 0 shows a progress bar where standard error is a terminal, and a line an event elsewhere.

    It is a switch: `report/watch.py` shows them.

    Args:
        max_str_len: taken for Hugging Face's sake; lines are not cut here.
    """

    decides_alike = True

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len


class PrinterCallback(TrainerCallback):
    """While it is there, rank 0 shows a line an event, be it above the progress bar. A switch, as `ProgressCallback` is."""

    decides_alike = True


def with_defaults(
    callbacks: Iterable[TrainerCallback | type[TrainerCallback]] | None, disable_tqdm: bool | None
) -> list[TrainerCallback | type[TrainerCallback]]:
    """A user's `callbacks` between those that every run has, in Hugging Face's order: flow first, what shows it last.

    Where the user brings one that plays the same part, that one plays it alone.
    """
    given = list(callbacks or ())
    roles = {role_of(each if isinstance(each, type) else type(each)) for each in given}
    shown = PrinterCallback if disable_tqdm else ProgressCallback
    flow, last = ([] if each.__name__ in roles else [each] for each in (DefaultFlowCallback, shown))
    return [*flow, *given, *last]
