"""The rules that TrainingArguments must keep, as pure functions over its values.

`normalise` brings what people write (enums, JSON, 100.0 for 100, None for "the usual") to one form; `problems` lists in
words whatever is still wrong, all of it at once; `notices` what was asked for and changes nothing.
"""

import json
import os
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any

from allstep._arguments.choices import SCHEDULES_BY_EVALUATION
from allstep._arguments.kinds import DICTIONARIES, is_number, is_whole, wrong_kinds
from allstep._arguments.rules import broken_together

__all__ = ["normalise", "notices", "problems"]

_WHOLE_OR_SHARE = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")
_LISTS = ("report_to", "debug")


def normalise(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments in one form: plain strings, numbers and dictionaries, unset ones filled in from others.

    Values of a wrong kind pass unchanged; `problems` reports them.
    """
    new = {name: _simple(value) for name, value in values.items()}
    for name in DICTIONARIES:
        new[name] = _from_json_object(new[name])
    for name in _WHOLE_OR_SHARE:
        if is_number(new[name]) and new[name] >= 1 and new[name] == int(new[name]):
            new[name] = int(new[name])
    for name in _LISTS:
        new[name] = _listed(new[name])
    new["output_dir"] = "trainer_output" if new["output_dir"] is None else new["output_dir"]
    if isinstance(new["output_dir"], str):
        new["output_dir"] = os.path.expanduser(new["output_dir"])
    if isinstance(new["include_num_input_tokens_seen"], bool):
        new["include_num_input_tokens_seen"] = "all" if new["include_num_input_tokens_seen"] else "no"
    if new["eval_delay"] is None:
        new["eval_delay"] = 0
    _fill_in(new)
    return new


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with normalised arguments: one sentence each, with what was found, expected and to be written."""
    wrong = wrong_kinds(values)
    # A rule over several arguments is worth checking only where each of them is of the right kind.
    together = [sentence for names, sentence in broken_together(values) if not wrong.keys() & set(names)]
    return [*wrong.values(), *together]


def notices(values: Mapping[str, Any]) -> list[str]:
    """What was asked for and changes nothing here, in arguments without problems: one sentence each."""
    said = []
    if not values["average_tokens_across_devices"]:
        said.append("average_tokens_across_devices=False: losses weigh by the tokens of all ranks all the same.")
    if not values["dataloader_in_order"]:
        said.append("dataloader_in_order=False: batches come in the order of the samples all the same.")
    accumulation = (values["accelerator_config"] or {}).get("gradient_accumulation_kwargs") or {}
    if accumulation.get("sync_each_batch"):
        said.append("accelerator_config: sync_each_batch=True: gradients are reduced once a step, to the same sums.")
    return said


def _fill_in(new: dict[str, Any]) -> None:
    """Set what was left out and follows from others."""
    if new["eval_strategy"] == "steps" and new["eval_steps"] is None:
        new["eval_steps"] = new["logging_steps"]
    if new["eval_strategy"] in ("steps", "epoch"):
        new["do_eval"] = True
    by_metric = new["load_best_model_at_end"] is True or new["save_strategy"] == "best"
    if new["metric_for_best_model"] is None and (by_metric or new["lr_scheduler_type"] in SCHEDULES_BY_EVALUATION):
        new["metric_for_best_model"] = "loss"
    if new["greater_is_better"] is None and isinstance(new["metric_for_best_model"], str):
        new["greater_is_better"] = not new["metric_for_best_model"].endswith("loss")
    if new["torch_compile_backend"] is not None or new["torch_compile_mode"] is not None:
        new["torch_compile"] = True
    config = new["accelerator_config"]
    accumulation = config.get("gradient_accumulation_kwargs") if isinstance(config, dict) else None
    steps = accumulation.get("num_steps") if isinstance(accumulation, dict) else None
    if is_whole(steps) and new["gradient_accumulation_steps"] == 1:
        new["gradient_accumulation_steps"] = steps


# ---- one form


def _simple(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Real):  # numpy's numbers would not go into JSON
        return int(value) if isinstance(value, Integral) else float(value)
    return [_simple(item) for item in value] if isinstance(value, (list, tuple)) else value


def _listed(value: Any) -> Any:
    if value in (None, "", "none", ["none"]):
        return []
    return value.split() if isinstance(value, str) else value


def _from_json_object(value: Any) -> Any:
    """A dictionary of what is one, of an object with `to_dict` (AcceleratorConfig), of JSON and of a JSON file."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return dict(value.to_dict())
    if not isinstance(value, str):
        return value
    try:
        if os.path.isfile(value):
            with open(value, encoding="utf-8") as file:
                read = json.load(file)
        else:
            read = json.loads(value)
    except (json.JSONDecodeError, OSError):
        return value
    return read if isinstance(read, dict) else value
