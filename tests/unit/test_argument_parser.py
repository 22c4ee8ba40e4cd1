"""ArgumentParser: dataclasses read from a command line, a dictionary or a JSON file."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from allstep.argument_parser import ArgumentParser
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Everything:
    name: str
    """Who this is; 100% needed."""
    size: int = 3
    """How large,
    in metres."""
    rate: float = 0.5
    either: int | float = 1
    maybe: int | None = None
    old_style: Optional[float] = None  # noqa: UP045
    either_old: Union[int, str, None] = None  # noqa: UP007
    colour: Colour = Colour.RED
    """Its colour."""
    mode: Literal["fast", "slow", 3] = "fast"
    numbers: list[int] = field(default_factory=lambda: [1, 2])
    names: list[str] | None = None
    table: dict[str, Any] = field(default_factory=dict)
    on: bool = True
    off: bool = False
    undecided: bool | None = None
    where: Path = Path("here")
    helped: int = field(default=1, metadata={"help": "From metadata."})
    inner: int = field(default=9, init=False)


@dataclass
class Model:
    width: int = 64
    """Features of a hidden layer."""


@dataclass
class MoreArguments(TrainingArguments):
    learning_rate: float = 0.25
    shout: str = "hey"
    """What to shout."""


def read(*words: str) -> Everything:
    (value,) = ArgumentParser(Everything, prog="train.py").parse_args_into_dataclasses(["--name", "x", *words])
    assert isinstance(value, Everything)
    return value


def error_of(parser: ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args_into_dataclasses(words)
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--size", "4"], "size", 4),
        (["--size=-4"], "size", -4),
        (["--size", "-4"], "size", -4),
        (["--rate", "3e-4"], "rate", 3e-4),
        (["--either", "7"], "either", 7),
        (["--either", "0.1"], "either", 0.1),
        (["--maybe", "5"], "maybe", 5),
        (["--maybe", "none"], "maybe", None),
        (["--old-style", "2"], "old_style", 2.0),
        (["--old_style", "None"], "old_style", None),
        (["--either_old", "3"], "either_old", 3),
        (["--either_old", "none"], "either_old", "none"),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--mode", "slow"], "mode", "slow"),
        (["--mode", "3"], "mode", 3),
        (["--numbers", "4", "5"], "numbers", [4, 5]),
        (["--numbers"], "numbers", []),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--table", '{"a": [1, 2]}'], "table", {"a": [1, 2]}),
        (["--on"], "on", True),
        (["--on", "false"], "on", False),
        (["--no_on"], "on", False),
        (["--no-on"], "on", False),
        (["--off"], "off", True),
        (["--off", "TRUE"], "off", True),
        (["--off", "0"], "off", False),
        (["--undecided"], "undecided", True),
        (["--undecided", "false"], "undecided", False),
        (["--undecided", "none"], "undecided", None),
        (["--where", "a/b"], "where", Path("a/b")),
    ],
    ids=str,
)
def test_text_becomes_a_value_of_the_fields_type(words: list[str], name: str, value: Any) -> None:
    found = getattr(read(*words), name)
    assert found == value
    assert type(found) is type(value)


def test_options_that_are_not_given_keep_the_defaults_of_the_dataclass() -> None:
    assert read() == Everything(name="x")
    assert read().numbers is not read().numbers


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--size", "4.5"], "found '4.5', expected a whole number"),
        (["--rate", "fast"], "found 'fast', expected a number"),
        (["--either", "x"], "found 'x', expected a whole number or a number"),
        (["--maybe", "x"], "found 'x', expected none or a whole number"),
        (["--colour", "green"], "found 'green', expected one of red, blue"),
        (["--mode", "4"], "found '4', expected one of fast, slow, 3"),
        (["--table", "[1]"], "found '[1]', expected a JSON object"),
        (["--off", "perhaps"], "found 'perhaps', expected true or false"),
        (["--numbers", "1", "b"], "found 'b', expected a whole number"),
    ],
    ids=str,
)
def test_text_that_is_no_value_says_what_was_found_and_expected(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in error_of(ArgumentParser(Everything), ["--name", "x", *words], capsys)


def test_a_field_without_default_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--name" in error_of(ArgumentParser(Everything), [], capsys)


def test_help_is_the_docstring_under_the_field_then_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(ArgumentParser(Everything).format_help().split())
    assert "--name TEXT, --name" not in text
    assert "Who this is; 100% needed. (required)" in text
    assert "How large, in metres. (default: 3)" in text
    assert "--colour red|blue Its colour. (default: red)" in text
    assert "From metadata. (default: 1)" in text
    assert "--on [true|false] (default: True; --no_on turns it off)" in text
    assert "--inner" not in text


def test_help_covers_inherited_fields_with_the_new_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = " ".join(ArgumentParser(MoreArguments).format_help().split())
    assert "--max_steps INT Optimizer steps in all" in text
    assert "--shout TEXT What to shout. (default: hey)" in text
    assert "multiplies it. (default: 0.25)" in text
    assert "--lr_scheduler_kwargs JSON" in text


def test_every_training_argument_has_help_and_can_be_written_both_ways() -> None:
    parser = ArgumentParser(TrainingArguments)
    shown = parser.format_help()
    defaults = TrainingArguments()
    for name in defaults.to_dict():
        assert f"--{name} " in shown
        after = " ".join(shown.split(f"--{name} ", 1)[1].split("\n  --")[0].split())
        assert "(default" in after.partition("(default")[1]
        assert len(after.partition("(default")[0]) > 30, f"{name} has no sentence under it"
    (args,) = parser.parse_args_into_dataclasses(["--learning-rate", "3e-4", "--max_steps=5"])
    assert (args.learning_rate, args.max_steps) == (3e-4, 5)


def test_training_arguments_from_a_usual_command_line() -> None:
    words = shlex.split(
        "--output_dir out --per_device_train_batch_size 4 --learning_rate 3e-4 --warmup_steps 0.1 --bf16 "
        "--ddp_find_unused_parameters false --ddp_bucket_cap_mb 12.5 --ddp_timeout 60 --no_dataloader_pin_memory "
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --report_to none "
        "--label_names labels --max_steps -1 --eval_strategy epoch"
    )
    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args == TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        learning_rate=3e-4,
        warmup_steps=0.1,
        bf16=True,
        ddp_find_unused_parameters=False,
        ddp_bucket_cap_mb=12.5,
        ddp_timeout=60,
        dataloader_pin_memory=False,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        label_names=["labels"],
        eval_strategy="epoch",
    )


def test_several_dataclasses_come_back_in_order() -> None:
    words = ["--width", "8", "--max_steps", "2"]
    both = (Model, TrainingArguments)
    for parser in (ArgumentParser(*both), ArgumentParser(both), ArgumentParser(dataclass_types=both)):
        model, args = parser.parse_args_into_dataclasses(words)
        assert model == Model(8)
        assert args.max_steps == 2


def test_words_of_this_process_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--width", "5"])
    assert ArgumentParser(Model).parse_args_into_dataclasses() == (Model(5),)


def test_unknown_options_end_the_program_with_close_names(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(Model, TrainingArguments, prog="train.py")
    message = error_of(parser, ["--learnin-rate", "1", "--lr=3", "--widht", "3"], capsys)
    assert "'learnin_rate': did you mean learning_rate?" in message
    assert "'lr': write learning_rate" in message
    assert "'widht': did you mean width?" in message
    assert "train.py" in message


def test_no_prefix_of_an_option_is_taken_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" in error_of(ArgumentParser(TrainingArguments), ["--learning", "1"], capsys)


def test_advice_on_hugging_face_names_is_kept_to_training_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "learning_rate" not in error_of(ArgumentParser(Model), ["--lr", "1"], capsys)


def test_a_word_that_is_no_option_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "found 'stray'" in error_of(ArgumentParser(Model), ["stray"], capsys)


def test_remaining_words_come_back_when_asked_for() -> None:
    parser = ArgumentParser(Model)
    model, remaining = parser.parse_args_into_dataclasses(["--width", "2", "--other", "3"], return_remaining_strings=True)
    assert (model, remaining) == (Model(2), ["--other", "3"])


def test_further_argparse_options_come_back_as_a_namespace() -> None:
    parser = ArgumentParser(Model)
    parser.add_argument("--corpus", default="books")
    model, namespace = parser.parse_args_into_dataclasses(["--width", "2"])
    assert (model.width, namespace.corpus) == (2, "books")


def test_a_script_sets_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    parser = ArgumentParser(Everything)
    parser.set_defaults(name="me", size=5, numbers=[7], on=False, rate=0.1)
    (found,) = parser.parse_args_into_dataclasses(["--rate", "0.2"])
    assert found == Everything(name="me", size=5, numbers=[7], on=False, rate=0.2)
    text = " ".join(parser.format_help().split())
    assert "Who this is; 100% needed. (default: me)" in text
    assert "How large, in metres. (default: 5)" in text
    assert parser.parse_args_into_dataclasses(["--on"])[0].on is True


def test_a_default_for_a_name_that_is_no_option_is_a_type_error() -> None:
    parser = ArgumentParser(Model, TrainingArguments)
    parser.add_argument("--corpus")
    parser.set_defaults(corpus="books", width=3)
    assert parser.parse_args_into_dataclasses([])[2].corpus == "books"
    with pytest.raises(TypeError, match="the parser has no such argument:\n  'widht': did you mean width"):
        parser.set_defaults(widht=3)
    with pytest.raises(TypeError, match="'lr': write learning_rate"):
        parser.set_defaults(lr=1.0)


def test_arguments_that_cannot_hold_together_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(ArgumentParser(TrainingArguments), ["--optim", "adam", "--ddp_timeout", "0"], capsys)
    assert "optim='adam': expected one of" in message
    assert "ddp_timeout=0" in message


def test_dictionary_and_json_file_fill_the_dataclasses(tmp_path: Path) -> None:
    parser = ArgumentParser(Model, TrainingArguments)
    values = {"width": 7, "max_steps": 3, "lr_scheduler_kwargs": {"num_cycles": 2}}
    model, args = parser.parse_dict(values)
    assert (model.width, args.max_steps, args.lr_scheduler_kwargs) == (7, 3, {"num_cycles": 2})
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    assert parser.parse_json_file(path) == (model, args)
    path.write_text(json.dumps({"width": 7, "widht": 7}))
    assert parser.parse_json_file(path, allow_extra_keys=True)[0] == Model(7)
    with pytest.raises(TypeError, match="'widht'"):
        parser.parse_json_file(path)


def test_unknown_key_of_a_dictionary_is_a_type_error_unless_allowed(tmp_path: Path) -> None:
    parser = ArgumentParser(Model, TrainingArguments)
    with pytest.raises(TypeError, match="Model and TrainingArguments has no such argument:\n  'widht': did you mean width"):
        parser.parse_dict({"widht": 7})
    assert parser.parse_dict({"widht": 7, "width": 3}, allow_extra_keys=True)[0] == Model(3)
    path = tmp_path / "run.json"
    path.write_text("3")
    with pytest.raises(ArgumentsError, match=r"run\.json holds a JSON int"):
        parser.parse_json_file(path)
    path.write_text("width=3")
    with pytest.raises(ArgumentsError, match=r"run\.json is not JSON"):
        parser.parse_json_file(path)


def test_one_name_in_two_dataclasses_is_refused() -> None:
    other = make_dataclass("Other", [("width", int, 3)])
    with pytest.raises(ArgumentsError, match="'width' is a field of Model and of Other"):
        ArgumentParser(Model, other)


def test_a_class_without_source_has_no_help_but_works() -> None:
    other = make_dataclass("Other", [("depth", int, 3)])
    parser = ArgumentParser(other)
    assert "--depth INT" in parser.format_help()
    assert parser.parse_args_into_dataclasses(["--depth", "4"])[0].depth == 4


def test_annotation_without_a_spelling_is_refused_by_name() -> None:
    other = make_dataclass("Other", [("hook", Callable[[int], int] | None, None)])
    with pytest.raises(ArgumentsError, match=r"Other\.hook: .*Callable.* cannot be written on a command line"):
        ArgumentParser(other)


def test_a_class_that_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ArgumentsError, match="is not a dataclass"):
        ArgumentParser(Path)


def test_earlier_names_are_options_that_help_does_not_show() -> None:
    parser = ArgumentParser(Model, TrainingArguments)
    assert "--evaluation_strategy" not in parser.format_help()
    words = "--evaluation_strategy epoch --no_cuda --warmup-ratio 0.1 --per_gpu_train_batch_size 2 --local_rank 3"
    with pytest.warns(FutureWarning, match="is an argument of earlier versions") as caught:
        _, args = parser.parse_args_into_dataclasses(words.split())
    assert len(caught) == 4
    expected = TrainingArguments(eval_strategy="epoch", use_cpu=True, warmup_steps=0.1, per_device_train_batch_size=2)
    assert args == expected
    with pytest.warns(FutureWarning, match="no_cuda"):
        assert parser.parse_dict({"no_cuda": True})[1].use_cpu


def test_an_earlier_name_that_another_dataclass_has_is_its_own() -> None:
    other = make_dataclass("Other", [("logging_dir", str, "here")])
    found, args = ArgumentParser(other, TrainingArguments).parse_args_into_dataclasses(["--logging_dir", "there"])
    assert found.logging_dir == "there"
    assert args == TrainingArguments()


def test_a_choice_with_true_and_false_reads_as_a_switch() -> None:
    parser = ArgumentParser(TrainingArguments)
    for words, value in (
        ("--deterministic_reduction", True),
        ("--deterministic_reduction true", True),
        ("--deterministic_reduction False", False),
        ("--deterministic_reduction auto", "auto"),
    ):
        assert parser.parse_args_into_dataclasses(words.split())[0].deterministic_reduction is value


def test_aliases_and_choices_of_a_field_are_taken_from_its_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    about = {"aliases": ["-w", "--breadth"], "choices": [1, 2], "help": "How wide."}
    other = make_dataclass("Other", [("width", int, field(default=1, metadata=about))])
    assert ArgumentParser(other).parse_args_into_dataclasses(["-w", "2"])[0].width == 2
    assert ArgumentParser(other).parse_args_into_dataclasses(["--breadth=2"])[0].width == 2
    assert "invalid choice: 3" in error_of(ArgumentParser(other), ["--width", "3"], capsys)


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "run.yml"])
def test_a_file_of_arguments_stands_before_the_options(name: str, tmp_path: Path) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("yaml", reason="reads YAML")
    path = tmp_path / name
    values = {"name": "me", "size": 5, "numbers": [7], "on": False, "table": {"a": 1}}
    path.write_text(json.dumps(values))  # which is YAML as well
    (found,) = ArgumentParser(Everything).parse_args_into_dataclasses([str(path), "--size", "6"])
    assert found == Everything("me", size=6, numbers=[7], on=False, table={"a": 1})


def test_a_file_of_arguments_that_cannot_be_read_ends_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.yaml" in error_of(ArgumentParser(Model), [str(tmp_path / "none.yaml")], capsys)
    path = tmp_path / "run.json"
    path.write_text('{"widht": 3}')
    assert "'widht': did you mean width" in error_of(ArgumentParser(Model), [str(path)], capsys)


def test_yaml_file_fills_the_dataclasses(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="reads YAML")
    path = tmp_path / "run"
    path.write_text("width: 7\nlearning_rate: 5e-5\neval_strategy: no\n")
    model, args = ArgumentParser(Model, TrainingArguments).parse_yaml_file(path)
    assert (model, args) == (Model(7), TrainingArguments())


def test_files_of_words_are_read_before_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.args").write_text("--width 2\n--depth 3\n")
    (tmp_path / "more.args").write_text("--depth 4")
    Both = make_dataclass("Both", [("width", int, 1), ("depth", int, 1)])
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py"), "--width", "5"])
    parser = ArgumentParser(Both)

    def read(*words: str, **how: Any) -> tuple[int, int]:
        (found,) = parser.parse_args_into_dataclasses(list(words), **how)
        return found.width, found.depth

    assert parser.parse_args_into_dataclasses() == (Both(5, 3),)
    assert read() == (2, 3)
    assert read(look_for_args_file=False) == (1, 1)
    assert read(args_filename=tmp_path / "more.args") == (1, 4)
    assert read("--args", str(tmp_path / "more.args"), "--width", "7", args_file_flag="--args") == (7, 4)
    with pytest.raises(SystemExit):
        read(args_filename=tmp_path / "none.args")
    assert "none.args cannot be read" in capsys.readouterr().err
