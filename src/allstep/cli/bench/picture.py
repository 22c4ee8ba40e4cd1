"""Pictures of a result, drawn by matplotlib where it is installed."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.cli.bench.report import KINDS, is_quiet, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HOW_TO_GET", "draw", "is_available"]

HOW_TO_GET = "no picture: matplotlib is not installed (pip install 'allstep[plot]')"
COLORS = ("#0b6e99", "#d1495b", "#7a9e3a", "#8d6a9f")
MARKS = {"float32": "o-", "bfloat16": "s--"}
BUSY = " (the machine was too busy: do not trust this)"
EDGES = (0.5, 2.0)
"""A ratio of 1 is in every picture, and this much room around it."""


def is_available() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of `result` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = result["benchmark"]
    panels: list[int | None] = sorted({row["ranks"] for row in result["rows"]}) if kind in ("allreduce", "ddp") else [None]
    figure = Figure(figsize=(4.2 + 5.0 * len(panels), _height(result)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, ranks in zip(axes, panels, strict=True):
        axis.grid(True, which="both", color="#e4e4e4", linewidth=0.6)
        axis.set_axisbelow(True)
        _PICTURES[kind](axis, result, ranks)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.suptitle(_TITLES[kind].format(backend=result.get("backend", "")) + ("" if is_quiet(result) else BUSY))
    figure.savefig(path, dpi=110)


def _height(result: dict[str, Any]) -> float:
    """Inches."""
    if result["benchmark"] == "ddp":
        return 2.0 + 0.42 * max(len(_labels(result, ranks)) for ranks in {row["ranks"] for row in result["rows"]})
    return {"allreduce": 4.8, "trainer": 2.9, "launch": 2.5}[str(result["benchmark"])]


def _with_interval(axis: "Axes", at: Any, estimates: list[dict[str, float]], *, sideways: bool, **style: Any) -> None:
    values = [one["value"] for one in estimates]
    reach = [[one["value"] - one["low"] for one in estimates], [one["high"] - one["value"] for one in estimates]]
    if sideways:
        axis.errorbar(values, at, xerr=reach, capsize=3, **style)
    else:
        axis.errorbar(at, values, yerr=reach, capsize=3, **style)


def _allreduce(axis: "Axes", result: dict[str, Any], ranks: int | None) -> None:
    rows = [row for row in result["rows"] if row["ranks"] == ranks]
    beside = 0.86  # so that bars of several lines do not hide one another
    for color, kind in zip(COLORS, KINDS, strict=False):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            some = sorted(
                (row for row in rows if row["dtype"] == dtype and kind in row["speedup"]), key=lambda row: row["bytes"]
            )
            if some:
                _with_interval(
                    axis,
                    [row["bytes"] * beside for row in some],
                    [row["speedup"][kind] for row in some],
                    sideways=False,
                    fmt=MARKS.get(dtype, "^:"),
                    color=color,
                    label=f"{KINDS[kind]}, {dtype}",
                )
                beside *= 1.11
    sizes = sorted({row["bytes"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [size(one) for one in sizes], rotation=30)
    axis.minorticks_off()
    axis.set_xlabel("size of the tensor; with 95 % intervals")
    axis.set_ylabel(f"time of gloo / time of {result['backend']}")
    _ratio_scale(axis.yaxis, _edges(one for row in result["rows"] for one in row["speedup"].values()))
    axis.axhline(1, color="black", linewidth=1)
    axis.set_title(f"{ranks} ranks")


def _labels(result: dict[str, Any], ranks: int | None) -> list[str]:
    return [
        f"{row['model']}, {row['optimizer']}" + (f", x{row['accumulation']}" if row["accumulation"] > 1 else "")
        for row in result["rows"]
        if row["ranks"] == ranks
    ]


def _ddp(axis: "Axes", result: dict[str, Any], ranks: int | None) -> None:
    rows = [row for row in result["rows"] if row["ranks"] == ranks]
    places = list(range(len(rows), 0, -1))
    series = (
        ("over_best", f"on {result['backend']}", "o", 0.15),
        ("gloo_over_best", "on gloo", "s", -0.15),
    )
    for color, (key, label, mark, shift) in zip(COLORS, series, strict=False):
        at = [place + shift for place in places]
        _with_interval(axis, at, [row[key] for row in rows], sideways=True, fmt=mark, color=color, label=label)
    axis.set_yticks(places, _labels(result, ranks))
    axis.set_ylim(0.5, len(rows) + 0.5)
    axis.axvline(1, color="black", linewidth=1)
    edges = _edges(row[key] for row in result["rows"] for key, *_ in series)
    axis.set_xlim(min(0.4, *edges) - 0.05, max(1.1, *edges) + 0.05)
    axis.set_xlabel("step of allstep's DDP / torch's at its best setting, with 95 % intervals")
    axis.set_title(f"{ranks} ranks")


def _trainer(axis: "Axes", result: dict[str, Any], _: int | None) -> None:
    rows = result["rows"]
    places = list(range(len(rows), 0, -1))
    series = (("over_bare", "over a bare torch loop", "o", 0.1), ("over_peer", "over transformers' Trainer", "s", -0.1))
    for color, (key, label, mark, shift) in zip(COLORS, series, strict=False):
        found = [(place + shift, row[key]) for place, row in zip(places, rows, strict=True) if row[key] is not None]
        if found:
            at, estimates = [one[0] for one in found], [one[1] for one in found]
            _with_interval(axis, at, estimates, sideways=True, fmt=mark, color=color, label=label)
    axis.set_yticks(places, [f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}" for row in rows])
    axis.set_ylim(0.5, len(rows) + 0.5)
    _ratio_scale(axis.xaxis, _edges(row[key] for row in rows for key, *_ in series if row[key] is not None))
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("steps per second of allstep's Trainer / theirs, with 95 % intervals")


def _launch(axis: "Axes", result: dict[str, Any], _: int | None) -> None:
    rows = sorted(result["rows"], key=lambda row: -float(row["seconds"]))
    colors = [COLORS[0] if row["launcher"] == "allstep launch" else "#b8b8b8" for row in rows]
    bars = axis.barh([row["launcher"] for row in rows], [row["seconds"] for row in rows], color=colors, height=0.6)
    axis.bar_label(bars, fmt="%.2f s", padding=4)
    axis.margins(x=0.12)
    axis.set_xlabel("seconds until two ranks have done their first all_reduce (median)")


def _edges(estimates: Iterable[dict[str, float]]) -> list[float]:
    """Both ends of all intervals: all panels have the same scale."""
    return [one[end] for one in estimates for end in ("low", "high")]


def _ratio_scale(which: Any, edges: list[float]) -> None:
    """A logarithmic axis with plain numbers, and 1 in sight."""
    axis = which.axes
    limits = min([EDGES[0], *(edge * 0.8 for edge in edges)]), max([EDGES[1], *(edge * 1.25 for edge in edges)])
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if limits[0] <= tick <= limits[1]]
    name = which.axis_name
    getattr(axis, f"set_{name}scale")("log")
    getattr(axis, f"set_{name}lim")(*limits)
    getattr(axis, f"set_{name}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    which.set_minor_formatter("")


_PICTURES = {"allreduce": _allreduce, "ddp": _ddp, "trainer": _trainer, "launch": _launch}
_TITLES = {
    "allreduce": "all_reduce: how many times faster {backend} is than gloo",
    "ddp": "A training step, ours over torch's: left of 1, ours is faster",
    "trainer": "Steps per second of a tiny model: right of 1, ours is faster",
    "launch": "Start of two ranks",
}
