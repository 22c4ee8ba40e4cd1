"""TrainingArguments: drop-in names, one checked form, and messages that say what to write."""

import abc
import copy
import dataclasses
import inspect
import json
import logging
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

from allstep._arguments.choices import OPTIMIZERS_REFUSED
from allstep._arguments.names import ELSEWHERE
from allstep._arguments.old_names import OLD_NAMES
from allstep._arguments.standing import REFUSED
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

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


def test_output_dir_is_the_only_positional_argument() -> None:
    assert TrainingArguments("runs/one").output_dir == "runs/one"
    with pytest.raises(TypeError, match="positional"):
        TrainingArguments("runs/one", 8)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lr", "write learning_rate"),
        ("predict_with_generate", "it is an argument of Seq2SeqTrainingArguments"),
        ("learnin_rate", "did you mean learning_rate"),
        ("xyzzy", "no argument has a name like it"),
    ],
)
def test_unknown_name_is_a_type_error_with_advice(name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"TrainingArguments has no such argument:\n  '{name}': .*{advice}"):
        TrainingArguments(**{name: 1})  # type: ignore[arg-type]


def test_all_unknown_names_are_reported_together() -> None:
    with pytest.raises(TypeError) as error:
        TrainingArguments(lr=1e-3, epochs=2, max_steps=5)  # type: ignore[call-arg]
    assert "'lr'" in str(error.value)
    assert "'epochs'" in str(error.value)
    assert "max_steps" not in str(error.value)


def test_no_name_of_the_advice_table_is_an_argument_and_each_advised_name_is() -> None:
    fields = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert not fields & (ELSEWHERE.keys() | OLD_NAMES.keys())
    for advice in [*ELSEWHERE.values(), *(old.advice for old in OLD_NAMES.values())]:
        if advice.startswith("write "):
            name = advice.removeprefix("write ").split("=")[0].split(",")[0]
            assert name in fields, advice


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
    with pytest.raises(TypeError, match="OwnInit has no such argument:\n  'lr'"):
        OwnInit(2.0, lr=1.0)


