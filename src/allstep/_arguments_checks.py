"""The rules that TrainingArguments must keep, as two pure functions over its values.

`normalise` brings what people write (enums, JSON, 100.0 for 100, None for "the usual") to one form; `problems` lists in
words whatever is still wrong, all of it at once.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

__all__ = ["OPTIMIZERS", "SCHEDULES", "normalise", "problems"]

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
)
"""Values of `lr_scheduler_type`; the formulas are in allstep.trainer.schedulers (tests/unit/test_schedulers.py)."""
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
"""Values of `optim`; allstep.trainer.optimizers makes them (tests/unit/test_optimizers.py)."""

_DICTIONARIES = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_WHOLE_OR_SHARE = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")
_EVENTS = ("logging", "eval", "save")


def normalise(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments in one form: plain strings, numbers and dictionaries, unset ones filled in from others.

    Values of a wrong kind pass unchanged; `problems` reports them.
    """
    new = {name: _simple(value) for name, value in values.items()}
    for name in _DICTIONARIES:
        new[name] = _from_json_object(new[name])
    for name in _WHOLE_OR_SHARE:
        if _is_number(new[name]) and new[name] >= 1 and new[name] == int(new[name]):
            new[name] = int(new[name])
    new["output_dir"] = "trainer_output" if new["output_dir"] is None else new["output_dir"]
    if isinstance(new["output_dir"], str):
        new["output_dir"] = os.path.expanduser(new["output_dir"])
    if new["report_to"] in ("none", ["none"]):
        new["report_to"] = []
    if isinstance(new["report_to"], str):
        new["report_to"] = [new["report_to"]]

    if new["eval_strategy"] == "steps" and new["eval_steps"] is None:
        new["eval_steps"] = new["logging_steps"]
    if new["eval_strategy"] in ("steps", "epoch"):
        new["do_eval"] = True
    if new["metric_for_best_model"] is None and (new["load_best_model_at_end"] is True or new["save_strategy"] == "best"):
        new["metric_for_best_model"] = "loss"
    if new["greater_is_better"] is None and isinstance(new["metric_for_best_model"], str):
        new["greater_is_better"] = not new["metric_for_best_model"].endswith("loss")
    return new


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with normalised arguments: one sentence each, with what was found, expected and to be written."""
    wrong_kind = {
        name: f"{name}={values[name]!r}: expected {expected}."
        for names, holds, expected in _KINDS
        for name in names
        if not holds(values[name])
    }
    # A rule over several arguments is worth checking only where each of them is of the right kind.
    together = [sentence for names, sentence in _together(values) if not wrong_kind.keys() & set(names)]
    return [*wrong_kind.values(), *together]


# ---- one form


def _simple(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Real):  # numpy's numbers would not go into JSON
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _from_json_object(value: Any) -> Any:
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else value
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return value
    return read if isinstance(read, dict) else value


# ---- rules on one argument: names, what holds for the value, the same in words


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _is_interval(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (value < 1 or _is_whole(value))


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, str) and value in choices), f"one of {', '.join(choices)}"


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("per_device_train_batch_size", "per_device_eval_batch_size"),
        lambda value: _is_whole(value) and value >= 1,
        "a whole number of samples, at least 1, such as 8",
    ),
    (
        ("gradient_accumulation_steps",),
        lambda value: _is_whole(value) and value >= 1,
        "a whole number of micro-batches, at least 1; write 1 for no accumulation",
    ),
    (
        ("global_batch_size",),
        _or_none(lambda value: _is_whole(value) and value >= 1),
        "a whole number of samples, at least 1, or None for micro-batch x accumulation x world size",
    ),
    (
        ("deterministic_reduction",),
        lambda value: isinstance(value, bool) or value == "auto",
        'True, False or "auto"',
    ),
    (("num_train_epochs",), _is_number, "a number of epochs, such as 3"),
    (("max_steps",), _is_whole, "a whole number of optimizer steps; write -1 to go by num_train_epochs"),
    (
        ("learning_rate", "weight_decay", "adam_epsilon"),
        lambda value: _is_number(value) and value >= 0,
        "a number, at least 0, such as 5e-5 (text is no number: write 5e-5, not '5e-5')",
    ),
    (
        ("adam_beta1", "adam_beta2"),
        lambda value: _is_number(value) and 0 <= value < 1,
        "a number from 0 up to but not 1, such as 0.9",
    ),
    (
        ("max_grad_norm",),
        lambda value: _is_number(value) and value >= 0,
        "a number, at least 0; write 0 to turn clipping off",
    ),
    (("lr_scheduler_type",), *_one_of(*SCHEDULES)),
    (("optim",), *_one_of(*OPTIMIZERS)),
    (("dataloader_split_streams",), *_one_of("samples", "shards")),
    (("logging_strategy", "eval_strategy"), *_one_of("no", "steps", "epoch")),
    (("save_strategy",), *_one_of("no", "steps", "epoch", "best")),
    (("save_failure",), *_one_of("continue", "stop")),
    (
        _DICTIONARIES,
        _or_none(lambda value: isinstance(value, dict)),
        "a dictionary or a JSON object, such as '{\"a\": 1}'",
    ),
    (
        ("warmup_steps", "logging_steps", "save_steps"),
        _is_interval,
        "a whole number of steps, such as 100, or a share of all steps below 1, such as 0.1",
    ),
    (
        ("eval_steps",),
        _or_none(_is_interval),
        "a whole number of steps, such as 100, a share of all steps below 1, such as 0.1, or None for logging_steps",
    ),
    (("eval_delay",), lambda value: _is_number(value) and value >= 0, "a number of steps or epochs, at least 0"),
    (
        ("seed",),
        lambda value: _is_whole(value) and 0 <= value < 2**32,
        "a whole number from 0 to 2**32 - 1, such as 42",
    ),
    (
        ("data_seed",),
        _or_none(lambda value: _is_whole(value) and 0 <= value < 2**32),
        "a whole number from 0 to 2**32 - 1, or None for seed",
    ),
    (
        ("ddp_timeout",),
        lambda value: _is_number(value) and value > 0,
        "a number of seconds above 0, such as 1800",
    ),
    (
        ("ddp_wait_warning",),
        lambda value: _is_number(value) and value >= 0,
        "a number of seconds, such as 60; write 0 for no warning before the timeout",
    ),
    (
        ("ddp_drift_check_steps",),
        lambda value: _is_whole(value) and value >= 0,
        "a whole number of optimizer steps; write 0 for no comparison between checkpoints",
    ),
    (("ddp_drift_action",), *_one_of("raise", "repair")),
    (("nonfinite_gradients",), *_one_of("raise", "skip", "ignore")),
    (
        ("ddp_bucket_cap_mb",),
        _or_none(lambda value: _is_number(value) and value > 0),
        "a number of MiB above 0, such as 25, or None for a planned size",
    ),
    (
        ("save_total_limit",),
        _or_none(lambda value: _is_whole(value) and value >= 1),
        "a whole number of checkpoints, at least 1, or None to keep all",
    ),
    (
        ("ledger_digest_steps",),
        lambda value: _is_whole(value) and value >= 0,
        "a whole number of optimizer steps; write 0 for no digests",
    ),
    (
        ("dataloader_num_workers",),
        lambda value: _is_whole(value) and value >= 0,
        "a whole number of processes; write 0 to load in the rank itself",
    ),
    (
        ("dataloader_prefetch_factor",),
        _or_none(lambda value: _is_whole(value) and value >= 1),
        "a whole number of batches, at least 1, or None for 2",
    ),
    (
        (
            "auto_find_batch_size",
            "do_train",
            "do_eval",
            "do_predict",
            "bf16",
            "full_determinism",
            "use_cpu",
            "logging_first_step",
            "eval_on_start",
            "prediction_loss_only",
            "batch_eval_metrics",
            "save_only_model",
            "save_in_background",
            "load_best_model_at_end",
            "ledger",
            "dataloader_drop_last",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "remove_unused_columns",
        ),
        lambda value: isinstance(value, bool),
        "True or False (text is neither: write False, not 'false')",
    ),
    (
        (
            "gradient_checkpointing",
            "activation_checkpointing",
            "ddp_find_unused_parameters",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "disable_tqdm",
            "greater_is_better",
        ),
        _or_none(lambda value: isinstance(value, bool)),
        "True, False or None",
    ),
    (("output_dir",), lambda value: isinstance(value, str) and value != "", "a path of a folder"),
    (
        ("resume_from_checkpoint", "ddp_backend", "run_name", "metric_for_best_model"),
        _or_none(lambda value: isinstance(value, str) and value != ""),
        "a text, or None",
    ),
    (("label_names",), _or_none(_is_texts), 'a list of names, such as ["labels"], or None'),
    (
        ("include_for_metrics",),
        lambda value: _is_texts(value) and set(value) <= {"inputs", "loss"},
        'a list of "inputs", "loss", both or neither',
    ),
    (
        ("report_to",),
        lambda value: _is_texts(value) and set(value) <= {"tensorboard", "all"},
        '"tensorboard", "all" or "none"; for another tracker, pass Trainer(callbacks=[...]) one that logs to it',
    ),
)


# ---- rules on several arguments


def _together(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(arguments looked at, sentence) of each rule over several arguments that is broken."""
    yield from _broken_length(values)
    yield from _broken_intervals(values)
    yield from _broken_best_model(values)
    yield from _broken_loader(values)
    whole, part = values["global_batch_size"], values["per_device_train_batch_size"]
    if whole is not None and _is_whole(whole) and _is_whole(part) and part > 0 and whole % part:
        yield (
            ("global_batch_size", "per_device_train_batch_size"),
            f"global_batch_size={whole} and per_device_train_batch_size={part}: expected whole micro-batches. Write "
            f"global_batch_size={max(1, whole // part) * part}, or a per_device_train_batch_size that divides {whole}.",
        )
    for what in ("checkpointing", "checkpointing_kwargs"):
        older, newer = f"gradient_{what}", f"activation_{what}"
        if None not in (values[older], values[newer]) and values[older] != values[newer]:
            yield (
                (older, newer),
                f"{older}={values[older]!r} and {newer}={values[newer]!r}: expected one value, these are two names of "
                f"one switch. Write {newer} only.",
            )


