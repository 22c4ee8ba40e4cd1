"""The metrics of a whole training, evaluation or prediction: as a table for people, and as files that scripts read."""

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["metrics_format", "metrics_table", "save_metrics"]


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as people read them: memory in MB (2**20 bytes), times as h:mm:ss.cc, operations in GF (2**30), four decimals."""
    return {name: _formatted(name, value) for name, value in metrics.items()}


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Metrics as a table, by name, under a heading.

    Args:
        split: what they are of: train, eval, test, …
        metrics: as `train`, `evaluate` and `predict` give them.
    """
    shown = {name: str(value) for name, value in metrics_format(metrics).items()}
    names, values = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
    lines = [f"  {name:<{names}} = {shown[name]:>{values}}" for name in sorted(shown)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def save_metrics(output_dir: str | os.PathLike[str], split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
    """Write metrics as they are to `{split}_results.json`, and put them into `all_results.json`. On one rank only.

    Args:
        output_dir: the run's folder, made when missing.
        split: what they are of: train, eval, test, all, …
        metrics: names and numbers.
        combined: whether `all_results.json` gets them too; it keeps those of other splits.

    Raises:
        OSError: a file cannot be written.
        ValueError: `all_results.json` is there and is no JSON.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write(path, before | dict(metrics))


def _formatted(name: str, value: Any) -> Any:
    if "_mem_" in name and isinstance(value, int):
        return f"{value >> 20}MB"
    if "_runtime" in name and isinstance(value, int | float):
        return f"{timedelta(seconds=int(value))}.{int(abs(value - int(value)) * 100):02}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _write(path: Path, metrics: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(metrics), indent=4, sort_keys=True, default=_as_plain) + "\n", encoding="utf-8")


def _as_plain(value: Any) -> Any:
    """Numbers of NumPy and torch."""
    return value.tolist()
