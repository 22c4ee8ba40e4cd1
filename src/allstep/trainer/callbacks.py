"""Callbacks: what users hang onto the events of a run, and the one that decides when to log, evaluate and save."""

from collections.abc import Iterable
from typing import Any

from allstep.arguments import TrainingArguments
from allstep.trainer.state import TrainerControl, TrainerState

__all__ = ["EVENTS", "CallbackHandler", "DefaultFlowCallback", "TrainerCallback"]

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_prediction_step",
    "on_save",
    "on_log",
)
"""Every event, under Hugging Face's names."""


class TrainerCallback:
    """Override the events you want; each is called on every rank as `event(args, state, control, **kwargs)`.

    kwargs hold model (unwrapped), processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader, and with on_log
    `logs`, with on_evaluate and on_predict `metrics`, with on_save `checkpoint`, its folder. A control that is returned
    replaces the one passed in.

    What a callback sets in `control` on one rank holds for all: the ranks agree behind each event, with one small collective. A
    class that sets the same on every rank may say so, `decides_alike = True`, and saves that.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The Trainer is made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Everything is ready; the first step comes next."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The last step is done."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A pass over the data begins, or goes on after a resume."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A pass over the data is done."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Before the first micro-batch of an optimizer step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After each micro-batch of an optimizer step but the last."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Gradients are reduced and clipped; the optimizer has not moved."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has moved; gradients are still there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an optimizer step."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an evaluation."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a prediction."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After each batch of an evaluation or prediction on this rank."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A checkpoint is on disk; with `save_in_background`, that of an earlier step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Numbers are logged."""


_EMPTY: dict[str, object] = {event: getattr(TrainerCallback, event) for event in EVENTS}
"""Event -> the method that does nothing, and need not be called."""


class CallbackHandler:
    """Calls every callback in the order in which they were added."""

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]], args: TrainingArguments) -> None:
        self.callbacks: list[Any] = []
        self.args = args
        self.state = TrainerState()
        self.control = TrainerControl()
        self.kwargs: dict[str, Any] = {}
        """What every event is told beside args, state and control."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append a callback, or a class that is called for one."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Take out a callback, given itself or its class; None where there is none."""
        for held in self.callbacks:
            if held is callback or (isinstance(callback, type) and type(held) is callback):
                self.callbacks.remove(held)
                return held
        return None

    def call(self, event: str, **kwargs: Any) -> None:
        """Tell every callback of `event`."""
        empty = _EMPTY.get(event, self)
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None and getattr(method, "__func__", None) is not empty:
                changed = method(self.args, self.state, self.control, **self.kwargs, **kwargs)
                if changed is not None:
                    self.control = changed


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
        if args.save_strategy == "steps" and state.save_steps and (step % state.save_steps == 0 or last):
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
