"""Arguments in files: JSON and YAML in, a dictionary of names and values out."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

from allstep.errors import ArgumentsError

__all__ = ["read_arguments_file", "read_json", "read_yaml"]

_FLOAT = re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$")
_BOOLEAN = re.compile("^(true|True|TRUE|false|False|FALSE)$")


def read_arguments_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file at `path` holds: YAML where its name ends in .yaml or .yml, else JSON.

    Raises:
        ArgumentsError: it holds something else than names and values.
    """
    text = Path(path).read_text(encoding="utf-8")
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    return read_yaml(text, str(path)) if is_yaml else read_json(text, str(path))


def read_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object that `text` is; `source` is its name in messages.

    Raises:
        ArgumentsError: it is something else.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentsError(f"{source} is not JSON: {error}.") from None
    return _checked(values, "JSON", source)


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """The YAML mapping that `text` is, by the rules of YAML 1.2: 5e-5 is a number there, and no and off are texts.

    Raises:
        ArgumentsError: it is something else, or PyYAML is not installed.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ArgumentsError(
            f"{source} is YAML, for which PyYAML is needed: pip install pyyaml. Or write it as JSON, in a file named .json."
        ) from None
    try:
        values = yaml.load(text, _loader(yaml))
    except yaml.YAMLError as error:
        raise ArgumentsError(f"{source} is not YAML: {error}.") from None
    return _checked({} if values is None else values, "YAML", source)


def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader with the words and numbers of YAML 1.2, where PyYAML itself has those of 1.1."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the module is only known when it is there
        pass

    kept = ("int", "null", "merge")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, words) for tag, words in resolvers if tag.rpartition(":")[2] in kept]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader


def _checked(values: Any, kind: str, source: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ArgumentsError(f"{source} holds a {kind} {type(values).__name__}; expected an object of names and values.")
    return values
