"""TrainingArguments: drop-in names, one checked form, and messages that say what to write."""

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep._arguments.names import ELSEWHERE
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

HUGGING_FACE_FIELDS = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor
    bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs
    gradient_checkpointing gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode
    use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
    skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
"""
"""The 114 fields of TrainingArguments in transformers 5.24.0."""
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class MyArguments(TrainingArguments):
    extra: int = 1
    tags: list[str] = field(default_factory=list)


class OwnInit(TrainingArguments):
    def __init__(self, scale: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale


class Interval(str, Enum):
    EPOCH = "epoch"


def refused(**kwargs: Any) -> str:
    with pytest.raises(ArgumentsError) as error:
        TrainingArguments(**kwargs)
    return str(error.value)


# ---- names

OURS = {"global_batch_size", "deterministic_reduction", "ledger", "ledger_digest_steps", "dataloader_split_streams"}
OURS |= {"ddp_wait_warning", "ddp_drift_check_steps", "ddp_drift_action", "nonfinite_gradients"}
OURS |= {"save_in_background", "save_failure"}
"""Arguments that Hugging Face does not have."""


def test_defaults_are_those_of_hugging_face() -> None:
    expected = {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "max_steps": -1,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "seed": 42,
        "ddp_timeout": 1800,
        "logging_strategy": "steps",
        "logging_steps": 500,
        "report_to": [],
        "eval_strategy": "no",
        "eval_delay": 0,
        "include_for_metrics": [],
        "save_strategy": "steps",
        "save_steps": 500,
        "dataloader_num_workers": 0,
    }
    expected |= dict.fromkeys(("dataloader_pin_memory", "remove_unused_columns"), True)
    expected |= dict.fromkeys(("do_train", "do_eval", "do_predict", "bf16", "full_determinism", "use_cpu"), False)
    expected |= dict.fromkeys(("logging_first_step", "eval_on_start", "prediction_loss_only", "save_only_model"), False)
    expected |= dict.fromkeys(("batch_eval_metrics", "auto_find_batch_size"), False)
    expected |= dict.fromkeys(("load_best_model_at_end", "dataloader_drop_last", "dataloader_persistent_workers"), False)
    found = TrainingArguments().to_dict()
    assert {name: value for name, value in found.items() if value is not None and name not in OURS} == expected


def test_output_dir_is_the_only_positional_argument() -> None:
    assert TrainingArguments("runs/one").output_dir == "runs/one"
    with pytest.raises(TypeError, match="positional"):
        TrainingArguments("runs/one", 8)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("evaluation_strategy", "write eval_strategy"),
        ("warmup_ratio", "write warmup_steps=0.1"),
        ("no_cuda", "write use_cpu=True"),
        ("fp16", "write bf16=True"),
        ("fsdp", "another engine"),
        ("torch_compile", "not supported yet"),
        ("learnin_rate", "did you mean learning_rate"),
        ("xyzzy", "no argument has a name like it"),
    ],
)
def test_unknown_name_is_a_type_error_with_advice(name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"TrainingArguments has no such argument:\n  '{name}': .*{advice}"):
        TrainingArguments(**{name: 1})  # type: ignore[arg-type]


def test_all_unknown_names_are_reported_together() -> None:
    with pytest.raises(TypeError) as error:
        TrainingArguments(evaluation_strategy="steps", warmup_ratio=0.1, max_steps=5)  # type: ignore[call-arg]
    assert "'evaluation_strategy'" in str(error.value)
    assert "'warmup_ratio'" in str(error.value)
    assert "max_steps" not in str(error.value)


def test_no_name_of_the_advice_table_is_an_argument_and_each_advised_name_is() -> None:
    fields = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert not fields & ELSEWHERE.keys()
    for advice in ELSEWHERE.values():
        if advice.startswith("write "):
            name = advice.removeprefix("write ").split("=")[0].split(",")[0]
            assert name in fields, advice


def test_every_hugging_face_field_is_an_argument_or_explained() -> None:
    listed = HUGGING_FACE_FIELDS.split()
    assert len(set(listed)) == 114
    fields = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert not set(listed) - fields - ELSEWHERE.keys()
    assert fields - set(listed) == OURS


def test_help_and_editors_see_the_arguments() -> None:
    signature = inspect.signature(MyArguments)
    assert list(signature.parameters)[:3] == ["output_dir", "extra", "tags"]
    assert "learning_rate" in signature.parameters


# ---- dataclass behaviour


def test_subclass_as_dataclass_adds_arguments_and_keeps_the_advice() -> None:
    args = MyArguments("out", extra=5, max_steps=7, tags=["a"])
    assert (args.extra, args.max_steps, args.tags) == (5, 7, ["a"])
    with pytest.raises(TypeError, match="MyArguments has no such argument:\n  'extr': did you mean extra"):
        MyArguments(extr=5)  # type: ignore[call-arg]
    with pytest.raises(ArgumentsError, match="MyArguments cannot hold together"):
        MyArguments(max_steps=0, num_train_epochs=0)


def test_subclass_with_its_own_init_works() -> None:
    args = OwnInit(2.0, max_steps=3)
    assert (args.scale, args.max_steps) == (2.0, 3)
    with pytest.raises(TypeError, match="evaluation_strategy"):
        OwnInit(2.0, evaluation_strategy="steps")


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_copies_and_pickles_are_equal(make: Any) -> None:
    args = MyArguments("out", extra=3, eval_strategy="steps", lr_scheduler_kwargs={"num_cycles": 2})
    assert make(args) == args
    assert type(make(args)) is MyArguments


def test_replace_checks_again_and_leaves_the_original_alone() -> None:
    args = TrainingArguments("out", gradient_checkpointing=False)
    other = dataclasses.replace(args, learning_rate=1e-3, gradient_checkpointing=True)
    assert (args.learning_rate, args.recompute_activations) == (5e-5, False)
    assert (other.learning_rate, other.recompute_activations) == (1e-3, True)
    with pytest.raises(ArgumentsError, match="learning_rate=-1"):
        dataclasses.replace(args, learning_rate=-1)


def test_the_callers_dictionary_is_not_shared() -> None:
    mine = {"num_cycles": 2}
    args = TrainingArguments(lr_scheduler_kwargs=mine)
    assert args.lr_scheduler_kwargs is not mine
    assert TrainingArguments().include_for_metrics is not TrainingArguments().include_for_metrics


# ---- checks


def test_every_problem_is_in_one_message() -> None:
    message = refused(per_device_train_batch_size=0, optim="adam", ddp_timeout=0, dataloader_prefetch_factor=2, bf16="false")
    assert "per_device_train_batch_size=0: expected a whole number of samples, at least 1" in message
    assert "optim='adam': expected one of adamw_torch_fused, adamw_torch, sgd, adagrad, rmsprop" in message
    assert "ddp_timeout=0: expected a number of seconds above 0" in message
    assert "dataloader_prefetch_factor=2 with dataloader_num_workers=0" in message
    assert "bf16='false': expected True or False" in message
    assert len(message.splitlines()) == 6


@pytest.mark.parametrize(
    "kwargs",
    [
        {"per_device_train_batch_size": 2.5},
        {"per_device_train_batch_size": True},
        {"per_device_eval_batch_size": -1},
        {"gradient_accumulation_steps": 0},
        {"save_failure": "ignore"},
        {"save_in_background": "true"},
        {"global_batch_size": 0},
        {"global_batch_size": 1.5},
        {"deterministic_reduction": "yes"},
        {"deterministic_reduction": None},
        {"num_train_epochs": float("nan")},
        {"max_steps": 1.5},
        {"learning_rate": "3e-4"},
        {"learning_rate": float("inf")},
        {"weight_decay": -0.1},
        {"adam_beta1": 1.0},
        {"adam_beta2": -0.1},
        {"adam_epsilon": None},
        {"max_grad_norm": -1},
        {"lr_scheduler_type": "triangle"},
        {"lr_scheduler_kwargs": "[1]"},
        {"lr_scheduler_kwargs": "{"},
        {"warmup_steps": 1.5},
        {"warmup_steps": -1},
        {"logging_steps": 2.5},
        {"logging_strategy": "sometimes"},
        {"eval_strategy": "best"},
        {"eval_steps": -5},
        {"eval_delay": -1},
        {"save_strategy": "always"},
        {"save_steps": "many"},
        {"save_total_limit": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"data_seed": 1.5},
        {"ddp_timeout": "1800"},
        {"ddp_bucket_cap_mb": 0},
        {"ddp_find_unused_parameters": "yes"},
        {"ddp_backend": 3},
        {"gradient_checkpointing": "true"},
        {"dataloader_num_workers": -1},
        {"dataloader_prefetch_factor": 0},
        {"label_names": "labels"},
        {"include_for_metrics": ["outputs"]},
        {"report_to": ["wandb"]},
        {"output_dir": ""},
        {"run_name": 3},
        {"disable_tqdm": "no"},
    ],
    ids=str,
)
def test_value_of_a_wrong_kind_is_refused_by_name(kwargs: dict[str, Any]) -> None:
    message = refused(**kwargs)
    ((name, value),) = kwargs.items()
    assert f"  {name}={value!r}: expected " in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"num_train_epochs": 0}, "num_train_epochs=0 and max_steps=-1: expected one of them above 0"),
        ({"logging_steps": 0}, 'logging_steps=0 with logging_strategy="steps"'),
        ({"save_steps": 0}, 'save_steps=0 with save_strategy="steps"'),
        ({"eval_strategy": "steps", "eval_steps": 0}, 'eval_steps=0 with eval_strategy="steps"'),
        ({"save_strategy": "best"}, 'save_strategy="best" with eval_strategy="no"'),
        ({"load_best_model_at_end": True}, 'eval_strategy="no" and save_strategy="steps"'),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "expected the best model to be on disk"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, 'both "epoch"'),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 200, "save_steps": 500},
            "Write save_steps=200",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 500},
            "a multiple of eval_steps",
        ),
        ({"dataloader_persistent_workers": True}, "Write dataloader_num_workers=2"),
        ({"gradient_checkpointing": True, "activation_checkpointing": False}, "two names of one switch"),
        (
            {"gradient_checkpointing_kwargs": {"a": 1}, "activation_checkpointing_kwargs": {"a": 2}},
            "Write activation_checkpointing_kwargs only",
        ),
        (
            {"global_batch_size": 20, "per_device_train_batch_size": 8},
            "global_batch_size=20 and per_device_train_batch_size=8: expected whole micro-batches. Write global_batch_size=16",
        ),
    ],
    ids=str,
)
def test_arguments_that_contradict_one_another_are_refused(kwargs: dict[str, Any], sentence: str) -> None:
    message = refused(**kwargs)
    assert sentence in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_train_epochs": 0, "max_steps": 10},
        {"num_train_epochs": 0.5},
        {"logging_strategy": "no", "logging_steps": 0},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best"},
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True},
        {"gradient_checkpointing": True, "activation_checkpointing": True},
        {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1},
        {"logging_steps": 1, "save_steps": 1, "save_total_limit": 1, "max_steps": 1, "dataloader_num_workers": 1},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1},
        {"learning_rate": 0, "weight_decay": 0, "adam_epsilon": 0, "adam_beta1": 0, "eval_delay": 0, "seed": 0},
        {"seed": 2**32 - 1, "data_seed": 2**32 - 1},
        {"num_train_epochs": 1, "data_seed": 0},
        {"num_train_epochs": 0, "max_steps": 1},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1},
        {"max_grad_norm": 0},
        {"report_to": []},
        {"report_to": "tensorboard"},
        {"report_to": ["all"]},
        {"ddp_backend": "some_registered_backend"},
        {"global_batch_size": 64, "per_device_train_batch_size": 16, "deterministic_reduction": True},
    ],
    ids=str,
)
def test_arguments_that_hold_together_are_accepted(kwargs: dict[str, Any]) -> None:
    TrainingArguments(**kwargs)


def test_a_refused_object_says_which_of_two_checkpoint_names_counts() -> None:
    assert TrainingArguments(gradient_checkpointing=True).recompute_activations
    assert TrainingArguments(activation_checkpointing=True).recompute_activations
    assert not TrainingArguments().recompute_activations
    args = TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs='{"use_reentrant": false}')
    assert args.recompute_kwargs == {"use_reentrant": False}
    assert TrainingArguments().recompute_kwargs == {}


# ---- one form


def test_unset_values_are_filled_in_from_others() -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=50, save_steps=100, load_best_model_at_end=True)
    assert (args.eval_steps, args.do_eval) == (50, True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert TrainingArguments(metric_for_best_model="accuracy").greater_is_better is True
    assert TrainingArguments(metric_for_best_model="eval_loss").greater_is_better is False
    assert TrainingArguments(metric_for_best_model="loss", greater_is_better=True).greater_is_better is True
    assert TrainingArguments().metric_for_best_model is None
    best = TrainingArguments(save_strategy="best", eval_strategy="epoch")
    assert best.metric_for_best_model == "loss"


def test_enums_paths_and_numpy_numbers_become_plain(tmp_path: Path) -> None:
    args = TrainingArguments(
        tmp_path,  # type: ignore[arg-type]
        eval_strategy=Interval.EPOCH,
        max_steps=np.int64(5),
        learning_rate=np.float32(0.5),
        warmup_steps=100.0,
    )
    assert type(args.output_dir) is str
    assert type(args.eval_strategy) is str
    assert type(args.max_steps) is int
    assert type(args.learning_rate) is float
    assert (args.output_dir, args.eval_strategy, args.max_steps) == (str(tmp_path), "epoch", 5)
    assert (args.warmup_steps, type(args.warmup_steps)) == (100, int)


def test_home_folder_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert TrainingArguments("~/runs").output_dir == "/home/someone/runs"


def test_json_text_is_accepted_for_dictionaries() -> None:
    assert TrainingArguments(lr_scheduler_kwargs='{"num_cycles": 2}').lr_scheduler_kwargs == {"num_cycles": 2}


def test_json_comes_back_as_an_equal_object(tmp_path: Path) -> None:
    args = MyArguments("out", extra=4, eval_strategy="steps", learning_rate=3e-4, lr_scheduler_kwargs={"num_cycles": 2})
    text = args.to_json_string()
    assert json.loads(text) == args.to_dict()
    assert MyArguments.from_json(text) == args
    path = tmp_path / "arguments.json"
    path.write_text(text)
    assert MyArguments.from_json(path) == args
    assert MyArguments.from_json(str(path)) == args


def test_json_that_is_no_object_or_has_unknown_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text("[1, 2]")
    with pytest.raises(ArgumentsError, match=r"arguments\.json holds a JSON list"):
        TrainingArguments.from_json(path)
    path.write_text("learning_rate: 1")
    with pytest.raises(ArgumentsError, match=r"arguments\.json is not JSON"):
        TrainingArguments.from_json(path)
    with pytest.raises(TypeError, match="did you mean max_steps"):
        TrainingArguments.from_json('{"max_step": 3}')


def test_to_dict_holds_copies_of_what_the_object_holds() -> None:
    args = TrainingArguments(lr_scheduler_kwargs={"num_cycles": 2})
    args.to_dict()["lr_scheduler_kwargs"]["num_cycles"] = 3
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


# ---- derived


def test_a_process_that_nobody_launched_is_rank_zero_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (1, 0, 0, -1)
    assert args.should_log
    assert args.should_save


def test_rank_and_world_size_are_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCH_VARIABLES, ("3", "4", "1", "2", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (4, 3, 1, 1)
    assert not args.should_log
    assert not args.should_save


def test_sizes_and_times() -> None:
    args = TrainingArguments(per_device_train_batch_size=3, per_device_eval_batch_size=5, ddp_timeout=90)
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)
    assert args.ddp_timeout_delta == timedelta(seconds=90)


def test_warmup_is_a_number_of_steps_or_a_share_rounded_up() -> None:
    assert TrainingArguments(warmup_steps=7).get_warmup_steps(100) == 7
    assert TrainingArguments(warmup_steps=1).get_warmup_steps(100) == 1
    assert TrainingArguments(warmup_steps=0.1).get_warmup_steps(101) == 11
    assert TrainingArguments(warmup_steps=0.1).get_warmup_steps(30) == 3  # 4 in floating point
    assert TrainingArguments().get_warmup_steps(100) == 0


@given(hundredths=st.integers(1, 99), total=st.integers(1, 10**6))
def test_a_share_as_written_is_exact(hundredths: int, total: int) -> None:
    args = TrainingArguments(save_steps=hundredths / 100)
    assert args.get_interval("save", total) == -(-hundredths * total // 100)


def test_interval_of_each_event() -> None:
    args = TrainingArguments(logging_steps=10, save_steps=0.5, eval_strategy="steps")
    assert args.get_interval("logging", 40) == 10
    assert args.get_interval("save", 40) == 20
    assert args.get_interval("eval", 40) == 10
    assert TrainingArguments().get_interval("eval", 40) == 500


def test_arguments_and_parser_load_without_torch() -> None:
    code = "import sys, allstep.arguments, allstep.argument_parser; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