def test_a_subclass_may_be_abstract() -> None:
    class Kept(TrainingArguments, abc.ABC):
        pass

    assert Kept(max_steps=3).max_steps == 3


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
        {"report_to": ["comet_ml"]},
        {"output_dir": ""},
        {"run_name": 3},
        {"disable_tqdm": "no"},
        {"optim_args": "momentum"},
        {"label_smoothing_factor": 1.5},
        {"neftune_noise_alpha": -1},
        {"fp16": "true"},
        {"tf32": 1},
        {"torch_compile_backend": ""},
        {"torch_empty_cache_steps": 0},
        {"eval_accumulation_steps": 0},
        {"include_num_input_tokens_seen": "padding"},
        {"log_level": "loud"},
        {"log_level_replica": 30},
        {"train_sampling_strategy": "shuffled"},
        {"length_column_name": ""},
        {"dataloader_multiprocessing_context": "thread"},
        {"debug": ["tpu_metrics_debug"]},
        {"accelerator_config": "[1]"},
        {"trackio_static_space_id": True},
        {"hub_strategy": "never"},
        {"optim": ["sgd"]},
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
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True: expected one of them"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "Write bf16_full_eval=True"),
        ({"lr_scheduler_type": "greedy"}, 'lr_scheduler_type="greedy" with eval_strategy="no": expected evaluations'),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True: expected False, as per_device_train_batch_size"),
        ({"accelerator_config": '{"dispatch_batches": true}'}, "dispatch_batches=True: expected False, as every rank reads"),
        ({"accelerator_config": {"even_batch": True}}, "accelerator_config has 'even_batch': expected even_batches"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": 2}}, "Write gradient_accumulation_steps instead"),
        (
            {"gradient_accumulation_steps": 4, "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "num_steps=2, and gradient_accumulation_steps=4: expected one number",
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
        {"report_to": ["wandb", "mlflow", "trackio"]},
        {"optim": "lion_8bit", "optim_args": "percentile_clipping=5"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {"fsdp": "", "deepspeed": None, "push_to_hub": False, "hub_model_id": "me/model", "hub_token": "secret"},
        {"accelerator_config": {"split_batches": False, "dispatch_batches": None, "even_batches": True}},
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


def test_yaml_is_read_by_the_rules_of_yaml_1_2(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="reads YAML")
    text = "learning_rate: 5e-5\neval_strategy: no\nbf16: true\nmax_steps: 10\nlr_scheduler_kwargs: {num_cycles: 2}\n"
    expected = TrainingArguments(learning_rate=5e-5, bf16=True, max_steps=10, lr_scheduler_kwargs={"num_cycles": 2})
    path = tmp_path / "arguments.yaml"
    path.write_text(text)
    assert TrainingArguments.from_yaml(text) == TrainingArguments.from_yaml(path) == expected
    assert TrainingArguments.from_yaml(str(path)) == expected
    with pytest.raises(ArgumentsError, match="The text is not YAML"):
        TrainingArguments.from_yaml("a: [\n")
    path.write_text("- 1\n")
    with pytest.raises(ArgumentsError, match=r"arguments\.yaml holds a YAML list"):
        TrainingArguments.from_yaml(path)


def test_secrets_are_not_written_down() -> None:
    args = TrainingArguments(hub_token="secret")
    assert "secret" not in repr(args) + str(args.to_dict()) + args.to_json_string() + str(args.to_sanitized_dict())
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert args.hub_token == "secret"


def test_sanitized_values_are_numbers_and_texts() -> None:
    values = TrainingArguments(lr_scheduler_kwargs={"num_cycles": 2}, per_device_eval_batch_size=3).to_sanitized_dict()
    assert {type(value) for value in values.values()} == {bool, int, float, str}
    assert (values["train_batch_size"], values["eval_batch_size"]) == (8, 3)
    assert values["lr_scheduler_kwargs"] == "{'num_cycles': 2}"


def test_to_dict_holds_copies_of_what_the_object_holds() -> None:
    args = TrainingArguments(lr_scheduler_kwargs={"num_cycles": 2})
    args.to_dict()["lr_scheduler_kwargs"]["num_cycles"] = 3
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


def test_new_fields_come_in_one_form() -> None:
    args = TrainingArguments(
        debug="underflow_overflow", include_num_input_tokens_seen=True, torch_compile_mode="max-autotune", eval_delay=None
    )
    assert (args.debug, args.include_num_input_tokens_seen, args.torch_compile, args.eval_delay) == (
        ["underflow_overflow"],
        "all",
        True,
        0,
    )
    assert TrainingArguments(torch_compile_backend="eager").torch_compile
    assert TrainingArguments(report_to=None).report_to == []
    assert TrainingArguments(lr_scheduler_type="greedy", eval_strategy="epoch").metric_for_best_model == "loss"


def test_accelerators_configuration_is_read_from_all_its_forms(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"even_batches": False, "gradient_accumulation_kwargs": {"num_steps": 4}}

    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps(Config().to_dict()))
    for form in (Config(), Config().to_dict(), json.dumps(Config().to_dict()), path, str(path)):
        args = TrainingArguments(accelerator_config=form)
        assert args.gradient_accumulation_steps == 4
        assert args.accelerator_config == Config().to_dict()


def test_what_is_asked_for_and_changes_nothing_is_said() -> None:
    with pytest.warns(UserWarning, match="changes nothing") as caught:
        TrainingArguments(
            average_tokens_across_devices=False,
            dataloader_in_order=False,
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        )
    assert [str(each.message).partition(":")[0] for each in caught] == [
        "average_tokens_across_devices=False changes nothing",
        "dataloader_in_order=False changes nothing",
        "sync_each_batch=True changes nothing",
    ]
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_here_is_refused_with_a_way_out(name: str) -> None:
    for value in REFUSED[name].harmless:
        TrainingArguments(**{name: value})
    message = refused(**{name: True})
    assert f"  {name}=True: expected {REFUSED[name].harmless[0]}, as " in message
    assert "leave it out" in message


@pytest.mark.parametrize("name", OPTIMIZERS_REFUSED)
def test_an_optimizer_that_is_not_supported_is_refused_with_a_way_out(name: str) -> None:
    assert f"optim='{name}': expected another optimizer, as {OPTIMIZERS_REFUSED[name]}." in refused(optim=name)


# ---- earlier names


@pytest.mark.filterwarnings("ignore:.*is an argument of earlier versions:FutureWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
        ({"evaluation_strategy": None}, {}),
        ({"evaluate_during_training": True}, {"eval_strategy": "steps"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.0}, {}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"per_gpu_train_batch_size": 2, "per_gpu_eval_batch_size": None}, {"per_device_train_batch_size": 2}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"group_by_length": False, "adafactor": False}, {}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
        ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
        ({"torchdynamo": "eager"}, {"torch_compile_backend": "eager"}),
        ({"push_to_hub_model_id": "me/model", "push_to_hub_organization": "us"}, {"hub_model_id": "me/model"}),
        ({"overwrite_output_dir": True, "logging_dir": "logs", "save_safetensors": False, "use_mps_device": True}, {}),
        ({"half_precision_backend": "auto", "fp16_opt_level": "O1", "past_index": -1, "tpu_num_cores": None}, {}),
    ],
    ids=str,
)
def test_an_earlier_name_says_what_it_said(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert TrainingArguments(**old) == TrainingArguments(**new)
    assert MyArguments(extra=2, **old) == MyArguments(extra=2, **new)
    assert vars(OwnInit(2.0, **old)) == vars(OwnInit(2.0, **new)) | {
        name: value for name, value in old.items() if OLD_NAMES[name].now is None
    }


def test_every_earlier_name_can_be_read_and_says_what_it_said_by_default() -> None:
    args = TrainingArguments(train_sampling_strategy="group_by_length")
    read = {name: getattr(args, name) for name in OLD_NAMES}
    assert read["group_by_length"] is True
    assert (read["past_index"], read["tpu_num_cores"], read["use_legacy_prediction_loop"]) == (-1, None, False)
    assert all(OLD_NAMES[name].accepts(value) for name, value in read.items())


def test_an_earlier_name_warns_once_at_the_line_of_the_script() -> None:
    class Further(MyArguments):
        def __init__(self) -> None:
            super().__init__(evaluation_strategy="epoch")  # type: ignore[call-arg]

    for make in (
        lambda: TrainingArguments(evaluation_strategy="epoch"),  # type: ignore[call-arg]
        lambda: MyArguments(evaluation_strategy="epoch"),  # type: ignore[call-arg]
        lambda: OwnInit(1.0, evaluation_strategy="epoch"),
        Further,
    ):
        with pytest.warns(FutureWarning) as caught:
            assert make().eval_strategy == "epoch"
        (warning,) = caught
        assert str(warning.message) == "evaluation_strategy='epoch' is an argument of earlier versions: write eval_strategy."
        assert warning.filename == __file__


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    for name, value in zip(LAUNCH_VARIABLES, ("1", "2", "1", "2", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    assert TrainingArguments(no_cuda=True, dataloader_in_order=False).use_cpu  # type: ignore[call-arg]
    monkeypatch.delenv("MASTER_PORT")
    assert not list(recwarn)
    with pytest.warns(FutureWarning, match="no_cuda"):  # and where the variables contradict one another, all do
        TrainingArguments(no_cuda=True)  # type: ignore[call-arg]


def test_two_names_of_one_argument_are_refused_together() -> None:
    with pytest.raises(ArgumentsError) as error:
        TrainingArguments(no_cuda=True, use_cpu=False, eval_strategy="no", evaluation_strategy="epoch")  # type: ignore[call-arg]
    assert "  no_cuda=True and use_cpu=False: expected one of them" in str(error.value)
    assert "  evaluation_strategy='epoch' and eval_strategy='no': expected one of them" in str(error.value)
    assert "Write eval_strategy only." in str(error.value)


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        ({"sharded_ddp": "simple"}, "sharded_ddp='simple': expected nothing, every rank holds the whole model here"),
        ({"tpu_num_cores": 8}, "TPUs are not supported; leave it out"),
        ({"jit_mode_eval": True}, "write torch_compile=True"),
        ({"warmup_ratio": 1.0}, "warmup_ratio=1.0: expected a share of all steps below 1"),
    ],
    ids=str,
)
def test_an_earlier_name_that_cannot_be_followed_is_refused(old: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(**old)


@pytest.mark.filterwarnings("ignore:.*is an argument of earlier versions:FutureWarning")
def test_earlier_names_can_be_read() -> None:
    args = TrainingArguments("out", overwrite_output_dir=True, logging_dir="logs")  # type: ignore[call-arg]
    assert (args.overwrite_output_dir, args.logging_dir) == (True, "logs")
    args = TrainingArguments("out", eval_strategy="epoch", warmup_steps=0.1)
    assert (args.overwrite_output_dir, args.logging_dir, args.evaluation_strategy) == (False, "out/runs", "epoch")
    assert (args.no_cuda, args.warmup_ratio, args.group_by_length, args.save_safetensors) == (False, 0.1, False, True)
    assert not hasattr(args, "no_such_name")
    assert copy.deepcopy(args) == args


def test_a_field_of_a_subclass_may_have_an_earlier_name() -> None:
    @dataclass
    class Own(TrainingArguments):
        logging_dir: str = "mine"

    assert Own().logging_dir == "mine"
    assert Own(logging_dir="yours").logging_dir == "yours"


# ---- setters


def test_setters_set_a_group_and_can_be_chained() -> None:
    args = TrainingArguments("out")
    same = (
        args.set_training(learning_rate=1e-3, batch_size=2, gradient_checkpointing=True)
        .set_evaluate("epoch", batch_size=4, accumulation_steps=3)
        .set_save("epoch", total_limit=2)
        .set_logging("steps", steps=5, report_to="tensorboard")
        .set_optimizer("sgd", learning_rate=0.1, args="momentum=0.9")
        .set_lr_scheduler("cosine", max_steps=10, warmup_steps=0.5)
        .set_dataloader(train_batch_size=6, num_workers=1, sampler_seed=3)
        .set_testing(batch_size=9)
    )
    assert same is args
    expected = TrainingArguments(
        "out",
        do_train=True,
        do_predict=True,
        gradient_checkpointing=True,
        activation_checkpointing=True,
        eval_strategy="epoch",
        eval_steps=500,
        per_device_eval_batch_size=9,
        eval_accumulation_steps=3,
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=5,
        report_to="tensorboard",
        logging_nan_inf_filter=False,
        log_on_each_node=False,
        log_level_replica="passive",
        optim="sgd",
        learning_rate=0.1,
        optim_args="momentum=0.9",
        lr_scheduler_type="cosine",
        max_steps=10,
        warmup_steps=0.5,
        per_device_train_batch_size=6,
        dataloader_num_workers=1,
        data_seed=3,
    )
    assert args == expected


def test_a_setter_that_is_refused_changes_nothing() -> None:
    args = TrainingArguments("out")
    with pytest.raises(ArgumentsError, match="save_steps=0"):
        args.set_save("steps", steps=0, total_limit=3)
    with pytest.raises(ArgumentsError, match="push_to_hub=True: expected False, as nothing is uploaded"):
        args.set_push_to_hub("me/model")
    assert args == TrainingArguments("out")


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
    assert args.parallel_mode.value == "distributed"
    assert TrainingArguments(local_rank=7).local_rank == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert args.should_log  # rank 0 of the second host
    assert not TrainingArguments(log_on_each_node=False).should_log


def test_log_level_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert TrainingArguments().get_process_log_level() == logging.WARNING
    assert TrainingArguments(log_level="info").get_process_log_level() == logging.INFO
    for name, value in zip(LAUNCH_VARIABLES, ("1", "2", "1", "2", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    assert TrainingArguments(log_level="info", log_level_replica="error").get_process_log_level() == logging.ERROR


def test_the_device_of_a_process_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    args = TrainingArguments(use_cpu=True)
    assert (str(args.device), args.n_gpu, args._n_gpu) == ("cpu", 0, 0)
    assert args.parallel_mode == "not_parallel"


def test_precision_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert TrainingArguments().mixed_precision == "no"
    assert TrainingArguments(bf16=True).mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert TrainingArguments().mixed_precision == "bf16"
    assert TrainingArguments(fp16=True).mixed_precision == "fp16"


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
