"""Every field of the installed transformers.TrainingArguments has its place here: same default, or a reason; and conversion."""

import dataclasses
import operator
import shlex
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from allstep._arguments.choices import LOG_LEVELS, OPTIMIZERS, OPTIMIZERS_REFUSED, SCHEDULES
from allstep._arguments.standing import NOTHING_TO_DO, OURS, REFUSED
from allstep.argument_parser import ArgumentParser
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

transformers = pytest.importorskip("transformers", reason="needs transformers, whose arguments are compared")

from transformers import HfArgumentParser, IntervalStrategy, SchedulerType, Seq2SeqTrainingArguments  # noqa: E402
from transformers import TrainingArguments as Theirs  # noqa: E402
from transformers.trainer_pt_utils import AcceleratorConfig  # noqa: E402
from transformers.training_args import OptimizerNames, ParallelMode, trainer_log_levels  # noqa: E402


def defaults(cls: type) -> dict[str, Any]:
    missing = dataclasses.MISSING
    return {
        each.name: each.default if each.default_factory is missing else each.default_factory()
        for each in dataclasses.fields(cls)
        if each.init
    }


def differences(theirs: type) -> list[str]:
    """What fields of `theirs` ask to be done here, in words."""
    ours, found = defaults(TrainingArguments), []
    for name, default in defaults(theirs).items():
        if name not in ours:
            found.append(
                f"transformers {transformers.__version__} has a new argument, {name}={default!r}: make it a field of "
                f"_arguments/run_fields.py, with REFUSED or NOTHING_TO_DO in _arguments/standing.py where it does nothing."
            )
        elif ours[name] != default:
            found.append(f"{name} is {ours[name]!r} here and {default!r} in transformers {transformers.__version__}.")
    return found


def test_every_field_has_the_same_default() -> None:
    assert differences(Theirs) == []
    assert defaults(TrainingArguments).keys() - defaults(Theirs).keys() == {*OURS}


def test_a_new_field_and_a_new_default_are_told() -> None:
    newer = make_dataclass("Newer", [("use_magic", bool, False), ("max_steps", int, 7)], bases=(Theirs,))
    version = transformers.__version__
    assert differences(newer) == [
        f"max_steps is -1 here and 7 in transformers {version}.",
        f"transformers {version} has a new argument, use_magic=False: make it a field of _arguments/run_fields.py, with "
        f"REFUSED or NOTHING_TO_DO in _arguments/standing.py where it does nothing.",
    ]


def test_what_does_nothing_here_is_an_argument_there() -> None:
    assert NOTHING_TO_DO.keys() | REFUSED.keys() <= defaults(Theirs).keys()
    assert not NOTHING_TO_DO.keys() & REFUSED.keys()


def test_every_name_of_an_optimizer_schedule_and_level_has_its_place() -> None:
    assert {each.value for each in OptimizerNames} == {*OPTIMIZERS, *OPTIMIZERS_REFUSED}
    assert not {*OPTIMIZERS} & OPTIMIZERS_REFUSED.keys()
    assert {each.value for each in SchedulerType} == {*SCHEDULES}
    assert dict(LOG_LEVELS) == trainer_log_levels


def test_enums_of_both_compare_equal() -> None:
    args = TrainingArguments(eval_strategy=IntervalStrategy.EPOCH, optim=OptimizerNames.SGD, use_cpu=True)
    assert args.eval_strategy == IntervalStrategy.EPOCH
    assert args.optim == OptimizerNames.SGD
    assert args.parallel_mode == ParallelMode.NOT_PARALLEL
    assert operator.eq(ParallelMode.NOT_PARALLEL, args.parallel_mode)  # and with theirs on the left
    assert args.parallel_mode != ParallelMode.DISTRIBUTED


# ---- conversion


GIVEN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.1,
    "optim": "adafactor",
    "activation_checkpointing": True,
    "include_num_input_tokens_seen": True,
    "report_to": ["tensorboard"],
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_steps": 20,
    "load_best_model_at_end": True,
    "ddp_timeout": 60,
    "use_cpu": True,
    "hub_model_id": "me/model",
}


