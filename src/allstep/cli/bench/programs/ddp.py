"""Ranks that time whole training steps, in turns: ours, torch's DistributedDataParallel at its best setting on gloo, and no
synchronisation at all. Afterwards the weights of ours and of torch's must be equal."""

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from allstep.cli.bench.blocks import estimate, medians
from allstep.cli.bench.programs.joining import group_of, joined, leave_result, settings
from allstep.cli.bench.programs.models import MODELS, Batch, batches, loss_of, optimizer_of
from allstep.cli.bench.programs.referee import Referee, note
from allstep.cli.bench.turns import Turns
from allstep.comm.agreement import digest
from allstep.ddp.module import DistributedDataParallel

__all__ = ["main"]

BLOCK_SECONDS = 0.2
"""What a block should take."""
TOLERANCE = 1e-6
"""Largest difference of gradients, over the largest gradient, where ranks sum in different orders."""
WORTH_DIVIDING = 0.01
"""Share of the step that torch's synchronisation must cost before ours is told as a part of it."""
TORCH_SETTINGS: dict[str, dict[str, Any]] = {
    # 25 MB is torch's default, and only as a default does it come with a small first bucket
    f"torch {'views' if views else 'copies'} {cap} MB": {
        "gradient_as_bucket_view": views,
        **({"bucket_cap_mb": cap} if cap != 25 else {}),
    }
    for views in (False, True)
    for cap in (1, 5, 25)
}


