"""Names that Hugging Face's TrainingArguments had in earlier versions: what each is called now, and where it is translated.

`ArgumentsMeta` has every `__init__` that @dataclass writes take old names as well, be it called from outside or by the
`__init__` of a subclass.
"""

import abc
import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from allstep._arguments.names import unknown_names_message
from allstep.environment import WorkerEnvironment
from allstep.errors import ArgumentsError, LaunchVariablesError

__all__ = ["OLD_NAMES", "ArgumentsMeta", "OldName", "current_names", "warn"]


@dataclass(frozen=True)
class OldName:
    """One name that is no longer used."""

    advice: str
    """What to do instead, for the warning."""
    now: Callable[[Any], Mapping[str, Any]] | None = None
    """Value → the arguments that say the same today, none for the usual value. None: nothing looks at it any more."""
    kind: Any = bool | None
    """Annotation by which a command line reads it."""
    read: Callable[[Any], Any] = lambda args: None
    """Arguments → what the old name reads as, where scripts read it and were not given it."""
    accepts: Callable[[Any], bool] = lambda value: True
    """Whether a value can be followed; others are refused with the advice."""
    expected: str = ""
    """Which values can be followed, in words; empty for all of them."""


def _renamed(new: str, kind: Any) -> OldName:
    def now(value: Any) -> Mapping[str, Any]:
        return {} if value is None else {new: value}

    return OldName(f"write {new}", now, kind, lambda args: getattr(args, new))


def _switch(new: str, value: Any, read: Callable[[Any], bool]) -> OldName:
    """A switch that has become a value of another argument."""
    return OldName(f"write {new}={value!r}", lambda on: {new: value} if on else {}, read=read)


def _dropped(advice: str, usual: Any, kind: Any = bool | None) -> OldName:
    """A name that says nothing any more, whatever its value."""
    return OldName(f"{advice}; leave it out", None, kind, lambda args: usual)


def _gone(advice: str, usual: Any = False, kind: Any = bool | None) -> OldName:
    """A name that cannot be followed, unless its value asks for nothing; `usual` is how it said that."""
    accepted = (None, False, "", usual)
    return OldName(advice, None, kind, lambda args: usual, lambda value: value in accepted, "nothing")


_OTHER_ENGINE = "every rank holds the whole model here; leave it out"
_PRECISION = "bf16 or fp16 says all there is to say"

OLD_NAMES: Mapping[str, OldName] = {
    "evaluation_strategy": _renamed("eval_strategy", str | None),
    "evaluate_during_training": _switch("eval_strategy", "steps", lambda args: args.eval_strategy == "steps"),
    "warmup_ratio": OldName(
        "write warmup_steps=0.1 for a tenth of all steps",
        lambda share: {"warmup_steps": share} if share else {},
        float | None,
        lambda args: args.warmup_steps if args.warmup_steps < 1 else 0.0,
        lambda share: not isinstance(share, (int, float)) or share < 1,  # warmup_steps=1 is one step
        "a share of all steps below 1",
    ),
    "no_cuda": _renamed("use_cpu", bool | None),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", int | None),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", int | None),
    "group_by_length": _switch(
        "train_sampling_strategy", "group_by_length", lambda args: args.train_sampling_strategy == "group_by_length"
    ),
    "adafactor": _switch("optim", "adafactor", lambda args: args.optim == "adafactor"),
    "include_inputs_for_metrics": _switch("include_for_metrics", ["inputs"], lambda args: "inputs" in args.include_for_metrics),
    "include_tokens_per_second": _switch(
        "include_num_input_tokens_seen", "all", lambda args: args.include_num_input_tokens_seen != "no"
    ),
    "xpu_backend": _renamed("ddp_backend", str | None),
    "torchdynamo": _renamed("torch_compile_backend", str | None),
    "push_to_hub_model_id": _renamed("hub_model_id", str | None),
    "push_to_hub_token": _renamed("hub_token", str | None),
    "push_to_hub_organization": _dropped("nothing is uploaded from here", None, str | None),
    "overwrite_output_dir": _dropped("training resumes only where train(resume_from_checkpoint=...) asks for it", False),
    "logging_dir": OldName("logs go to output_dir; leave it out", None, str | None, lambda args: f"{args.output_dir}/runs"),
    "save_safetensors": _dropped("models are always saved as safetensors", True),
    "use_mps_device": _dropped("the device is found without it", False),
    "half_precision_backend": _dropped(_PRECISION, "auto", str | None),
    "fp16_backend": _dropped(_PRECISION, "auto", str | None),
    "fp16_opt_level": _dropped(_PRECISION, "O1", str | None),
    "dispatch_batches": _gone("every rank reads its own part of the data; leave it out", None),
    "split_batches": _gone("write global_batch_size, the samples of a step on all ranks"),
    "sharded_ddp": _gone(_OTHER_ENGINE, [], str | None),
    "fsdp_min_num_params": _gone(_OTHER_ENGINE, 0, int | None),
    "fsdp_transformer_layer_cls_to_wrap": _gone(_OTHER_ENGINE, None, str | None),
    "mp_parameters": _gone(_OTHER_ENGINE, "", str | None),
    "tpu_num_cores": _gone("TPUs are not supported; leave it out", None, int | None),
    "tpu_metrics_debug": _gone("TPUs are not supported; leave it out"),
    "past_index": _gone("nothing is carried from batch to batch; leave it out", -1, int | None),
    "ray_scope": _dropped("searches of hyperparameters are not part of this package", "last", str | None),
    "use_ipex": _gone("call ipex.optimize on the model in the script instead"),
    "jit_mode_eval": _gone("write torch_compile=True"),
    "use_legacy_prediction_loop": _gone("there is one way to evaluate; leave it out"),
}
"""Old name → what it is now. No name here is a field of TrainingArguments (tests/unit/test_arguments.py)."""


