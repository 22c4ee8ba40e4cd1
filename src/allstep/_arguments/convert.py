"""An object of Hugging Face's TrainingArguments in, the values of ours out; without importing its package."""

import dataclasses
from collections.abc import Collection
from typing import Any

from allstep._arguments.old_names import OLD_NAMES

__all__ = ["values_of"]

_MADE_THERE = frozenset(
    ("distributed_state", "mixed_precision", "fsdp_plugin_args", "deepspeed_plugin", "hf_deepspeed_config", "xla_fsdp_config")
)
"""Attributes that Hugging Face's object computes for itself."""


def values_of(args: Any, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arguments among `known` that say what `args` says, all else that it holds under public names).

    A field of an earlier version counts where the one of today has its default.
    """
    held = {name: value for name, value in vars(args).items() if not name.startswith("_") and name not in _MADE_THERE}
    defaults = {each.name: each.default for each in dataclasses.fields(args)} if dataclasses.is_dataclass(args) else {}
    values = {name: value for name, value in held.items() if name in known}
    further = {name: value for name, value in held.items() if name not in known}
    for name in [name for name in further if name in OLD_NAMES]:
        entry, value = OLD_NAMES[name], further[name]
        if value is None or value == defaults.get(name):
            continue
        if entry.now is not None:
            new = entry.now(value)
            values |= {each: new[each] for each in new if each not in values or values[each] == defaults.get(each)}
        elif entry.harmless is not None:
            values[name] = further.pop(name)  # to be refused with the others
    if values.get("disable_tqdm") is False:
        values["disable_tqdm"] = None  # what None became there; here it still looks at where the output goes
    return values, further
