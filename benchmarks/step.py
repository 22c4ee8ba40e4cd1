"""A training step under allstep's DistributedDataParallel against torch's at its best setting, on this machine.

    python benchmarks/step.py [--ranks 2] [--rounds 15]

Both wrappers train the same model in the same processes, in turns; a block counts with the time of its slowest rank, and
what is told is the median over blocks of the ratio. torch's best setting is looked for first, among bucket sizes and views.
After the timed steps the weights of both are compared. Read the ratios: milliseconds depend on the machine and its neighbours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from allstep import DistributedDataParallel
from allstep.testing.ranks import RankPool

RESULTS = Path(__file__).parent / "results" / "step.json"
PEER_SETTINGS = [{"bucket_cap_mb": cap, "gradient_as_bucket_view": views} for cap in (1, 5, 25) for views in (False, True)]


def wide_mlp() -> tuple[nn.Module, torch.Tensor]:
    """8 M parameters in 8 large layers."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU()))), torch.randn(32, 1024)


def small_tensors() -> tuple[nn.Module, torch.Tensor]:
    """400 tensors, 0.8 M parameters: the cost of bookkeeping."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))), torch.randn(8, 64)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    """A transformer of 10.6 M parameters."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 64, 384)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "wide MLP": wide_mlp,
    "400 small tensors": small_tensors,
    "encoder": encoder,
}


class Side:
    """One wrapper with its own copy of the model."""

    def __init__(self, name: str, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        model, _ = MODELS[name]()
        torch.manual_seed(1 + rank)
        self.batch = MODELS[name]()[1]
        self.model = wrap(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def steps(self, count: int) -> float:
        """Seconds that the slowest rank took for `count` steps."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)


def best_peer_setting(name: str, rank: int) -> dict[str, object]:
    """The fastest of torch's settings; times are those of the slowest rank, so all ranks choose alike."""
    sides = [Side(name, rank, lambda m, s=setting: nn.parallel.DistributedDataParallel(m, **s)) for setting in PEER_SETTINGS]
    for side in sides:
        side.steps(2)
    times = [statistics.median(side.steps(3) for _ in range(3)) for side in sides]
    return PEER_SETTINGS[times.index(min(times))]


def compare(rank: int, size: int, name: str, rounds: int) -> dict[str, object]:
    """Runs on every rank."""
    best = best_peer_setting(name, rank)
    ours = Side(name, rank, DistributedDataParallel)
    theirs = Side(name, rank, lambda m: nn.parallel.DistributedDataParallel(m, **best))
    count = max(1, round(0.15 / max(theirs.steps(2) / 2, 1e-4)))
    ours.steps(2)
    pairs = [(ours.steps(count), theirs.steps(count)) for _ in range(rounds)]
    ratios = sorted(mine / other for mine, other in pairs)
    equal = all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    return {
        "model": name,
        "ranks": size,
        "torch_best": best,
        "ours_ms": 1e3 * statistics.median(mine for mine, _ in pairs) / count,
        "torch_ms": 1e3 * statistics.median(other for _, other in pairs) / count,
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "weights_equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each side")
    options = parser.parse_args()
    rows = []
    print(f"{'model':<18} {'ours ms':>8} {'torch ms':>8} {'ratio':>6}  quartiles    weights  torch's best setting")
    with RankPool(options.ranks) as pool:
        for name in MODELS:
            row = pool.run(compare, name, options.rounds, timeout=600)[0]
            low, high = row["quartiles"]
            same = "equal" if row["weights_equal"] else "DIFFER"
            print(
                f"{name:<18} {row['ours_ms']:8.1f} {row['torch_ms']:8.1f} {row['ratio']:6.2f}  {low:.2f} - {high:.2f}  "
                f"{same:<8} {row['torch_best']}"
            )
            rows.append(row)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    print(f"\nBelow 1, ours is faster. Written to {RESULTS}")


if __name__ == "__main__":
    main()
