"""Ranks that time all_reduce: gloo against the backend under test, in turns, and every sum checked.

Each call comes by itself after other work, as in training: the tensor is filled anew, the ranks meet, one call is timed.
The sides named `... in a row` time call after call, which suits gloo better: its threads stay awake.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from allstep.cli.bench.blocks import Estimate, estimate, medians
from allstep.cli.bench.programs.joining import group_of, joined, leave_result, settings
from allstep.cli.bench.programs.referee import Referee, note
from allstep.cli.bench.turns import Turns

__all__ = ["main"]

BLOCK_SECONDS = 0.15
"""What a block should take, its refills included: below, the kernel's clock ticks hide what others did."""
MOST_CALLS = 2000
"""Calls of one block."""
FACTORS = (1.0, 2.0, 0.5)
"""Of the input, in turn: what the call before left is never right by chance. Powers of two, so that nothing is rounded."""
IN_A_ROW = " in a row"


class Case:
    """One size and dtype: the tensors of all sides, and what their sums must be.

    The inputs are random whole numbers from -8 to 7, whose sums are exact in every dtype, up to 32 ranks.
    """

    def __init__(self, referee: Referee, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> None:
        total = torch.zeros(numel, dtype=torch.int16)
        for rank in range(referee.size):
            source = torch.Generator().manual_seed(rank)
            part = torch.randint(-8, 8, (numel,), generator=source, dtype=torch.int8)
            total += part
            if rank == referee.rank:
                self.input = part.to(dtype)
        self.sum = total.to(dtype)
        self.group = group
        private = torch.empty(numel, dtype=dtype)
        self.sides: dict[str, tuple[dist.ProcessGroup | None, torch.Tensor]] = {
            "gloo": (None, private),
            "any": (group, private),
        }
        if callable(allocate := getattr(group, "allocate_tensor", None)):
            self.sides["own"] = (group, allocate(numel, dtype=dtype, device=torch.device("cpu")))
        self.private = torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
        self.wrong: dict[str, str] = {}
        """Side -> its first wrong sum."""
        self._calls = 0

    def runs(self) -> dict[str, Callable[[int], float]]:
        """Side -> what runs a number of its calls and gives the seconds of one."""
        singles = {side: partial(self.apart, side) for side in self.sides}
        rows = {side + IN_A_ROW: partial(self.in_a_row, side) for side in self.sides}
        return {**singles, **rows, "floor": self.floor}

    def apart(self, side: str, calls: int) -> float:
        """Seconds of one call, each on new data and after a barrier; every sum is checked."""
        group, tensor = self.sides[side]
        seconds = 0.0
        for _ in range(calls):
            factor = FACTORS[self._calls % len(FACTORS)]
            self._calls += 1
            torch.mul(self.input, factor, out=tensor)
            dist.barrier(group=self.group)  # gloo's own lets the ranks go up to 0.1 ms apart
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds += time.perf_counter() - began
            if side not in self.wrong and not torch.equal(tensor.mul_(1 / factor), self.sum):
                self.wrong[side] = self._first_wrong(tensor)
        return seconds / calls

    def in_a_row(self, side: str, calls: int) -> float:
        """Seconds of one call, where nothing lies between calls."""
        group, tensor = self.sides[side]
        tensor.zero_()
        dist.barrier(group=self.group)
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)
        return (time.perf_counter() - began) / calls

    def floor(self, calls: int) -> float:
        """Seconds of half an add and half a copy of private memory: what each of two ranks has to do at the least."""
        one, other = self.private
        half = one.numel() // 2
        seconds = 0.0
        for _ in range(calls):
            dist.barrier(group=self.group)
            began = time.perf_counter()
            one[:half].add_(other[:half])
            other[:half].copy_(one[:half])
            seconds += time.perf_counter() - began
        return seconds / calls

    def _first_wrong(self, tensor: torch.Tensor) -> str:
        different = tensor != self.sum
        at = int(different.to(torch.uint8).argmax())
        return (
            f"{int(different.sum())} of {tensor.numel()} elements are wrong; the first, element {at}, is {float(tensor[at]):g} "
            f"where {float(self.sum[at]):g} is the sum"
        )


def measure(referee: Referee, group: dist.ProcessGroup, nbytes: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    dtype = getattr(torch, name)
    case = Case(referee, group, max(1, nbytes // dtype.itemsize), dtype)
    runs = case.runs()
    calls = {side: _calls_of_a_block(referee, run) for side, run in runs.items()}
    turns = Turns(list(runs), seconds=options["seconds"], least=options["blocks"])
    referee.begin()
    while (side := turns.next(referee.elapsed)) is not None:
        turns.add(side, referee.block(partial(runs[side], calls[side])))
    samples = turns.samples
    middle = medians(samples)
    row: dict[str, Any] = {
        "ranks": referee.size,
        "bytes": nbytes,
        "dtype": name,
        "ms": {side: 1e3 * middle[side] for side in runs},
        "speedup": {},
        "speedup_in_a_row": {},
        "over_floor": {},
        "blocks": turns.spoilt,
        "wrong": [
            f"{_said(side, nbytes, name, referee.size)}: on rank {rank}, {text}"
            for rank, wrong in enumerate(referee.everyone(case.wrong))
            for side, text in wrong.items()
        ],
    }
    for side in case.sides.keys() - {"gloo"}:
        row["speedup"][side] = _ratio(samples, "gloo", side)
        row["speedup_in_a_row"][side] = _ratio(samples, "gloo" + IN_A_ROW, side + IN_A_ROW)
        row["over_floor"][side] = _ratio(samples, side, "floor")
    return row


def _calls_of_a_block(referee: Referee, run: Callable[[int], float]) -> int:
    run(1)  # the first call connects the ranks, and touches memory for the first time
    count = 1
    while True:
        began = time.perf_counter()
        run(count)
        took = referee.slowest(time.perf_counter() - began)
        if took >= BLOCK_SECONDS / 10 or count >= MOST_CALLS:
            return max(1, min(MOST_CALLS, round(count * BLOCK_SECONDS / took)))
        count = min(MOST_CALLS, count * 8)


def _ratio(samples: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    found = estimate({side: samples[side] for side in (above, below)}, lambda median: median[above] / median[below])
    assert isinstance(found, Estimate)
    return asdict(found)


def _said(side: str, nbytes: int, dtype: str, ranks: int) -> str:
    kind = {"gloo": "gloo", "any": "any tensor", "own": "a tensor of the group"}[side]
    return f"all_reduce of {nbytes} bytes of {dtype} on {ranks} ranks ({kind})"


def main() -> None:
    """Run on every rank."""
    options = settings()
    with joined():
        group = group_of(options["backend"])
        referee = Referee(patience=options["seconds"] * len(options["sizes"]))
        rows = []
        for dtype in options["dtypes"]:
            for nbytes in options["sizes"]:
                rows.append(measure(referee, group, nbytes, dtype, options))
                said = "  ".join(f"{side} {ms:.3f}" for side, ms in rows[-1]["ms"].items() if IN_A_ROW not in side)
                note(f"{referee.size} ranks, {nbytes} bytes of {dtype}, ms: {said}")
        leave_result({"rows": rows, "torch": torch.__version__})


if __name__ == "__main__":
    main()
