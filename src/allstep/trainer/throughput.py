"""How fast a run goes, and where its time goes: counted on each rank, brought together at a log, where all meet anyway."""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from allstep.comm.communicator import Communicator
from allstep.comm.watchdog import HERE
from allstep.report.peaks import peak_flops
from allstep.report.record import RunReport
from allstep.trainer.state import TrainerState

__all__ = ["MEASURED", "Speedometer", "Work", "device_peak", "main_input_of", "model_flops", "run_metrics"]

MEASURED = frozenset(
    {
        "samples_per_second",
        "tokens_per_second",
        "data_share",
        "communication_share",
        "model_flops_utilization",
        "device_memory_peak_gb",
        "host_memory_peak_gb",
    }
)
"""Names in a log that differ from run to run; see `Speedometer.logs`."""

_TINY = 1e-9
"""Seconds that stand for none."""


class _Reading(NamedTuple):
    """Seconds, on clocks that only run forward."""

    now: float
    data: float
    """In the phase "data"."""
    waits: float
    """In waits for collectives."""

    @classmethod
    def take(cls) -> "_Reading":
        return cls(time.perf_counter(), HERE.spent.get("data", 0.0), HERE.waited)


class _Said(NamedTuple):
    """What a rank tells the others at a log."""

    tokens: int
    counted_tokens: int
    operations: float
    data_share: float
    waits_share: float
    host_peak: int
    """Bytes, since the process began."""
    device_peak: int
    """Bytes that torch has allocated at most; 0 on the CPU."""


@dataclass
class Work:
    """What this rank has trained on and nobody has asked for yet.

    Args:
        model: whose `main_input_name` says which input holds the tokens; "input_ids" where it has none.
        counts: "no", "all" or "non_padding": which tokens `num_input_tokens_seen` counts.
        padding: the token that pads, where inputs have no attention mask.
        flops: floating-point operations of forward and backward over some inputs.
    """

    model: nn.Module
    counts: str = "no"
    padding: int | None = None
    flops: Callable[[Any], float] | None = None
    tokens: int = 0
    """Tokens run, padding included; 0 where inputs are no tokens."""
    counted_tokens: int | torch.Tensor = 0
    """Tokens as `counts` says."""
    operations: float = 0.0
    """Floating-point operations."""

    def __post_init__(self) -> None:
        self._main = main_input_of(self.model)

    def add(self, inputs: Any) -> None:
        """Count a micro-batch in."""
        if self.flops is not None:
            self.operations += float(self.flops(inputs))
        main = inputs.get(self._main) if isinstance(inputs, Mapping) else None
        if not isinstance(main, torch.Tensor):
            return
        if not main.is_floating_point():
            self.tokens += main.numel()
        if self.counts == "non_padding":
            self.counted_tokens += self._without_padding(inputs, main)
        elif self.counts == "all":
            self.counted_tokens += main.numel()

    def take(self) -> tuple[int, int, float]:
        """tokens, counted_tokens and operations; they begin anew."""
        taken = self.tokens, int(self.counted_tokens), self.operations
        self.tokens, self.counted_tokens, self.operations = 0, 0, 0.0
        return taken

    def _without_padding(self, inputs: Mapping[str, Any], main: torch.Tensor) -> torch.Tensor | int:
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor):
            return mask.sum()
        return main.numel() if self.padding is None else (main != self.padding).sum()


