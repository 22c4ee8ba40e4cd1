"""Where numbers go: a progress bar, a line an event, `metrics.jsonl`, TensorBoard. Only rank 0 has sinks.

`make_sinks` gives the trainer one `Sink` that hands everything on to those that fit this run; other ranks get one that
hands on to nobody, so that the trainer's lines are the same on all ranks.
"""

import contextlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from allstep.errors import ArgumentsError
from allstep.report.record import StepRecord, json_line
from allstep.report.sink import Sink
from allstep.report.terminal import LineSink, ProgressSink

__all__ = ["METRICS_FILE", "JsonlSink", "SinkGroup", "TensorBoardSink", "make_sinks"]

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file inside the output folder."""


class SinkGroup(Sink):
    """Hands everything on. A sink whose disk is full or whose reader has gone is dropped with one warning: training goes on."""

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
            except OSError as error:
                self.sinks.remove(sink)
                with contextlib.suppress(OSError):
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


class TensorBoardSink(Sink):
    """Scalars below `runs/` in the output folder: train/loss, train/learning_rate, eval/loss.

    Raises:
        ArgumentsError: the package tensorboard is not installed.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        if not _has_tensorboard():
            raise ArgumentsError(
                "report_to='tensorboard' needs the package tensorboard, which is not installed. Install it with `pip install "
                "'allstep[tensorboard]'`, or set report_to='none'; metrics.jsonl is written in either case."
            )
        self.folder = Path(output_dir) / "runs"
        """Where the event files lie; `tensorboard --logdir` takes it."""
        self._writer: Any = None

    def open(self, total_steps: int | None, first_step: int) -> None:
        self.close()

    def step(self, record: StepRecord) -> None:
        """Nothing: it shows what is logged."""

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # the package is optional

            self._writer = SummaryWriter(str(self.folder))
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(_tag(name), value, step)
        self._writer.flush()

    def message(self, text: str) -> None:
        """Nothing: it shows numbers."""

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def make_sinks(
    output_dir: str | os.PathLike[str],
    disable_tqdm: bool | None = None,
    report_to: str | Sequence[str] | None = "none",
    is_main: bool = True,
) -> SinkGroup:
    """The sinks that fit this run, behind one.

    `metrics.jsonl` always; a progress bar where stderr is a terminal and `disable_tqdm` is not true, else lines on stdout;
    TensorBoard where `report_to` says "tensorboard", or "all" and it is installed. None of them unless `is_main`.

    Raises:
        ArgumentsError: on every rank; `report_to` names something unknown, or a package that is not installed.
    """
    names = {report_to} if isinstance(report_to, str) else set(report_to or ())
    unknown = sorted(names - {"all", "none", "tensorboard"})
    if unknown:
        raise ArgumentsError(f"report_to names {', '.join(unknown)}; there are 'tensorboard', 'all' and 'none'.")
    extra: list[Sink] = []
    if "tensorboard" in names or ("all" in names and _has_tensorboard()):
        extra.append(TensorBoardSink(output_dir))
    if not is_main:
        return SinkGroup([])
    watched: Sink = ProgressSink(sys.stderr) if not disable_tqdm and _is_terminal(sys.stderr) else LineSink(sys.stdout)
    return SinkGroup([watched, JsonlSink(output_dir), *extra])


def _step(line: str) -> float:
    """The step of a line; infinite where the line was cut short, so that nobody keeps it."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _tag(name: str) -> str:
    """`eval_loss` as `eval/loss`, `loss` as `train/loss`: TensorBoard puts what is before the slash under one heading."""
    for part in ("eval", "test", "train"):
        if name.startswith(f"{part}_"):
            return f"{part}/{name.removeprefix(f'{part}_')}"
    return f"train/{name}"


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; a pseudo-terminal of no width is a recorder's, on which a bar would be invisible."""
    with contextlib.suppress(ValueError):  # closed
        return stream is not None and stream.isatty() and _columns(stream) != 0
    return False


def _columns(stream: TextIO) -> int | None:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:  # no real file
        return None
