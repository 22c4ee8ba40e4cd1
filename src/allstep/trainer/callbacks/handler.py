"""Callbacks: what users hang onto the events of a run, and who calls them. What allstep itself hangs there is in `flow`."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from allstep.arguments import TrainingArguments
from allstep.trainer.state import TrainerControl, TrainerState, exported_states

__all__ = ["EVENTS", "HUGGING_FACE", "CallbackHandler", "TrainerCallback", "heard_by", "role_of"]

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
    "on_push_begin",
)
"""Every event, under Hugging Face's names."""

_ROLES = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback")
"""Names of classes, here and in transformers, whose part in a run is played by one callback at a time."""
HUGGING_FACE = "transformers.trainer_callback"
"""Where Hugging Face's own callbacks are. It is never imported here: most runs have no use for transformers."""


class TrainerCallback:
    """Override the events you want; each is called on every rank as `event(args, state, control, **kwargs)`.

    kwargs hold model (unwrapped), processing_class (also as tokenizer, its older name), optimizer, lr_scheduler,
    train_dataloader, eval_dataloader, and with on_log `logs`, with on_evaluate and on_predict `metrics`, with on_save
    `checkpoint`, its folder. What a callback changes in logs and metrics is what those behind it, files, trackers and the
    caller get. A control that is returned replaces the one passed in. Subclasses of transformers' TrainerCallback do as well.

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

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Gradients are reduced and clipped; the optimizer has not moved."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has moved; gradients are still there."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After each micro-batch of an optimizer step but the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an optimizer step."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After an evaluation."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a prediction."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A checkpoint is on disk; with `save_in_background`, that of an earlier step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Numbers are logged."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After each batch of an evaluation or prediction on this rank."""

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Never: nothing is uploaded from here. Hugging Face's callbacks have it."""


_EMPTY: dict[str, object] = {event: getattr(TrainerCallback, event) for event in EVENTS}
"""Event -> the method that does nothing, and need not be called."""


def heard_by(callback: object, event: str) -> Any:
    """The method of `callback` that hears of `event`; None where it has none, or one that does nothing."""
    method = getattr(callback, event, None)
    function = getattr(method, "__func__", None)
    if function is None:
        return method
    if function is _EMPTY.get(event):
        return None
    is_theirs = function.__module__ == HUGGING_FACE and function.__qualname__ == f"TrainerCallback.{event}"
    return None if is_theirs else method


def role_of(kind: type) -> str | None:
    """Which part in a run callbacks of a class play: the name of allstep's or Hugging Face's class that it is or comes from."""
    names = (each.__name__ for each in kind.__mro__ if each.__module__ == HUGGING_FACE or _is_ours(each))
    return next((name for name in names if name in _ROLES), None)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("allstep.")


