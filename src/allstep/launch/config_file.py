"""Reads the settings of a launch from a file: accelerate's YAML, or the same in JSON.

Keys that would change what is trained, in ways that are not there here, are refused; others that are not known are named.
"""

import json
from collections.abc import Mapping
from typing import Any

from allstep.errors import ArgumentsError
from allstep.launch.foreign import refusal
from allstep.launch.settings import SETTINGS, Plain

__all__ = ["CONFIG_FILE", "check_keys", "read_config_file"]

CONFIG_FILE = "ALLSTEP_CONFIG_FILE"
"""Environment variable: a file to read where no --config_file is given."""

_KNOWN = {word for setting in SETTINGS for word in setting.words}

_HARMLESS = {
    "debug": (False,),
    "downcast_bf16": ("no", False),
    "enable_cpu_affinity": (False,),
    "main_training_function": None,
    "quiet": None,
    "role": None,
    "same_network": None,
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU"),
    "fp16": (False,),
}
"""Key → values that change nothing here; None for any."""


def read_config_file(path: str) -> tuple[dict[str, Plain], list[str]]:
    """The settings in the file at `path`, and the keys in it that mean nothing here.

    Raises:
        ArgumentsError: the file cannot be read, is no mapping of keys to values, or asks for what is not there here.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentsError(f"The configuration file {path} cannot be read: {reason}.") from None
    found = _parsed(path, text)
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise ArgumentsError(f"The configuration file {path} holds {type(found).__name__}, expected keys with values.")
    return check_keys(found, path)


def check_keys(found: Mapping[str, Any], path: str) -> tuple[dict[str, Plain], list[str]]:
    """What `found` says of the settings, and the keys in it that mean nothing here. Keys without a value are not set.

    Raises:
        ArgumentsError: a value is a list or a mapping, or a key asks for what is not there here. One message lists all.
    """
    settings: dict[str, Plain] = {}
    unknown, problems = [], []
    for key, value in found.items():
        if value is None:
            continue
        if key in _KNOWN:
            if isinstance(value, (list, dict)):
                problems.append(f"{key} is {value!r}, expected one value")
            settings[key] = value
        elif key in _HARMLESS:
            allowed = _HARMLESS[key]
            if allowed is not None and value not in allowed:
                problems.append(
                    f"{key}: {value} cannot be done here: {refusal(str(value).lower()) or refusal(key) or _ONLY_DDP}"
                )
        elif reason := refusal(key):
            if _asks(value):
                problems.append(f"{key} cannot be done here: {reason}")
        else:
            unknown.append(str(key))
    if problems:
        raise ArgumentsError(f"The configuration file {path}: " + "; ".join(problems) + ".")
    return settings, unknown


_ONLY_DDP = "allstep trains a whole model on each rank, on machines that you start it on"


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ArgumentsError(f"The configuration file {path} is no JSON: {error}.") from None
    import importlib  # nothing of this is needed where there is no file

    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ArgumentsError(
            f"The configuration file {path} is YAML, for which PyYAML is needed: pip install pyyaml. Or write it as JSON, in a "
            "file that is named .json."
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentsError(f"The configuration file {path} is no YAML: {' '.join(str(error).split())}.") from None


def _asks(value: Any) -> bool:
    """Whether a value asks for anything: accelerate writes empty sections and "NO" for what is not used."""
    if isinstance(value, dict):
        return any(_asks(inner) for inner in value.values())
    return bool(value) and str(value).lower() not in ("no", "false")
