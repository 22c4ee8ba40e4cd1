"""How much memory a stage of a run takes: what it leaves behind, and what it needed for a while."""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["MemoryStages", "host_memory", "host_memory_peak"]

_RESET_PEAK = "5"
"""What /proc/self/clear_refs takes to begin the peak anew; see proc(5)."""


def host_memory() -> int:
    """Bytes of host memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def host_memory_peak() -> int:
    """The most bytes of host memory that this process has held, since it began or since a stage of `MemoryStages` has begun."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MemoryStages:
    """Measures stages of a run on this rank: "init", "train", "eval", "test". One inside another counts to the outer one.

    Names and meanings are Hugging Face's. The host's peak is the kernel's own, so nothing samples it.

    Args:
        is_on: False measures nothing.
        device: of the model; its memory is measured where it is an accelerator.
    """

    def __init__(self, is_on: bool, device: torch.device) -> None:
        self._is_on, self._device, self._on_device = is_on, device, device.type == "cuda"
        self._init: dict[str, int] = {}  # of the first stage, until another one tells it
        self._open: str | None = None
        self._before: dict[str, int] = {}

    def begin(self, stage: str) -> None:
        """A stage begins; nothing where another one is going on."""
        if not self._is_on or self._open not in (None, stage):
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        if self._on_device:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._open, self._before = stage, self._now()

    def end(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """A stage is over: put its bytes into `metrics`; nothing where it is not the one that goes on.

        What "init" took is told by the stage after it.
        """
        if self._open != stage:
            return
        self._open, measured = None, self._measured(stage)
        if stage == "init":
            self._init = measured | {f"before_init_mem_{kind}": value for kind, value in self._before.items()}
        elif metrics is not None:
            metrics |= self._init | measured
            self._init = {}

    def _now(self) -> dict[str, int]:
        held = {"cpu": host_memory()}
        return held | {"gpu": torch.cuda.memory_allocated(self._device)} if self._on_device else held

    def _measured(self, stage: str) -> dict[str, int]:
        peaks, now = {"cpu": host_memory_peak()}, self._now()
        if self._on_device:
            peaks["gpu"] = torch.cuda.max_memory_allocated(self._device)
        measured = {}
        for kind, value in now.items():
            measured[f"{stage}_mem_{kind}_alloc_delta"] = value - self._before[kind]
            measured[f"{stage}_mem_{kind}_peaked_delta"] = max(0, peaks[kind] - value)
        return measured
