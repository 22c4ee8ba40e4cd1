"""Dataclasses in, a command line out: `python train.py --per_device_train_batch_size 4 --learning_rate 3e-4`.

    parser = ArgumentParser(ModelArguments, TrainingArguments)
    model_args, training_args = parser.parse_args_into_dataclasses()

Each field becomes an option, written `--learning_rate` or `--learning-rate`; its annotation says how text becomes a value,
and the docstring under it is the help. A file of arguments can stand before them: `python train.py run.yaml --max_steps 10`.
"""

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from allstep._arguments.files import read_arguments_file
from allstep._arguments.names import ELSEWHERE, explain_unknown, unknown_names_message
from allstep._arguments.old_names import OLD_NAMES, ArgumentsMeta
from allstep._arguments.readers import how_to_read
from allstep._arguments.sentences import sentences_under_fields
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

__all__ = ["ArgumentParser"]


class ArgumentParser(argparse.ArgumentParser):
    """Reads dataclasses from a command line, a dictionary, a JSON or a YAML file.

    An `argparse.ArgumentParser` otherwise: further `add_argument` calls come back as one more value, a namespace. A switch
    (`flag: bool`) is written `--flag`, `--flag false`, and `--no_flag` where it is on by default; a list takes several
    values, a dictionary takes JSON, and "none" means None.
    """

    def __init__(self, *dataclass_types: Any, **kwargs: Any) -> None:
        """`dataclass_types`: the dataclasses to read, one by one, in one sequence or by that name; `kwargs`: those of argparse.

        Raises:
            ArgumentsError: a field with an annotation that has no spelling on a command line, or a name used twice.
        """
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("usage", "%(prog)s [--name value ...]")
        dataclass_types = (*dataclass_types, kwargs.pop("dataclass_types", ()))
        super().__init__(**kwargs)
        listed = [each if isinstance(each, (list, tuple)) else (each,) for each in dataclass_types]
        self.dataclass_types: tuple[type, ...] = tuple(one for several in listed for one in several)
        self._helped: dict[str, tuple[argparse.Action, str]] = {}  # field → option that --help shows, its sentence
        owners: dict[str, str] = {}
        for cls in self.dataclass_types:
            for name in _field_names(cls):
                if name in owners:
                    raise ArgumentsError(
                        f"'{name}' is a field of {owners[name]} and of {cls.__name__}: expected each option to have one "
                        f"owner. Rename one of the two."
                    )
                owners[name] = cls.__name__
            self._add_options(cls)
        self._old_names: dict[type, list[str]] = {}  # class → earlier names of its arguments
        for cls in self.dataclass_types:
            if isinstance(cls, ArgumentsMeta):
                self._old_names[cls] = [name for name in OLD_NAMES if name not in owners]
                self._add_old_options(self._old_names[cls])
                break  # two classes of them cannot be read together: they share their fields

    def set_defaults(self, **kwargs: Any) -> None:
        """Other defaults for this script than those of the dataclasses, on the command line and in its help.

        Raises:
            TypeError: a name that is neither a field nor an option of this parser.
        """
        options = {*self._helped, *(action.dest for action in self._actions)}
        unknown = [name for name in kwargs if name not in options]
        if unknown:
            raise TypeError(unknown_names_message("the parser", unknown, options, self._elsewhere()))
        super().set_defaults(**kwargs)
        for name in kwargs.keys() & self._helped.keys():
            action, text = self._helped[name]
            action.help, action.required = _help(text, _default(name, kwargs[name])), False

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """One instance of each dataclass, in the order given to the constructor.

        Options added by `add_argument` follow as a namespace. With `return_remaining_strings` the last item is the list of
        what was not understood; without it that is an error which ends the program, as argparse does, with exit code 2.

        A first word that ends in .json, .yaml or .yml is a file of arguments, whose values become defaults of this parser.
        Files of words, as they would be typed, are read before the command line, which has the last word.

        Args:
            args: the words of the command line; None: those of this process.
            look_for_args_file: whether to read a file of words beside the script, `train.args` for `train.py`, if there is one.
            args_filename: another file of words to read instead.
            args_file_flag: an option, such as "--args_file", after which the command line names further files of words.
        """
        words = list(sys.argv[1:] if args is None else args)
        beside = Path(sys.argv[0] or "-").with_suffix(".args")
        files = [Path(args_filename)] if args_filename else [beside] if look_for_args_file and beside.is_file() else []
        if args_file_flag is not None:
            of_files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            of_files.add_argument(args_file_flag, dest="files", action="append", type=Path, default=files)
            found, words = of_files.parse_known_args(words)
            files = found.files
        if words and words[0].endswith((".json", ".yaml", ".yml")):
            self._take_defaults(words.pop(0))
        return self._parsed([word for file in files for word in self._words_in(file)] + words, return_remaining_strings)

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """One instance of each dataclass from a dictionary whose keys are the field names of all of them.

        Raises:
            TypeError: a key that no dataclass has, unless `allow_extra_keys`.
            ArgumentsError: values that cannot hold together.
        """
        known = self._known()
        old = [name for names in self._old_names.values() for name in names]
        unknown = [name for name in args if name not in known and name not in old]
        if unknown and not allow_extra_keys:
            owner = " and ".join(cls.__name__ for cls in self.dataclass_types)
            raise TypeError(unknown_names_message(owner, unknown, known, self._elsewhere()))
        return tuple(cls(**{name: args[name] for name in self._names_of(cls) if name in args}) for cls in self.dataclass_types)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """As `parse_dict`, from a file that holds a JSON object.

        Raises:
            ArgumentsError: the file does not hold a JSON object.
        """
        return self.parse_dict(read_arguments_file(json_file), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """As `parse_dict`, from a file that holds a YAML mapping; needs PyYAML.

        Raises:
            ArgumentsError: the file does not hold a YAML mapping.
        """
        return self.parse_dict(read_arguments_file(yaml_file, kind="YAML"), allow_extra_keys)

    def _parsed(self, words: Sequence[str], return_remaining_strings: bool) -> tuple[Any, ...]:
        namespace, remaining = self.parse_known_args(words)
        if remaining and not return_remaining_strings:
            self.error(_unknown_options_message(remaining, self._known(), self._elsewhere()))
        given = vars(namespace)
        try:
            parsed: list[Any] = [
                cls(**{name: given.pop(name) for name in self._names_of(cls) if name in given}) for cls in self.dataclass_types
            ]
        except ArgumentsError as error:
            self.error(str(error))
        if given:
            parsed.append(argparse.Namespace(**given))
        return (*parsed, remaining) if return_remaining_strings else tuple(parsed)

    def _take_defaults(self, file: str) -> None:
        try:
            self.set_defaults(**read_arguments_file(file))
        except (ArgumentsError, TypeError, OSError) as error:
            self.error(f"{file}: {error}")

    def _words_in(self, file: Path) -> list[str]:
        try:
            return file.read_text(encoding="utf-8").split()
        except OSError as error:
            self.error(f"the file of words {file} cannot be read: {error.strerror}")

    def _names_of(self, cls: type) -> list[str]:
        return [*_field_names(cls), *self._old_names.get(cls, ())]

    def _known(self) -> list[str]:
        return [name for cls in self.dataclass_types for name in _field_names(cls)]

    def _elsewhere(self) -> Mapping[str, str]:
        return ELSEWHERE if any(issubclass(cls, TrainingArguments) for cls in self.dataclass_types) else {}

    def _add_options(self, cls: type) -> None:
        group = self.add_argument_group(cls.__name__)
        annotations, texts = _annotations(cls), sentences_under_fields(cls)
        for each in dataclasses.fields(cls):
            if not each.init:
                continue
            try:
                how = how_to_read(annotations[each.name])
            except TypeError as error:
                raise ArgumentsError(
                    f"{cls.__name__}.{each.name}: {error}. Annotate it with bool, int, float, str, Path, an Enum, a Literal, "
                    f"list or dict, or keep it out of the command line with field(init=False)."
                ) from None
            how |= {"dest": each.name, "default": argparse.SUPPRESS}  # the dataclass itself has the defaults
            how |= {"choices": each.metadata["choices"]} if "choices" in each.metadata else {}
            text = texts.get(each.name) or each.metadata.get("help", "")
            spellings = _spellings(each.name, each.metadata.get("aliases", ()))
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
                action = group.add_argument(*spellings, required=True, help=_help(text, "required"), **how)
                self._helped[each.name] = action, text
                continue
            default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            shown, *hidden = spellings
            action = group.add_argument(shown, help=_help(text, _default(each.name, default)), **how)
            self._helped[each.name] = action, text
            for spelling in hidden:
                group.add_argument(spelling, help=argparse.SUPPRESS, **how)
            if default is True:
                for spelling in _spellings(f"no_{each.name}"):
                    group.add_argument(
                        spelling,
                        dest=each.name,
                        action="store_const",
                        const=False,
                        default=argparse.SUPPRESS,
                        help=argparse.SUPPRESS,
                    )

    def _add_old_options(self, names: Iterable[str]) -> None:
        for name in names:
            how = how_to_read(OLD_NAMES[name].kind)
            self.add_argument(*_spellings(name), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


# ---- dataclasses: names, annotations, help


def _field_names(cls: type) -> list[str]:
    if not dataclasses.is_dataclass(cls):
        raise ArgumentsError(f"{cls!r} is not a dataclass. Write @dataclass above the class.")
    return [each.name for each in dataclasses.fields(cls) if each.init]


def _annotations(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ArgumentsError(
            f"An annotation of {cls.__name__} cannot be looked up: {error}. Define the class, and what its annotations name, "
            f"at the top of its module."
        ) from None


def _spellings(name: str, aliases: str | Sequence[str] = ()) -> list[str]:
    further = [aliases] if isinstance(aliases, str) else aliases
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *further)))


def _help(text: str, tail: str) -> str:
    return " ".join([*text.split(), f"({tail})"]).replace("%", "%%")  # argparse formats help with %


def _default(name: str, value: Any) -> str:
    off = f"; --no_{name} turns it off" if value is True else ""
    return f"default: {value.value if isinstance(value, Enum) else value}{off}"


def _unknown_options_message(remaining: Sequence[str], known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    options = [word[2:].partition("=")[0].replace("-", "_") for word in remaining if word.startswith("--") and word != "--"]
    if not options:
        return f"found {' '.join(remaining)!r}, expected options only, such as --{next(iter(known), 'help')}"
    lines = "".join(f"\n  {explain_unknown(name, known, elsewhere)}" for name in options)
    return f"no such option{'s' if len(options) > 1 else ''} (--help lists all):{lines}"
