"""Annotation in, argparse's keywords out: how the text of a command line becomes a value of a field's type."""

import argparse
import contextlib
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union

__all__ = ["how_to_read"]

_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)


def how_to_read(annotation: Any) -> dict[str, Any]:
    """argparse's keywords for a value of this annotation: `type` and `metavar`, with `nargs` and `const` where they matter.

    Raises:
        TypeError: the annotation has no spelling on a command line.
    """
    kinds = _members(annotation)
    for kind in kinds:
        if kind is list or typing.get_origin(kind) in (list, Sequence):
            items = _members(*typing.get_args(kind) or (str,))
            return {"type": _reader(items), "nargs": "*", "metavar": _metavar(items)}
    how: dict[str, Any] = {"type": _reader(kinds), "metavar": _metavar(kinds)}
    if bool in kinds:
        how |= {"nargs": "?", "const": True}
    return how


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, those that accept least text first; a plain annotation alone."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return sorted(typing.get_args(annotation), key=_generality)
    return [annotation]


def _generality(kind: Any) -> int:
    order = (types.NoneType, int, float, bool)
    return order.index(kind) if kind in order else 9 if kind is str else 5  # between them enums, literals, paths, JSON


def _reader(kinds: Collection[Any]) -> Callable[[str], Any]:
    """The function that reads the first of `kinds` that accepts a text. Where any text will do, "none" is a text too."""
    kinds = [kind for kind in kinds if not (kind is types.NoneType and str in kinds)]
    readers = [_read_one(kind) for kind in kinds]

    def read(text: str) -> Any:
        for reader in readers:
            with contextlib.suppress(ValueError):
                return reader(text)
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {' or '.join(_expected(kind) for kind in kinds)}")

    return read


def _read_one(kind: Any) -> Callable[[str], Any]:
    """The function that reads one kind, raising ValueError for text that is not of it."""
    if kind in (str, Any):
        return str
    if kind is types.NoneType:
        return lambda text: _pick(text.lower(), {"none": None, "null": None})
    if kind is bool:
        return lambda text: _pick(text.lower(), _BOOLEANS)
    if _choices(kind):
        return lambda text: _pick(text, _choices(kind))
    if _is_json(kind):
        return _json_object
    if kind in (int, float) or (isinstance(kind, type) and issubclass(kind, os.PathLike)):
        return typing.cast(Callable[[str], Any], kind)
    raise TypeError(f"{_name(kind)} cannot be written on a command line")


def _pick(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)  # its error is a ValueError
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _choices(kind: Any) -> dict[str, Any]:
    """Spelling → value of a Literal or an Enum; empty for anything else."""
    if typing.get_origin(kind) is Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}
    return {str(member.value): member for member in kind} if isinstance(kind, type) and issubclass(kind, Enum) else {}


def _is_json(kind: Any) -> bool:
    return kind is dict or typing.get_origin(kind) in (dict, Mapping)


def _expected(kind: Any) -> str:
    words = {types.NoneType: "none", bool: "true or false", int: "a whole number", float: "a number"}
    if kind in words:
        return words[kind]
    if _choices(kind):
        return f"one of {', '.join(_choices(kind))}"
    return "a JSON object" if _is_json(kind) else f"a {_name(kind)}"


def _metavar(kinds: Collection[Any]) -> str:
    words = {bool: "true|false", str: "TEXT", Any: "TEXT"}
    parts: list[str] = []
    for kind in kinds:
        if kind is not types.NoneType:
            parts += _choices(kind) or ["JSON" if _is_json(kind) else words.get(kind) or _name(kind).upper()]
    return "JSON" if "JSON" in parts else "|".join(parts)


def _name(kind: Any) -> str:
    return str(kind) if typing.get_origin(kind) else str(getattr(kind, "__name__", kind))
