"""The rules over several arguments: which of them are broken, in words."""

import difflib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from allstep._arguments.choices import SCHEDULES_BY_EVALUATION
from allstep._arguments.kinds import is_interval, is_number, is_whole

__all__ = ["broken_together"]

_EVENTS = ("logging", "eval", "save")


def broken_together(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(arguments looked at, sentence) of each rule over several arguments that is broken."""
    yield from _broken_length(values)
    yield from _broken_intervals(values)
    yield from _broken_best_model(values)
    yield from _broken_precision(values)
    yield from _broken_loader(values)
    yield from _broken_accelerator_config(values)
    whole, part = values["global_batch_size"], values["per_device_train_batch_size"]
    if whole is not None and is_whole(whole) and is_whole(part) and part > 0 and whole % part:
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
    if is_number(values["num_train_epochs"]) and values["num_train_epochs"] <= 0 and values["max_steps"] <= 0:
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
    schedule = values["lr_scheduler_type"]
    if schedule in SCHEDULES_BY_EVALUATION and eval_strategy == "no":
        yield (
            ("lr_scheduler_type", "eval_strategy"),
            f'lr_scheduler_type="{schedule}" with eval_strategy="no": expected evaluations, by which the learning rate goes. '
            f'Write eval_strategy="epoch", or lr_scheduler_type="linear".',
        )
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
    if not is_interval(large) or not is_interval(small) or not small or (large < 1) != (small < 1):
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


def _broken_precision(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for half, wide in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if values[half] and values[wide]:
            yield (
                (half, wide),
                f"{half}=True and {wide}=True: expected one of them. Write {wide}=True where the device has bfloat16.",
            )


_NOT_KEPT = {
    "split_batches": "per_device_train_batch_size counts the samples of one rank. Write global_batch_size to have the same "
    "samples in a step on any number of ranks",
    "dispatch_batches": "every rank reads its own part of the data. Leave it out; dataloader_split_streams says how a stream "
    "is split",
}
"""Keys of `accelerator_config` that cannot be True, and why."""
_KEPT = ("even_batches", "use_seedable_sampler", "non_blocking", "gradient_accumulation_kwargs", "use_configured_state")


def _broken_accelerator_config(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    config = values["accelerator_config"]
    if not isinstance(config, dict):
        return
    known = (*_NOT_KEPT, *_KEPT)
    for key, value in config.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            yield (
                ("accelerator_config",),
                f"accelerator_config has {key!r}: expected {close[0] if close else ', '.join(known)}.",
            )
        elif key in _NOT_KEPT and value:
            yield ("accelerator_config",), f"accelerator_config has {key}={value!r}: expected False, as {_NOT_KEPT[key]}."
    accumulation = config.get("gradient_accumulation_kwargs")
    if accumulation is not None and not isinstance(accumulation, dict):
        yield (
            ("accelerator_config",),
            f"accelerator_config has gradient_accumulation_kwargs={accumulation!r}: expected a dictionary. Write "
            f"gradient_accumulation_steps instead.",
        )
    steps = accumulation.get("num_steps") if isinstance(accumulation, dict) else None
    if steps not in (None, values["gradient_accumulation_steps"]):
        yield (
            ("accelerator_config", "gradient_accumulation_steps"),
            f"accelerator_config has num_steps={steps!r}, and gradient_accumulation_steps="
            f"{values['gradient_accumulation_steps']}: expected one number. Write gradient_accumulation_steps only.",
        )
