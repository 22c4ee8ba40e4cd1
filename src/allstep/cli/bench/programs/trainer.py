"""Ranks that train a tiny MLP and tell how long their steps took: under allstep's Trainer, Hugging Face's, or in a bare loop.

One process is one side, so that each has the process group, the backend and the settings that its users get.
"""

import importlib
import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from allstep.cli.bench.programs.joining import leave_result, output_to_file, settings

__all__ = ["main"]

LEARNING_RATE = 1e-2
FEATURES, CLASSES = 16, 4


class Net(nn.Module):
    """A model that costs next to nothing: what is left is the trainer's own work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs (batch, features) and classes (batch) to loss and logits."""
        logits = self.layers(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Clock:
    """A callback for either Trainer: the time at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Points of which the largest of the first features is the class."""
    source = torch.Generator().manual_seed(1)
    points = torch.randn(count, FEATURES, generator=source)
    return [{"x": point, "labels": label} for point, label in zip(points, points[:, :CLASSES].argmax(1), strict=True)]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples to a batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def train_bare(model: Net, data: list[dict[str, torch.Tensor]], steps: int, batch: int, clock: Clock) -> None:
    """The loop that one would write by hand, with torch's DDP where there are several ranks."""
    dataset: Any = data  # a list has what a dataset needs
    wrapped, sampler = (model, None) if int(os.environ.get("WORLD_SIZE", "1")) == 1 else _distributed(model, dataset)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch, shuffle=sampler is None, sampler=sampler, collate_fn=collate, drop_last=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    while True:
        for inputs in loader:
            wrapped(**inputs)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end(None, None, None)
            if len(clock.ends) == steps:
                return


def _distributed(model: Net, data: Any) -> tuple[nn.Module, Any]:
    import atexit

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    return DistributedDataParallel(model), DistributedSampler(data)


def train_under(library: str, model: Net, data: Any, steps: int, batch: int, folder: str, clock: Clock) -> None:
    """The same under a Trainer: no logging, no saving, everything else as it comes."""
    more: dict[str, Any] = {}
    if library != "allstep":
        more = {"report_to": "none", "dataloader_pin_memory": False}
        if "RANK" in os.environ:
            more.update(ddp_backend="gloo", ddp_find_unused_parameters=False)  # its default walks the graph every step
    names = importlib.import_module(library)
    callback = type("BenchClock", (Clock, names.TrainerCallback), {})()
    callback.ends = clock.ends
    arguments = names.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    names.Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[callback]).train()


def _loss(model: Net, everything: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(model(**everything)["loss"])


def main() -> None:
    """Run on every rank."""
    options = settings()
    output_to_file()
    torch.set_num_threads(1)
    if os.environ.get("WORLD_SIZE") == "1":  # one rank is plain Python for every side: some wrap the model otherwise
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLSTEP_RUN_ID"):
            os.environ.pop(name, None)
    side, steps, warm = options["side"], options["steps"], options["warm"]
    model, data, clock = Net(), samples(options["samples"]), Clock()
    everything = collate(data)
    before = _loss(model, everything)
    if side == "bare":
        train_bare(model, data, steps, options["batch"], clock)
    else:
        train_under(side, model, data, steps, options["batch"], options["folder"], clock)
    assert len(clock.ends) == steps, f"{side}: {len(clock.ends)} steps were seen, {steps} were asked for"
    leave_result(
        {
            "seconds": (clock.ends[-1] - clock.ends[warm - 1]) / (steps - warm),
            "loss_before": before,
            "loss": _loss(model, everything),
            "weights": torch.cat([one.detach().flatten() for one in model.parameters()]).double().sum().item(),
            "torch": torch.__version__,
        }
    )


if __name__ == "__main__":
    main()