class Speedometer:
    """How fast all ranks go since the last log, and what part of that time they were held up.

    Args:
        work: what this rank has done.
        communicator: of all ranks.
        device: of this rank.
        peak: floating-point operations a second that it can do; None where that is not known.
    """

    def __init__(self, work: Work, communicator: Communicator, device: torch.device, peak: float | None = None) -> None:
        self.work = work
        """What this rank counts into."""
        self._communicator, self._device, self._peak = communicator, device, peak
        self.begin()

    def begin(self) -> None:
        """A new interval begins now."""
        self._began = _Reading.take()
        self._tokens, self._operations = 0, 0.0  # of all ranks in this interval, as far as they were asked

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training time."""
        before = _Reading.take()
        try:
            yield
        finally:
            pause = [end - start for end, start in zip(_Reading.take(), before, strict=True)]
            self._began = _Reading(*(at + each for at, each in zip(self._began, pause, strict=True)))

    def gather(self, state: TrainerState) -> list[_Said]:
        """Collective. Bring the counts of `state` up to date; what every rank said."""
        seconds, data, waits = (end - start for end, start in zip(_Reading.take(), self._began, strict=True))
        on_device = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        own = _Said(*self.work.take(), data / max(seconds, _TINY), waits / max(seconds, _TINY), host, on_device)
        said = [_Said(*each) for each in self._communicator.all_gather_object(tuple(own))]
        self._tokens += sum(each.tokens for each in said)
        self._operations += sum(each.operations for each in said)
        state.num_input_tokens_seen += sum(each.counted_tokens for each in said)
        state.total_flos += sum(each.operations for each in said)
        return said

    def logs(self, samples: int, state: TrainerState) -> dict[str, float]:
        """Collective. What stands in the log of an interval in which all ranks took `samples`; the next one begins.

        Rates a second over all ranks; shares of time, and of the device's peak, as means over ranks; the largest memory peak,
        in GB (10**9 bytes). What is not known, or does not apply, is left out.
        """
        seconds = max(time.perf_counter() - self._began.now, _TINY)
        said, ranks = self.gather(state), self._communicator.size
        logs = {"samples_per_second": round(samples / seconds, 3)}
        if self._tokens:
            logs["tokens_per_second"] = round(self._tokens / seconds, 1)
        logs["data_share"] = round(sum(each.data_share for each in said) / ranks, 4)
        if ranks > 1 and self._device.type == "cpu":  # elsewhere the host goes on while the device waits
            logs["communication_share"] = round(sum(each.waits_share for each in said) / ranks, 4)
        if self._peak is not None and self._operations:
            logs["model_flops_utilization"] = round(self._operations / (seconds * ranks * self._peak), 4)
        if self._device.type == "cuda":
            logs["device_memory_peak_gb"] = round(max(each.device_peak for each in said) / 1e9, 3)
        logs["host_memory_peak_gb"] = round(max(each.host_peak for each in said) / 1e9, 3)
        self.begin()
        return logs


def main_input_of(model: nn.Module) -> str:
    """Name of the input that holds a model's tokens, or whatever it has in their place."""
    return str(getattr(model, "main_input_name", "input_ids"))


def model_flops(model: nn.Module) -> Callable[[Any], float]:
    """Inputs -> floating-point operations of forward and backward, as Hugging Face estimates them.

    The model's own `floating_point_ops` where it has one; else 6 for each number of the main input and each parameter that is
    no embedding; 0 where inputs have no main input.
    """
    own: Any = getattr(model, "floating_point_ops", None)
    if callable(own):
        return lambda inputs: float(own(inputs))
    weights, name = _weights(model), main_input_of(model)

    def estimate(inputs: Any) -> float:
        main = inputs.get(name) if isinstance(inputs, Mapping) else None
        return 6.0 * weights * main.numel() if isinstance(main, torch.Tensor) else 0.0

    return estimate


def _weights(model: nn.Module) -> int:
    count: Any = getattr(model, "num_parameters", None)
    if callable(count):
        return int(count(exclude_embeddings=True))
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    return sum(each.numel() for each in model.parameters() if id(each) not in embeddings)


def device_peak(device: torch.device, *, bf16: bool, fp16: bool) -> float | None:
    """Floating-point operations a second that a run's matrix multiplications can do on `device`; None where it is not known."""
    if device.type != "cuda":
        return None
    fp32 = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return peak_flops(torch.cuda.get_device_name(device), "bf16" if bf16 else "fp16" if fp16 else fp32)


def run_metrics(report: RunReport, state: TrainerState, tokens: int | None) -> dict[str, float]:
    """The numbers that a run has once, at its end, under Hugging Face's names; `tokens`: run since it began, where counted."""
    metrics = {
        "train_runtime": round(report.seconds, 4),
        "train_samples_per_second": round(report.samples_per_second, 3),
        "train_steps_per_second": round((report.steps - report.first_step) / max(report.seconds, _TINY), 3),
    }
    if tokens is not None:
        metrics["train_tokens_per_second"] = round(tokens / max(report.seconds, _TINY), 3)
    return metrics | {"total_flos": state.total_flos, "train_loss": report.train_loss}
