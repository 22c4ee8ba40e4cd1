"""A model card: what was trained, on what, how, and how well, as the README.md of an output folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["model_card"]

_HOW = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "optim", "weight_decay",
    "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "max_grad_norm", "bf16", "fp16",
)  # fmt: skip
"""Arguments that tell how a model was trained."""


def model_card(
    name: str,
    arguments: Mapping[str, Any],
    metrics: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    world_size: int,
    global_batch_size: int,
    about: Mapping[str, Any],
) -> str:
    """The text of a model card, in Markdown, with the front matter that model hubs read.

    Args:
        name: of the model.
        arguments: those of the run, by name.
        metrics: of its last evaluation, or else of its training.
        versions: package -> version.
        world_size: ranks that it was trained on.
        global_batch_size: samples of one optimizer step, on all of them; 0 where nothing was trained.
        about: what the script says: language, license, tags, finetuned_from, tasks, dataset; None for what it does not.
    """
    said = {key: value for key, value in about.items() if value}
    front = {"library_name": "allstep", "model_name": name}
    for key, label in (("license", "license"), ("finetuned_from", "base_model")):
        if key in said:
            front[label] = said[key]
    listed = {"language": said.get("language"), "tags": said.get("tags"), "datasets": said.get("dataset_tags")}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items())]
    for label, values in listed.items():
        if values:
            lines += [f"{label}:", *(f"- {json.dumps(value)}" for value in _as_list(values))]
    lines += ["---", "", f"# {name}", ""]
    origin = f"Fine-tuned from {said['finetuned_from']}" if "finetuned_from" in said else "Trained"
    data = f" on {', '.join(map(str, _as_list(said['dataset'])))}" if "dataset" in said else ""
    task = f" for {', '.join(map(str, _as_list(said['tasks'])))}" if "tasks" in said else ""
    lines += [f"{origin}{data}{task}.", ""]
    if metrics:
        lines += ["## Results", "", *_table("number", metrics), ""]
    how: dict[str, Any] = {key: arguments[key] for key in _HOW if key in arguments}
    if global_batch_size:
        how |= {"ranks": world_size, "global batch": global_batch_size}
    return "\n".join(
        [*lines, "## Training", "", *_table("argument", how), "", "## Versions", "", *_table("package", versions), ""]
    )


def _table(heading: str, values: Mapping[str, Any]) -> list[str]:
    shown = ((key, f"{value:.6g}" if isinstance(value, float) else value) for key, value in values.items())
    return [f"| {heading} | |", "|---|---|", *(f"| {key} | {value} |" for key, value in shown)]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
