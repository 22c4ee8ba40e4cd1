"""Sums of floats that do not depend on the order of what is summed."""

import math

__all__ = ["ExactSum"]

MOST_PARTS = 64
"""Numbers that are kept before they are summed up."""


class ExactSum:
    """A sum of floats without rounding, in a few numbers; put together from several, in any order, it has the same bits."""

    def __init__(self) -> None:
        self.parts: list[float] = []
        """Numbers whose sum it is; they can be added to another."""

    def add(self, value: float) -> None:
        """Add a number."""
        self.parts.append(value)
        if len(self.parts) > MOST_PARTS:
            self.parts = _fewer(self.parts)

    def total(self) -> float:
        """The sum, rounded once; infinite or NaN where a part is, or where infinities of both signs met."""
        return math.fsum(self.parts) if all(map(math.isfinite, self.parts)) else sum(self.parts)


def _fewer(values: list[float]) -> list[float]:
    """Fewer numbers with exactly the same sum: Shewchuk's expansion, in which no two numbers have bits in common.

    J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997.
    """
    if not all(map(math.isfinite, values)):
        return [sum(values)]
    parts: list[float] = []
    for value in values:
        rest = []
        for part in parts:
            larger, smaller = (value, part) if abs(value) >= abs(part) else (part, value)
            value = larger + smaller
            lost = smaller - (value - larger)
            if lost:
                rest.append(lost)
        parts = [*rest, value]
    return parts