class CallbackHandler:
    """Calls every callback in the order in which they were added.

    It has a method for each event, named like it: `on_log(args, state, control, logs)` gives the control that is to be used
    from then on. `call` is the same with the args, state and control held here.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        *,
        args: TrainingArguments | None = None,
    ) -> None:
        self.callbacks: list[Any] = []
        """In the order in which they are called."""
        self.args: Any = args
        self.state = TrainerState()
        self.control = TrainerControl()
        self.model, self.processing_class = model, processing_class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        for callback in callbacks:
            self.add_callback(callback)

    # ---- who is called

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append a callback, or a class that is called for one.

        Where Hugging Face's DefaultFlowCallback, ProgressCallback or PrinterCallback comes, allstep's own steps aside, and the
        other way round it does not come: nothing is decided or shown twice.
        """
        added = callback() if isinstance(callback, type) else callback
        role = role_of(type(added))
        rivals = [held for held in self.callbacks if role is not None and role_of(type(held)) == role]
        if rivals and _is_ours(type(added)):
            return
        self.callbacks = [held for held in self.callbacks if not (held in rivals and _is_ours(type(held)))]
        self.callbacks.append(added)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Take out the first callback that is `callback`, or of that class, and return it; None where there is none.

        Hugging Face's classes name allstep's callbacks of the same name too.
        """
        for held in self.callbacks:
            if held is callback or (isinstance(callback, type) and _is_of(held, callback)):
                self.callbacks = [each for each in self.callbacks if each is not held]
                return held
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take out the first callback that is `callback`, or of that class, if there is one."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """The names of their classes, one a line."""
        return "\n".join(type(each).__name__ for each in self.callbacks)

    def has_role(self, role: str) -> bool:
        """Whether one of allstep's own callbacks plays a part: "ProgressCallback", say; Hugging Face's do as they like."""
        return any(_is_ours(type(each)) and role_of(type(each)) == role for each in self.callbacks)

    def export(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callbacks: name of class -> state.

        Of the control it has the name, which Hugging Face's Trainer looks for, and no wish: they are not restored.
        """
        return exported_states([*self.callbacks, TrainerControl()])

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put callbacks in the place of those of the same class, made from what `export` gave; warn of those without one.

        The control stays as it is: each of its flags is cleared before the next step, whatever it was.
        """
        missing = []
        for name, saved in states.items():
            places = [at for at, held in enumerate(self.callbacks) if type(held).__name__ == name]
            for at, state in zip(places, saved if isinstance(saved, list) else [saved], strict=False):
                self.callbacks[at] = type(self.callbacks[at]).from_state(state)
            if not places and name != type(self.control).__name__:
                missing.append(name)
        if missing:
            warnings.warn(
                f"The checkpoint holds the state of callbacks that this Trainer does not have: {', '.join(missing)}. They are "
                f"left out; pass them in Trainer(callbacks=[...]) to go on with them.",
                stacklevel=2,
            )

    # ---- events

    def call(self, event: str, **kwargs: Any) -> None:
        """Tell every callback of `event`, and hold the control that comes of it."""
        tell = getattr(self, event, None)
        if tell is None:  # an event of the user's own
            self.control = self.call_event(event, self.args, self.state, self.control, **kwargs)
        else:
            self.control = tell(self.args, self.state, self.control, **kwargs)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Tell every callback of `event`; the control that comes of it."""
        for callback in self.callbacks:
            method = heard_by(callback, event)
            if method is not None:
                changed = method(
                    args,
                    state,
                    control,
                    model=self.model,
                    processing_class=self.processing_class,
                    tokenizer=self.processing_class,
                    optimizer=self.optimizer,
                    lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader,
                    eval_dataloader=self.eval_dataloader,
                    **kwargs,
                )
                control = control if changed is None else changed
        return control

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The Trainer is made."""
        return self.call_event("on_init_end", args, state, control, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Training begins; a wish to stop from before is forgotten."""
        control.should_training_stop = False
        return self.call_event("on_train_begin", args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Training has ended."""
        return self.call_event("on_train_end", args, state, control, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch begins; the wish to end the one before is done."""
        control.should_epoch_stop = False
        return self.call_event("on_epoch_begin", args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch is done."""
        return self.call_event("on_epoch_end", args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A step begins; wishes to log, evaluate and save are done."""
        control.should_log = control.should_evaluate = control.should_save = False
        return self.call_event("on_step_begin", args, state, control, **kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer is about to move."""
        return self.call_event("on_pre_optimizer_step", args, state, control, **kwargs)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has moved."""
        return self.call_event("on_optimizer_step", args, state, control, **kwargs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A micro-batch is done that is not the last of its step."""
        return self.call_event("on_substep_end", args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A step is done."""
        return self.call_event("on_step_end", args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """An evaluation is done, and with it the wish for one."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """A prediction is done."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A checkpoint is on disk, and the wish for it done."""
        control.should_save = False
        return self.call_event("on_save", args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        """Numbers are logged, and the wish for them done."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation or prediction is done."""
        return self.call_event("on_prediction_step", args, state, control, **kwargs)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An upload begins, in scripts that do it themselves."""
        return self.call_event("on_push_begin", args, state, control, **kwargs)


def _is_of(held: object, kind: type) -> bool:
    """Whether `held` is of a class, or is allstep's part of the same name as Hugging Face's class."""
    if isinstance(held, kind):
        return True
    names = [each.__name__ for each in type(held).__mro__]
    return kind.__module__ == HUGGING_FACE and _is_ours(type(held)) and kind.__name__ in names
