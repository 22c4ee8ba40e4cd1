"""An object of Hugging Face's TrainingArguments in, the values of ours out; without importing its package."""

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

from allstep._arguments.old_names import OLD_NAMES, warn

__all__ = ["values_of"]

_MADE_THERE = frozenset(
    ("distributed_state", "mixed_precision", "fsdp_plugin_args", "deepspeed_plugin", "hf_deepspeed_config", "xla_fsdp_config")
)
"""Attributes that Hugging Face's object computes for itself."""
_THEIR_MODULE = "transformers.training_args"


def values_of(args: Any, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arguments among `known` that say what `args` says, all else that it holds under public names).

    A field of an earlier version counts where the one of today has its default.
    """
    held = {name: value for name, value in vars(args).items() if not name.startswith("_") and name not in _MADE_THERE}
    usual = _defaults(args)
    values = {name: value for name, value in held.items() if name in known}
    further = {name: value for name, value in held.items() if name not in known}
    for name in [name for name in further if name in OLD_NAMES]:
        entry, value = OLD_NAMES[name], further[name]
        if not entry.accepts(value):
            values[name] = further.pop(name)  # to be refused with the others
        elif entry.now is not None:
            new = entry.now(value) if value != usual.get(name) else {}
            values |= {each: new[each] for each in new if each not in values or values[each] == usual.get(each)}
            del further[name]
    if values.get("disable_tqdm") is False:
        values["disable_tqdm"] = None  # what None became there; here it still looks at where the output goes
    theirs = [cls for cls in type(args).__mro__ if cls.__module__ == _THEIR_MODULE]
    newer = {name for cls in theirs for name in inspect.get_annotations(cls)}
    for name in newer & further.keys() - OLD_NAMES.keys():
        if further[name] != usual.get(name):
            warn(
                f"{name}={further[name]!r} is an argument of transformers that is not known here: it does nothing.", UserWarning
            )
    return values, further


def _defaults(args: Any) -> dict[str, Any]:
    fields = dataclasses.fields(args) if dataclasses.is_dataclass(args) else ()
    factories = {each.name: each.default_factory for each in fields if each.default_factory is not dataclasses.MISSING}
    return {each.name: factories[each.name]() if each.name in factories else each.default for each in fields}
