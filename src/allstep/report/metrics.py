"""Numbers for people: samples a second, and figures with their units. Nothing here reads a clock."""

import math
from collections import deque

__all__ = ["Throughput", "format_bytes", "format_count", "format_duration", "format_number", "format_rate"]


class Throughput:
    """Items a second over the last `window` marks, so that it follows a change and forgets the slow first steps."""

    def __init__(self, window: int = 20) -> None:
        if window < 2:
            raise ValueError(f"A throughput window of {window} marks has no length; expected two or more.")
        self._marks: deque[tuple[float, float]] = deque(maxlen=window)
        self._items = 0.0

    def mark(self, now: float, items: float = 0.0) -> None:
        """At the time `now`, in seconds, `items` more have been done. The first mark begins the window.

        Raises:
            ValueError: the clock runs backwards, which would make the rate negative or absurd.
        """
        if self._marks and now < self._marks[-1][0]:
            before = self._marks[-1][0]
            raise ValueError(f"The clock runs backwards: {now} s after {before} s. Use a monotonic one, time.monotonic say.")
        self._items += items
        self._marks.append((now, self._items))

    @property
    def rate(self) -> float | None:
        """Items a second; None until time has passed between two marks."""
        if len(self._marks) < 2:
            return None
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last > first else None


def format_number(value: float) -> str:
    """Four significant digits, and powers of ten where zeros would be many: 3.214, 0.01230, 5e-05, 12340."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.3e}".split("e")
    if value != 0 and not -3 <= int(exponent) < 6:
        return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"
    text = f"{value:.{max(0, 3 - int(exponent))}f}"
    return text.rstrip("0").rstrip(".") if float(text).is_integer() and "." in text else text


def format_count(value: int) -> str:
    """A whole number with its thousands apart: 12,345."""
    return f"{value:,}"


def format_rate(value: float, unit: str) -> str:
    """So many of `unit` a second: 812 samples/s, 9.4 samples/s, 12,300 tokens/s."""
    return f"{value:,.0f} {unit}/s" if value >= 100 else f"{value:.1f} {unit}/s" if value >= 1 else f"{value:.2g} {unit}/s"


def format_bytes(value: float) -> str:
    """Bytes in powers of 1000, as disks and networks are measured: 512 B, 1.5 kB, 25.2 MB, 3.1 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_duration(seconds: float) -> str:
    """h:mm:ss, rounded down to a second: 0:01:07, 26:40:00."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