class ArgumentsMeta(abc.ABCMeta):
    """The class of TrainingArguments and its subclasses. An ABCMeta, so that they can be mixed with abstract classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        # the way in which @dataclass hands a class the __init__ that it wrote; one written by hand never comes here
        super().__setattr__(name, _taking_old_names(value) if name == "__init__" else value)


def _taking_old_names(init: Callable[..., None]) -> Callable[..., None]:
    accepted = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def taking_old_names(self: Any, *args: Any, **kwargs: Any) -> None:
        current, kept = current_names(type(self).__name__, kwargs, accepted)
        vars(self).update(kept)
        init(self, *args, **current)

    return taking_old_names


def current_names(owner: str, given: Mapping[str, Any], accepted: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments under any names in; (those under the names of today, old ones that now say nothing) out. Warns of old names.

    Args:
        owner: the class whose arguments they are, for messages.
        accepted: the names that it knows.

    Raises:
        TypeError: names that are neither known nor old.
        ArgumentsError: one argument under two names, or an old one with a value that cannot be followed.
    """
    current = {name: value for name, value in given.items() if name in accepted}
    old = {name: value for name, value in given.items() if name not in accepted and name in OLD_NAMES}
    unknown = [name for name in given if name not in current and name not in old]
    if unknown:
        raise TypeError(unknown_names_message(owner, unknown, accepted))
    kept, wrong = {}, []
    for name, value in old.items():
        problem, new = _translated(name, value, current)
        if problem:
            wrong.append(problem)
            continue
        current |= new
        if OLD_NAMES[name].now is None:
            kept[name] = value
        warn(f"{name}={value!r} is an argument of earlier versions: {OLD_NAMES[name].advice}.", FutureWarning)
    if wrong:
        raise ArgumentsError(f"{owner} cannot hold together:{''.join(f'{chr(10)}  {problem}' for problem in wrong)}")
    return current, kept


def _translated(name: str, value: Any, current: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(what is wrong, the arguments of today) for one old name."""
    entry = OLD_NAMES[name]
    if not entry.accepts(value):
        return f"{name}={value!r}: expected {entry.expected}, {entry.advice}.", {}
    new = entry.now(value) if entry.now else {}
    twice = next(iter(new.keys() & current.keys()), None)
    if twice is None:
        return "", new
    return (
        f"{name}={value!r} and {twice}={current[twice]!r}: expected one of them, these are the old and the new name of one "
        f"argument. Write {twice} only.",
        {},
    )


def warn(text: str, category: type[Warning]) -> None:
    """Warn of what a script wrote, at the line of the script; on rank 0, as all ranks run the same script."""
    try:
        rank = WorkerEnvironment.from_variables(os.environ).rank
    except LaunchVariablesError:
        rank = 0  # who joins the others will be told
    if rank:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_ours(frame: types.FrameType) -> bool:
    written_by_dataclass = frame.f_code.co_filename == "<string>" and frame.f_code.co_name == "__init__"
    return written_by_dataclass or str(frame.f_globals.get("__name__")).startswith("allstep.")