def test_their_object_becomes_ours() -> None:
    ours = TrainingArguments.from_transformers(Theirs("out", **GIVEN, accelerator_config={"even_batches": False}))
    expected = TrainingArguments(
        "out",
        **GIVEN,
        gradient_checkpointing=True,
        dataloader_pin_memory=False,  # as theirs is, on the CPU
        accelerator_config=AcceleratorConfig(even_batches=False).to_dict() | {"use_configured_state": False},
    )
    expected.accelerator_config.pop("use_configured_state")
    ours.accelerator_config.pop("use_configured_state", None)
    assert ours == expected


def test_the_defaults_of_their_object_become_the_defaults_of_ours() -> None:
    ours, usual = TrainingArguments.from_transformers(Theirs(use_cpu=True)), TrainingArguments(use_cpu=True)
    different = {name for name, value in ours.to_dict().items() if value != usual.to_dict()[name]}
    assert different == {
        "accelerator_config",
        "activation_checkpointing",
        "dataloader_pin_memory",
        "gradient_checkpointing",
    }
    assert not ours.recompute_activations


@dataclass
class TheirsAndMore(Theirs):
    corpus: str = "books"
    weights: list[float] = field(default_factory=lambda: [0.5])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.found = len(self.corpus)


def test_what_a_subclass_added_can_be_read() -> None:
    ours = TrainingArguments.from_transformers(TheirsAndMore("out", corpus="poems", use_cpu=True, max_steps=3))
    assert (ours.max_steps, ours.corpus, ours.weights, ours.found) == (3, "poems", [0.5], 5)
    generating = Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_max_length=9, use_cpu=True)
    ours = TrainingArguments.from_transformers(generating)
    assert (ours.predict_with_generate, ours.generation_max_length) == (True, 9)

    @dataclass
    class Mine(TrainingArguments):
        corpus: str = ""

    assert Mine.from_transformers(TheirsAndMore("out", corpus="poems", use_cpu=True)).corpus == "poems"


def test_a_field_of_a_newer_version_is_told_where_it_is_used() -> None:
    newer = make_dataclass("TrainingArguments", [("use_magic", bool, False)], bases=(Theirs,))
    newer.__module__ = "transformers.training_args"
    assert not TrainingArguments.from_transformers(newer("out", use_cpu=True)).use_magic
    with pytest.warns(UserWarning, match="use_magic=True is an argument of transformers that is not known here") as caught:
        assert TrainingArguments.from_transformers(newer("out", use_cpu=True, use_magic=True)).use_magic
    assert caught[0].filename == __file__


def test_what_their_object_asks_for_and_is_not_here_is_refused_together() -> None:
    theirs = Theirs("out", optim="lomo", save_on_each_node=True, use_cpu=True, accelerator_config={"split_batches": True})
    with pytest.raises(ArgumentsError) as error:
        TrainingArguments.from_transformers(theirs)
    for name in ("optim='lomo'", "save_on_each_node=True", "split_batches=True"):
        assert f"{name}: expected" in str(error.value)


@dataclass
class Earlier:
    """As an object of an earlier version: its names, and its defaults."""

    output_dir: str = "out"
    evaluation_strategy: str | None = None
    eval_strategy: str = "no"
    no_cuda: bool = False
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    group_by_length: bool = False
    overwrite_output_dir: bool = False
    optim: str = "adamw_torch"
    sharded_ddp: list[str] = field(default_factory=list)
    tpu_num_cores: int | None = None


def test_an_object_of_an_earlier_version_is_read_by_its_names() -> None:
    earlier = Earlier(evaluation_strategy="epoch", no_cuda=True, warmup_ratio=0.1, overwrite_output_dir=True)
    ours = TrainingArguments.from_transformers(earlier)
    assert ours == TrainingArguments("out", eval_strategy="epoch", use_cpu=True, warmup_steps=0.1, optim="adamw_torch")
    assert ours.overwrite_output_dir
    assert TrainingArguments.from_transformers(Earlier()) == TrainingArguments("out", optim="adamw_torch")
    assert TrainingArguments.from_transformers(Earlier(warmup_ratio=0.1, warmup_steps=5)).warmup_steps == 5
    with pytest.raises(ArgumentsError, match=r"warmup_ratio=1\.0: expected a share of all steps below 1"):
        TrainingArguments.from_transformers(Earlier(warmup_ratio=1.0))
    with pytest.raises(ArgumentsError, match="sharded_ddp='simple': expected nothing"):
        TrainingArguments.from_transformers(Earlier(sharded_ddp="simple"))  # type: ignore[arg-type]
    assert earlier.evaluation_strategy == TrainingArguments.from_transformers(earlier).evaluation_strategy


