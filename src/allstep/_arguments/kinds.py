"""The rules that each argument must keep by itself: its names, what holds for the value, and the same in words."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from allstep._arguments.choices import (
    LOG_LEVELS,
    OPTIMIZERS,
    OPTIMIZERS_OF_LIBRARIES,
    OPTIMIZERS_REFUSED,
    SCHEDULES,
    TRACKERS,
)

__all__ = ["DICTIONARIES", "is_interval", "is_number", "is_whole", "wrong_kinds"]

DICTIONARIES = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "accelerator_config")
"""Arguments that are dictionaries, or JSON of one."""

_Holds: TypeAlias = Callable[[Any], bool]
_Expected: TypeAlias = str | Callable[[Any], str]


def wrong_kinds(values: Mapping[str, Any]) -> dict[str, str]:
    """Name → sentence, of each value that is wrong by itself."""
    return {
        name: f"{name}={values[name]!r}: expected {expected(values[name]) if callable(expected) else expected}."
        for names, holds, expected in _KINDS
        for name in names.split()
        if not holds(values[name])
    }


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_interval(value: Any) -> bool:
    """Whether `value` is a number of steps, or a share of all of them."""
    return is_number(value) and value >= 0 and (value < 1 or is_whole(value))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _or_none(holds: _Holds) -> _Holds:
    return lambda value: value is None or holds(value)


def _whole(least: int, most: float = math.inf) -> _Holds:
    return lambda value: is_whole(value) and least <= value <= most


def _number(least: float, most: float = math.inf) -> _Holds:
    return lambda value: is_number(value) and least <= value <= most


def _only(*harmless: Any) -> _Holds:
    """For switches of what is not here: the values that turn it off."""
    return lambda value: any(type(value) is type(each) and value == each for each in harmless)


def _one_of(*choices: str) -> tuple[_Holds, str]:
    return (lambda value: isinstance(value, str) and value in choices), f"one of {', '.join(choices)}"


def _expected_optimizer(value: Any) -> str:
    torchs = [name for name in OPTIMIZERS if name not in OPTIMIZERS_OF_LIBRARIES]
    if isinstance(value, str) and value in OPTIMIZERS_REFUSED:
        return f"another optimizer, as {OPTIMIZERS_REFUSED[value]}"
    return f"one of {', '.join(torchs)}, or with a library installed {', '.join(OPTIMIZERS_OF_LIBRARIES)}"


_ELSEWHERE = "as every rank holds the whole model here; leave it out"

_KINDS: tuple[tuple[str, _Holds, _Expected], ...] = (
    # ---- how much
    (
        "per_device_train_batch_size per_device_eval_batch_size",
        _whole(1),
        "a whole number of samples, at least 1, such as 8",
    ),
    (
        "gradient_accumulation_steps",
        _whole(1),
        "a whole number of micro-batches, at least 1; write 1 for no accumulation",
    ),
    (
        "global_batch_size",
        _or_none(_whole(1)),
        "a whole number of samples, at least 1, or None for micro-batch x accumulation x world size",
    ),
    ("num_train_epochs", is_number, "a number of epochs, such as 3"),
    ("max_steps", is_whole, "a whole number of optimizer steps; write -1 to go by num_train_epochs"),
    # ---- optimizer, schedule, loss
    (
        "learning_rate weight_decay adam_epsilon",
        _number(0),
        "a number, at least 0, such as 5e-5 (text is no number: write 5e-5, not '5e-5')",
    ),
    (
        "adam_beta1 adam_beta2",
        lambda value: is_number(value) and 0 <= value < 1,
        "a number from 0 up to but not 1, such as 0.9",
    ),
    ("max_grad_norm", _number(0), "a number, at least 0; write 0 to turn clipping off"),
    ("lr_scheduler_type", *_one_of(*SCHEDULES)),
    ("optim", _one_of(*OPTIMIZERS)[0], _expected_optimizer),
    (
        "optim_args",
        lambda value: value is None or (isinstance(value, str) and all("=" in part for part in value.split(",") if part)),
        'settings of the optimizer as text, such as "momentum=0.9,nesterov=True", or None',
    ),
    ("nonfinite_gradients", *_one_of("raise", "skip", "ignore")),
    ("label_smoothing_factor", _number(0, 1), "a number from 0 to 1, such as 0.1; write 0 for no smoothing"),
    ("neftune_noise_alpha", _or_none(_number(0)), "a number, at least 0, such as 5, or None for no noise"),
    # ---- numbers and seeds
    ("seed", _whole(0, 2**32 - 1), "a whole number from 0 to 2**32 - 1, such as 42"),
    ("data_seed", _or_none(_whole(0, 2**32 - 1)), "a whole number from 0 to 2**32 - 1, or None for seed"),
    ("deterministic_reduction", lambda value: isinstance(value, bool) or value == "auto", 'True, False or "auto"'),
    # ---- memory and engine
    ("torch_empty_cache_steps", _or_none(_whole(1)), "a whole number of optimizer steps, at least 1, or None for never"),
    (
        "ddp_bucket_cap_mb",
        _or_none(lambda value: is_number(value) and value > 0),
        "a number of MiB above 0, such as 25, or None for a planned size",
    ),
    ("ddp_timeout", lambda value: is_number(value) and value > 0, "a number of seconds above 0, such as 1800"),
    (
        "ddp_wait_warning",
        _number(0),
        "a number of seconds, such as 60; write 0 for no warning before the timeout",
    ),
    (
        "ddp_drift_check_steps",
        _whole(0),
        "a whole number of optimizer steps; write 0 for no comparison between checkpoints",
    ),
    ("ddp_drift_action", *_one_of("raise", "repair")),
    # ---- logs, evaluation, checkpoints
    ("logging_strategy eval_strategy", *_one_of("no", "steps", "epoch")),
    ("save_strategy", *_one_of("no", "steps", "epoch", "best")),
    ("save_failure", *_one_of("continue", "stop")),
    (
        "warmup_steps logging_steps save_steps",
        is_interval,
        "a whole number of steps, such as 100, or a share of all steps below 1, such as 0.1",
    ),
    (
        "eval_steps",
        _or_none(is_interval),
        "a whole number of steps, such as 100, a share of all steps below 1, such as 0.1, or None for logging_steps",
    ),
    ("eval_delay", _number(0), "a number of steps or epochs, at least 0"),
    ("eval_accumulation_steps", _or_none(_whole(1)), "a whole number of batches, at least 1, or None"),
    ("save_total_limit", _or_none(_whole(1)), "a whole number of checkpoints, at least 1, or None to keep all"),
    ("ledger_digest_steps", _whole(0), "a whole number of optimizer steps; write 0 for no digests"),
    ("include_num_input_tokens_seen", *_one_of("no", "all", "non_padding")),
    ("log_level log_level_replica", *_one_of(*LOG_LEVELS)),
    (
        "report_to",
        lambda value: _is_texts(value) and set(value) <= {*TRACKERS, "all"},
        f'{", ".join(TRACKERS)}, "all" or "none"; for another tracker, pass Trainer(callbacks=[...]) one that logs to it',
    ),
    (
        "debug",
        lambda value: _is_texts(value) and set(value) <= {"underflow_overflow"},
        '"underflow_overflow" or nothing; nonfinite_gradients="raise" traces what is not finite',
    ),
    (
        "include_for_metrics",
        lambda value: _is_texts(value) and set(value) <= {"inputs", "loss"},
        'a list of "inputs", "loss", both or neither',
    ),
    ("label_names", _or_none(_is_texts), 'a list of names, such as ["labels"], or None'),
    # ---- loading data
    ("train_sampling_strategy", *_one_of("random", "sequential", "group_by_length", "batch_rebalance")),
    ("dataloader_split_streams", *_one_of("samples", "shards")),
    ("dataloader_num_workers", _whole(0), "a whole number of processes; write 0 to load in the rank itself"),
    ("dataloader_prefetch_factor", _or_none(_whole(1)), "a whole number of batches, at least 1, or None for 2"),
    (
        "dataloader_multiprocessing_context",
        lambda value: value in (None, "fork", "spawn", "forkserver"),
        "fork, spawn, forkserver, or None for torch's choice",
    ),
    # ---- of several kinds
    (
        " ".join(DICTIONARIES),
        _or_none(lambda value: isinstance(value, dict)),
        "a dictionary or a JSON object, such as '{\"a\": 1}'",
    ),
    (
        "auto_find_batch_size average_tokens_across_devices bf16 fp16 bf16_full_eval fp16_full_eval full_determinism use_cpu "
        "torch_compile use_cache do_train do_eval do_predict logging_first_step logging_nan_inf_filter skip_memory_metrics "
        "log_on_each_node ledger eval_on_start prediction_loss_only batch_eval_metrics eval_do_concat_batches "
        "eval_use_gather_object save_only_model save_in_background enable_jit_checkpoint load_best_model_at_end "
        "ignore_data_skip restore_callback_states_from_checkpoint dataloader_drop_last dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_in_order remove_unused_columns hub_always_push",
        _is_bool,
        "True or False (text is neither: write False, not 'false')",
    ),
    (
        "gradient_checkpointing activation_checkpointing ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph "
        "tf32 disable_tqdm greater_is_better hub_private_repo",
        _or_none(_is_bool),
        "True, False or None",
    ),
    ("output_dir", _is_text, "a path of a folder"),
    ("length_column_name project", _is_text, "a text"),
    (
        "resume_from_checkpoint ddp_backend run_name metric_for_best_model torch_compile_backend torch_compile_mode "
        "trackio_space_id trackio_bucket_id hub_model_id hub_token hub_revision",
        _or_none(_is_text),
        "a text, or None",
    ),
    ("trackio_static_space_id", lambda value: value in (None, False) or _is_text(value), "a text, None or False"),
    # ---- other engines, kernels and services
    ("fsdp", _only(None, False, "", []), f"None, {_ELSEWHERE}, or train with FSDP's own Trainer"),
    ("deepspeed", _only(None, "", {}), f"None, {_ELSEWHERE}, or train with DeepSpeed's own engine"),
    ("parallelism_config", _only(None), f"None, {_ELSEWHERE}"),
    (
        "use_liger_kernel",
        _only(False),
        "False, as models are not patched here; leave it out and call liger_kernel's apply_liger_kernel_to_... in the script",
    ),
    (
        "optim_target_modules",
        _only(None, "", []),
        "None, as its optimizers are not supported; leave it out, or pass Trainer(optimizers=(optimizer, None)) your own",
    ),
    (
        "push_to_hub",
        _only(False),
        "False, as nothing is uploaded from here; leave it out and upload output_dir after training",
    ),
    ("hub_strategy", *_one_of("end", "every_save", "checkpoint", "all_checkpoints")),
    (
        "save_on_each_node",
        _only(False),
        "False, as rank 0 writes each checkpoint once; leave it out and put output_dir where all hosts see it",
    ),
)
