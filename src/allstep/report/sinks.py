"""Where numbers go: a progress bar, a line an event, `metrics.jsonl`, trackers. Only rank 0 has sinks.

`make_sinks` gives the trainer one `Sink` that hands everything on to those that fit this run; other ranks get one that
hands on to nobody, so that the trainer's lines are the same on all ranks.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from allstep.report.record import StepRecord, json_line
from allstep.report.sink import RunFacts, Sink
from allstep.report.trackers import make_trackers
from allstep.report.watch import WatchSink

__all__ = ["METRICS_FILE", "JsonlSink", "SinkGroup", "make_sinks"]

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file inside the output folder."""


class SinkGroup(Sink):
    """Hands everything on.

    A sink whose disk is full, whose reader has gone, or whose tracker fails is dropped with one warning: training goes on.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)
        """Those still in use."""

    def open(self, total_steps: int | None, first_step: int) -> None:
        self._each(lambda sink: sink.open(total_steps, first_step))

    def step(self, record: StepRecord) -> None:
        self._each(lambda sink: sink.step(record))

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        self._each(lambda sink: sink.log(values, step, epoch))

    def message(self, text: str) -> None:
        self._each(lambda sink: sink.message(text))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except sink.failures as error:
                self.sinks.remove(sink)
                with contextlib.suppress(*sink.failures):
                    sink.close()
                warnings.warn(f"{type(sink).__name__} shows nothing from here on: {error}. Training goes on.", stacklevel=3)


class JsonlSink(Sink):
    """`metrics.jsonl`: a JSON object a line, with step and epoch first; see `json_line` for numbers that are not finite.

    Each line is in the file at once. A resumed run appends, after it has dropped the lines of steps that will be done again.
    A run from the beginning keeps the file of another run that it finds as `metrics.previous.jsonl`.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self.path = Path(output_dir) / METRICS_FILE
        """The metrics file."""
        self._file: TextIO | None = None
        self._is_ours = False  # what the file holds was written here: an evaluation before training

    def open(self, total_steps: int | None, first_step: int) -> None:
        self.close()
        if not self.path.exists() or (first_step == 0 and self._is_ours):
            return
        if first_step == 0:
            self.path.replace(self.path.with_name("metrics.previous.jsonl"))
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        beside = self.path.with_name(f"{METRICS_FILE}.new")
        beside.write_text("".join(f"{line}\n" for line in lines if _step(line) <= first_step), encoding="utf-8")
        beside.replace(self.path)

    def step(self, record: StepRecord) -> None:
        """Nothing: the file holds what is logged."""

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_ours |= not self.path.exists()
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json_line({"step": step, "epoch": epoch} | dict(values)) + "\n")
        self._file.flush()

    def message(self, text: str) -> None:
        """Nothing: the file holds numbers."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def make_sinks(
    output_dir: str | os.PathLike[str],
    report_to: str | Sequence[str] | None = "none",
    is_main: bool = True,
    *,
    shows: Callable[[str], bool] = lambda role: role == "ProgressCallback",
    facts: Callable[[], RunFacts] = RunFacts,
    is_restarted: bool = False,
) -> SinkGroup:
    """The sinks that fit this run, behind one: what a person watches, `metrics.jsonl`, trackers. None of them unless `is_main`.

    Args:
        output_dir: the run's.
        report_to: names of trackers; see `make_trackers`.
        is_main: whether this is rank 0.
        shows: whether "ProgressCallback", "PrinterCallback" are to be shown, now; see `WatchSink`.
        facts: what trackers show of the run; asked for when they begin.
        is_restarted: whether the launcher has started this job again.

    Raises:
        ArgumentsError: on every rank; `report_to` names something unknown, or a package that is not installed.
    """
    trackers = make_trackers(report_to, output_dir, facts, is_restarted)
    return SinkGroup([WatchSink(shows), JsonlSink(output_dir), *trackers] if is_main else [])


def _step(line: str) -> float:
    """The step of a line; infinite where the line was cut short, so that nobody keeps it."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