# ---- their parser


@dataclass
class MyArguments(TrainingArguments):
    corpus: str = "books"


@pytest.mark.parametrize("cls", [TrainingArguments, MyArguments])
def test_their_parser_reads_our_arguments(cls: type[TrainingArguments]) -> None:
    words = shlex.split(
        "--output_dir out --per_device_train_batch_size 4 --warmup_steps 0.1 --eval_steps 10 --eval_strategy steps --bf16 "
        "--deterministic_reduction True --report_to wandb --ddp_bucket_cap_mb 12.5 --no_remove_unused_columns "
        "--include_num_input_tokens_seen true --label_names labels --save_steps 50 --local_rank 1 --tf32 false "
        "--lr_scheduler_kwargs '{\"num_cycles\": 2}'"
    )
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(words, look_for_args_file=False)
    (ours,) = ArgumentParser(cls).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert args == ours
    assert args == cls(
        "out",
        per_device_train_batch_size=4,
        warmup_steps=0.1,
        eval_steps=10,
        eval_strategy="steps",
        bf16=True,
        deterministic_reduction=True,
        report_to="wandb",
        ddp_bucket_cap_mb=12.5,
        remove_unused_columns=False,
        include_num_input_tokens_seen="all",
        label_names=["labels"],
        save_steps=50,
        tf32=False,
        lr_scheduler_kwargs={"num_cycles": 2},
    )
    assert HfArgumentParser(cls).parse_args_into_dataclasses([], look_for_args_file=False) == (cls(),)


def test_our_parser_reads_the_files_that_theirs_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max_steps: 3\nlearning_rate: 0.001\nreport_to: [tensorboard]\n")
    assert ArgumentParser(TrainingArguments).parse_yaml_file(path) == HfArgumentParser(TrainingArguments).parse_yaml_file(path)


# ---- their setters and forms


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ("set_training", {"learning_rate": 1e-3, "batch_size": 3, "num_epochs": 2, "activation_checkpointing": True}),
        ("set_training", {}),
        ("set_evaluate", {"strategy": "steps", "steps": 7, "accumulation_steps": 2, "loss_only": True}),
        ("set_testing", {"batch_size": 5}),
        ("set_save", {"strategy": "epoch", "total_limit": 3}),
        ("set_logging", {"steps": 9, "level": "info", "first_step": True}),
        ("set_logging", {}),
        ("set_optimizer", {"name": "sgd", "args": "momentum=0.9"}),
        ("set_lr_scheduler", {"name": "cosine", "max_steps": 9, "warmup_steps": 0.1}),
        ("set_dataloader", {"train_batch_size": 3, "num_workers": 2, "prefetch_factor": 4, "sampler_seed": 1}),
    ],
    ids=str,
)
def test_setters_set_what_theirs_set(call: str, how: dict[str, Any]) -> None:
    before, ours = Theirs("out", use_cpu=True).to_dict(), TrainingArguments("out", use_cpu=True)
    theirs = getattr(Theirs("out", use_cpu=True), call)(**how).to_dict()
    plain = ours.to_dict()
    getattr(ours, call)(**how)
    listed = {"report_to": lambda value: [] if value == "none" else value, "eval_delay": lambda value: value or 0}
    for name, value in theirs.items():
        expected = value if value != before[name] else plain[name]
        if name in ("activation_checkpointing", "gradient_checkpointing"):
            expected = bool(expected)
            assert bool(getattr(ours, name)) == expected
            continue
        assert getattr(ours, name) == listed.get(name, lambda value: value)(expected), name


def test_sanitized_values_are_those_of_theirs() -> None:
    ours, theirs = (cls("out", **GIVEN).to_sanitized_dict() for cls in (TrainingArguments, Theirs))
    same = set(theirs) - {"accelerator_config", "dataloader_pin_memory", "disable_tqdm", "hub_token"}
    same -= {"activation_checkpointing", "gradient_checkpointing", "torch_compile_backend"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