class Side:
    """One way to train: its own copy of the model, its optimizer, and how many steps it has taken."""

    def __init__(self, model: str, optimizer: str, accumulation: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.module = MODELS[model].build()
        self.wrapped = wrap(self.module)
        self.optimizer = optimizer_of(optimizer, self.module)
        self.accumulation = accumulation
        self.taken = 0

    def gradients(self, data: list[Batch]) -> None:
        """Those of the step that comes next."""
        self.optimizer.zero_grad()
        for micro in range(self.accumulation):
            inputs, target = data[(self.taken * self.accumulation + micro) % len(data)]
            last = micro == self.accumulation - 1
            no_sync = getattr(self.wrapped, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if last else no_sync():
                (loss_of(self.wrapped(inputs), target) / self.accumulation).backward()

    def step(self, data: list[Batch]) -> None:
        """One optimizer step."""
        self.gradients(data)
        self.optimizer.step()
        self.taken += 1

    def steps(self, data: list[Batch], count: int) -> float:
        """Seconds of one step, after one that is not timed: the caches still hold the side before."""
        self.step(data)
        began = time.perf_counter()
        for _ in range(count):
            self.step(data)
        return (time.perf_counter() - began) / count


def measure(referee: Referee, group: dist.ProcessGroup, case: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    model, optimizer, accumulation = case["model"], case["optimizer"], case["accumulation"]
    data = list(batches(model, referee.rank))
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "no sync": lambda module: module,
        "ours": lambda module: DistributedDataParallel(module, process_group=group),
        "ours on gloo": DistributedDataParallel,
        **{name: partial(TorchDDP, **setting) for name, setting in TORCH_SETTINGS.items()},
    }
    sides = {name: Side(model, optimizer, accumulation, wrap) for name, wrap in wraps.items()}
    for side in sides.values():
        side.steps(data, 2)  # both engines lay out their buckets anew after the first step
    count = max(1, round(BLOCK_SECONDS / referee.slowest(sides["ours"].steps(data, 3))))
    own = [name for name in sides if name not in TORCH_SETTINGS]
    turns = Turns(own, racing=list(TORCH_SETTINGS), seconds=case["seconds"], least=case["blocks"])
    referee.begin()
    while (turn := turns.next(referee.elapsed)) is not None:
        turns.add(turn, referee.block(partial(sides[turn].steps, data, count)))
    samples = turns.samples
    rivals = {"best": sides[turns.best], **{name: sides[name] for name in ("ours", "ours on gloo")}}
    return {
        "ranks": referee.size,
        "model": model,
        "optimizer": optimizer,
        "accumulation": accumulation,
        "best_torch": turns.best,
        "ms": {side: 1e3 * seconds for side, seconds in medians(samples).items()},
        "blocks": turns.spoilt,
        **_ratios({**samples, "best": samples[turns.best]}),
        **_compared(referee, rivals, data, f"{model} with {optimizer} on {referee.size} ranks"),
    }


def _ratios(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Of medians, each with its interval."""

    def over(above: str, below: str) -> Any:
        found = estimate({one: samples[one] for one in (above, below)}, lambda median: median[above] / median[below])
        return None if found is None else asdict(found)

    def sync_cost(ours: str) -> Any:
        def share(median: Any) -> float | None:
            theirs = median["best"] - median["no sync"]
            return (median[ours] - median["no sync"]) / theirs if theirs > WORTH_DIVIDING * median["no sync"] else None

        found = estimate({one: samples[one] for one in (ours, "best", "no sync")}, share)
        return None if found is None else asdict(found)

    return {
        "over_best": over("ours", "best"),
        "gloo_over_best": over("ours on gloo", "best"),
        "over_no_sync": over("ours", "no sync"),
        "best_over_no_sync": over("best", "no sync"),
        "sync_cost": sync_cost("ours"),
        "gloo_sync_cost": sync_cost("ours on gloo"),
    }


def _compared(referee: Referee, sides: dict[str, Side], data: list[Batch], where: str) -> dict[str, Any]:
    """Whether all took the same steps: equal bits on two ranks; with more, whose sums differ in order, equal gradients."""
    last = max(side.taken for side in sides.values())
    for side in sides.values():
        while side.taken < last:
            side.step(data)
    wrong, said = [], "equal bits"
    for name in sides:
        copies = referee.everyone(digest(sides[name].module.named_parameters()))
        if other := next((rank for rank, copy in enumerate(copies) if copy != copies[0]), None):
            wrong.append(f"{where}: after {last} steps the replicas of {_SAID[name]} differ between ranks 0 and {other}")
    theirs = sides.pop("best")
    for name, ours in sides.items():
        pairs = list(zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True))
        different = [key for (key, mine), other in pairs if not torch.equal(mine, other)]
        if not different:
            continue
        if referee.size == 2:
            wrong.append(
                f"{where}: after {last} steps {len(different)} of {len(pairs)} parameters of {_SAID[name]} differ from "
                f"torch's; the first is {different[0]!r}"
            )
        else:
            error, key = _gradient_error(ours, theirs, data)
            said = f"gradients within {max(error, 1e-12):.0e}"
            if not error <= TOLERANCE:
                wrong.append(
                    f"{where}: on equal weights, the gradient of {key!r} under {_SAID[name]} differs from torch's by "
                    f"{error:.1e} of the largest gradient; at most {TOLERANCE:.0e} was expected"
                )
    each = referee.everyone(wrong)
    found: list[str] = next((one for one in each if one), [])
    return {"parameters": "DIFFERENT" if found else said, "wrong": found}


_SAID = {"best": "torch's DDP", "ours": "allstep's DDP", "ours on gloo": "allstep's DDP on gloo"}


def _gradient_error(ours: Side, theirs: Side, data: list[Batch]) -> tuple[float, str]:
    """The largest difference over the largest gradient, and the parameter where it is. Adam makes whole steps of rounding
    wherever a gradient is zero but for that, so weights cannot be compared."""
    with torch.no_grad():
        for to, source in zip(ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True):
            to.copy_(source)
    ours.gradients(data)
    theirs.gradients(data)
    errors, largest = {}, 0.0
    for (name, mine), other in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        errors[name] = float((mine.grad - other.grad).abs().max())
        largest = max(largest, float(other.grad.abs().max()))
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst] / largest, worst


def _progress(row: dict[str, Any]) -> str:
    ms, best = row["ms"], row["best_torch"]
    return (
        f"{row['ranks']} ranks, {row['model']} {row['optimizer']} x{row['accumulation']}, ms: no sync {ms['no sync']:.2f}  "
        f"ours {ms['ours']:.2f}  {best} {ms[best]:.2f}  ({row['parameters']})"
    )


def main() -> None:
    """Run on every rank."""
    options = settings()
    with joined():
        referee = Referee(patience=sum(case["seconds"] for case in options["cases"]))
        rows = []
        for case in options["cases"]:
            group = group_of(options["backend"])
            rows.append(measure(referee, group, case))
            note(_progress(rows[-1]))
            gc.collect()
            dist.destroy_process_group(group)
        leave_result({"rows": rows, "torch": torch.__version__})


if __name__ == "__main__":
    main()
