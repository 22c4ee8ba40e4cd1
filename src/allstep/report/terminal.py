"""What a person watches: a progress bar in a terminal, a line an event everywhere else."""

from collections.abc import Mapping
from typing import Any, TextIO

import tqdm

from allstep.report.metrics import Throughput, format_duration, format_number, format_rate
from allstep.report.record import StepRecord
from allstep.report.sink import Sink

__all__ = ["LineSink", "ProgressSink"]

_SHORT = {"learning_rate": "lr", "grad_norm": "grad norm"}
"""Names that are shown shorter than they are kept."""
_WAITS = {"data_share": "data wait", "communication_share": "rank wait"}
"""Shares of time, which are shown from `_WORTH_SHOWING` on."""
_WORTH_SHOWING = 0.1
_ONLY_KEPT = ("step", "epoch", "total_flos", "host_memory_peak_gb", "num_input_tokens_seen")
"""Names that a line leaves to the files, or has elsewhere."""

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class _Watched(Sink):
    """What the two sinks for people have in common: where training stands, how fast it goes, and how a line reads."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        """Where it is shown."""
        self._total: int | None = None
        self._done = 0
        self._clock = 0.0
        self._throughput = Throughput()
        self._pace = Throughput()

    def open(self, total_steps: int | None, first_step: int) -> None:
        self._total, self._done, self._clock = total_steps, first_step, 0.0
        self._throughput, self._pace = Throughput(), Throughput()
        self._throughput.mark(0.0)
        self._pace.mark(0.0)

    def step(self, record: StepRecord) -> None:
        self._clock += record.seconds
        self._throughput.mark(self._clock, record.samples)
        self._pace.mark(self._clock, record.step - self._done)
        self._done = record.step

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        self.line(values, step, epoch)

    def line(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        """Show values as a line, whatever else shows them."""
        of_total = "" if self._total is None else f"/{self._total}"
        words = [f"step {step:>{len(of_total[1:])}}{of_total}", f"epoch {epoch:.2f}"]
        words += [text for name, value in values.items() if (text := _worded(name, value))]
        rate, pace = self._throughput.rate, self._pace.rate
        if "loss" in values and rate is not None:
            if "samples_per_second" not in values:
                words.append(format_rate(rate, "samples"))
            if self._total is not None and pace and step < self._total:
                words.append(f"{format_duration((self._total - step) / pace)} left")
        self.message("  ".join(words))


class LineSink(_Watched):
    """A line an event, for a file, a pipe or a log collector: no control characters, nothing rewritten."""

    def message(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        """Nothing: each line is out already."""


class ProgressSink(_Watched):
    """A progress bar that stays one line; messages and results of evaluations scroll by above it.

    The bar shows the last step's loss and learning rate, and samples a second over the last twenty steps.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._bar: Any = None

    def open(self, total_steps: int | None, first_step: int) -> None:
        self.close()
        super().open(total_steps, first_step)
        without_thread = type("_Bar", (tqdm.tqdm,), {"monitor_interval": 0})  # tqdm's monitor would outlive the bar
        self._bar = without_thread(
            total=total_steps,
            initial=first_step,
            file=self.stream,
            dynamic_ncols=True,
            miniters=1,
            unit=" steps",
            bar_format=None if total_steps is None else _BAR,
        )

    def step(self, record: StepRecord) -> None:
        before = self._done
        super().step(record)
        if self._bar is not None:
            words = [f"loss {format_number(record.loss)}", f"lr {format_number(record.learning_rate)}"]
            if self._throughput.rate is not None:
                words.append(format_rate(self._throughput.rate, "samples"))
            self._bar.set_postfix_str(", ".join(words), refresh=False)
            self._bar.update(record.step - before)

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if self._bar is None or "loss" not in values:  # the means of training are in the bar already
            super().log(values, step, epoch)

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.refresh()
            bar.close()


def _worded(name: str, value: Any) -> str:
    """A value with its name or unit; nothing where the line has the same elsewhere, or can do without."""
    if name in _ONLY_KEPT or name.endswith("_steps_per_second"):
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return f"{name} {value}"
    if name in _WAITS:
        return f"{_WAITS[name]} {value:.0%}" if value >= _WORTH_SHOWING else ""
    if name == "model_flops_utilization":
        return f"{value:.0%} of peak"
    if name == "device_memory_peak_gb":
        return f"peak {value:.1f} GB"
    if name.endswith("tokens_per_second"):
        return format_rate(value, "tokens")
    if name.endswith("_runtime"):
        return f"in {value:.1f} s"
    if name.endswith("samples_per_second"):
        return format_rate(value, "samples")
    return f"{_SHORT.get(name, name)} {format_number(value)}"