def _broken_length(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    if _is_number(values["num_train_epochs"]) and values["num_train_epochs"] <= 0 and values["max_steps"] <= 0:
        yield (
            ("num_train_epochs", "max_steps"),
            f"num_train_epochs={values['num_train_epochs']} and max_steps={values['max_steps']}: expected one of them "
            f"above 0, else there is nothing to train. Write num_train_epochs=3, or max_steps=1000.",
        )


def _broken_intervals(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for event in _EVENTS:
        strategy, steps = f"{event}_strategy", f"{event}_steps"
        if values[strategy] == "steps" and values[steps] == 0:
            yield (
                (strategy, steps),
                f'{steps}=0 with {strategy}="steps": expected steps above 0. Write {steps}=100, or {strategy}="no".',
            )


def _broken_best_model(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    eval_strategy, save_strategy = values["eval_strategy"], values["save_strategy"]
    names = ("load_best_model_at_end", "eval_strategy", "save_strategy", "eval_steps", "save_steps")
    if save_strategy == "best" and eval_strategy == "no":
        yield names, 'save_strategy="best" with eval_strategy="no": expected evaluations. Write eval_strategy="steps".'
    if not values["load_best_model_at_end"] or save_strategy == "best":
        return
    if eval_strategy == "no" or eval_strategy != save_strategy:
        yield (
            names,
            f'load_best_model_at_end=True with eval_strategy="{eval_strategy}" and save_strategy="{save_strategy}": '
            f"expected the best model to be on disk, so equal strategies. Write "
            f'eval_strategy="steps", save_strategy="steps", or both "epoch".',
        )
    elif eval_strategy == "steps" and not _is_multiple(values["save_steps"], values["eval_steps"]):
        yield (
            names,
            f"load_best_model_at_end=True, eval_steps={values['eval_steps']} and save_steps={values['save_steps']}: "
            f"expected every checkpoint to be evaluated, so save_steps to be a multiple of eval_steps. Write "
            f"save_steps={values['eval_steps']}.",
        )


def _is_multiple(large: float, small: float) -> bool:
    if not _is_interval(large) or not _is_interval(small) or not small or (large < 1) != (small < 1):
        return False  # a number of steps and a share of them cannot be compared before the run's length is known
    return Fraction(repr(large)) % Fraction(repr(small)) == 0  # as written: 0.3 is a multiple of 0.1


def _broken_loader(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    if values["dataloader_num_workers"] != 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if values[name]:
            yield (
                (name, "dataloader_num_workers"),
                f"{name}={values[name]} with dataloader_num_workers=0: expected loading processes. Write "
                f"dataloader_num_workers=2, or leave {name} out.",
            )
