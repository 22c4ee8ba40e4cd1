"""The parts of a run that follow from arguments and data: grid, loader, collator, report."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.comm.agreement import digest, failing_together
from allstep.comm.communicator import Communicator
from allstep.data.collate import collate
from allstep.data.global_batch import accumulation_for
from allstep.data.grid import Grid
from allstep.data.loader import LoaderOptions, MicroBatchLoader, check_map_style
from allstep.data.position import DataPosition
from allstep.ddp.sync import send_buffers
from allstep.errors import ArgumentsError, DataError
from allstep.report.record import RunReport
from allstep.trainer.losses import accepted_columns
from allstep.trainer.run import Run

__all__ = ["default_collator", "make_grid", "make_loader", "make_report", "order_line", "sums_in_order"]


_OF_ONE_RANK = ("output_dir", "run_name", "report_to", "disable_tqdm", "dataloader_")
"""What the names of arguments begin with that ranks need not agree on."""


def make_grid(args: TrainingArguments, dataset: Any, communicator: Communicator, resumed_batch: int | None = None) -> Grid:
    """Collective. How `dataset` is laid out over the steps of all ranks, which have to agree on everything that decides it.

    Args:
        resumed_batch: global batch of the run that goes on, which is kept where `global_batch_size` does not say otherwise.

    Raises:
        DataError: there is nothing to train on, or nothing that `dataloader_drop_last` leaves.
        ArgumentsError: on every rank; ranks were given other arguments, or a dataset of another length.
        RankFailedError: another rank has nothing to train on.
    """
    with failing_together(communicator, "looking at what to train on"):
        grid = _grid_of(args, dataset, communicator.size, resumed_batch)
    said = {"len(train_dataset)": grid.samples, "dataloader_drop_last": grid.drop_last}
    ours = {each.name for each in dataclasses.fields(TrainingArguments)}  # a subclass may have more, for whatever it likes
    said |= {name: value for name, value in args.to_dict().items() if name in ours and not name.startswith(_OF_ONE_RANK)}
    everyone = communicator.all_gather_object(said)
    for name, value in everyone[0].items():
        for rank, others in enumerate(everyone):
            if others.get(name) != value:
                raise ArgumentsError(
                    f"The ranks do not agree: {name} is {value!r} on rank 0 and {others.get(name)!r} on rank {rank}. They "
                    f"would take different steps, and wait for each other for ever. Give every rank the same."
                )
    return grid


def _grid_of(args: TrainingArguments, dataset: Any, size: int, resumed_batch: int | None) -> Grid:
    if dataset is None:
        raise DataError("Trainer.train() needs a train_dataset; this Trainer was made without one.")
    check_map_style(dataset)
    accumulation = _accumulation(args, size, resumed_batch)
    grid = Grid(
        samples=len(dataset),
        micro_batch_size=args.per_device_train_batch_size,
        micro_batches_per_step=size * accumulation,
        drop_last=args.dataloader_drop_last,
    )
    if grid.samples < grid.global_batch_size:
        warnings.warn(
            f"The training dataset has {grid.samples} samples, fewer than one global batch of {grid.global_batch_size} "
            f"({size} ranks x {accumulation} micro-batches x {args.per_device_train_batch_size} samples): "
            f"each step is made of all {grid.samples}, and ranks without samples take part with weight zero.",
            stacklevel=5,
        )
    return grid


def _accumulation(args: TrainingArguments, size: int, resumed_batch: int | None) -> int:
    """Micro-batches of one step on each rank."""
    micro_batch, given = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if args.global_batch_size is None:
        if resumed_batch is None:
            return given
        return accumulation_for(resumed_batch, micro_batch, size, of_whom="The global batch of the run that is resumed")
    accumulation = accumulation_for(args.global_batch_size, micro_batch, size)
    if given not in (1, accumulation):
        raise ArgumentsError(
            f"global_batch_size={args.global_batch_size} needs gradient_accumulation_steps={accumulation} on {size} rank(s) "
            f"with micro-batches of {micro_batch}, but it was given as {given}. Leave gradient_accumulation_steps out."
        )
    return accumulation


def make_loader(
    args: TrainingArguments,
    dataset: Any,
    model: nn.Module,
    label_names: list[str],
    collator: Callable[[list[Any]], Any],
    device: torch.device,
) -> MicroBatchLoader:
    """What fetches micro-batches of `dataset` for `model` on `device`."""
    options = LoaderOptions(
        collator=collator,
        columns=accepted_columns(model, label_names) if args.remove_unused_columns else None,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
    return MicroBatchLoader(dataset, args.seed, options)


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Pads where `processing_class` is a tokenizer, which takes an installed transformers; else stacks."""
    if hasattr(processing_class, "pad"):
        from transformers import DataCollatorWithPadding  # optional, and slow to import

        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return padding
    return collate


def make_report(run: Run, first_step: int, seconds: float, output_dir: str) -> RunReport:
    """Collective. What `run` amounted to since `first_step`, with the digest of every rank's weights."""
    send_buffers(run.communicator, run.bare_model)
    state = run.callbacks.state
    done, before = (_samples(run.grid, step) for step in (state.global_step, first_step))
    own = digest((*run.bare_model.named_parameters(), *run.bare_model.named_buffers()))
    return RunReport(
        steps=state.global_step,
        first_step=first_step,
        epoch=state.epoch,
        samples=done - before,
        seconds=seconds,
        train_loss=state.run.mean,
        world_size=run.communicator.size,
        digests=tuple(run.communicator.all_gather_object(own)),
        output_dir=output_dir,
    )


def sums_in_order(args: TrainingArguments, communicator: Communicator, device: torch.device) -> bool:
    """What `deterministic_reduction` means here: "auto" where ranks add in order anyway, and memory is not a device's."""
    if args.deterministic_reduction == "auto":
        return device.type == "cpu" and communicator.adds_in_order
    return bool(args.deterministic_reduction)


def order_line(grid: Grid, ranks: int, gradient_bytes: int) -> str | None:
    """What a person should know of sums in order: the memory that they hold, and where other world sizes have other sums."""
    block = grid.micro_batches_per_step // ranks
    sets = max(0, (block - 1).bit_length() - 1)
    lines = []
    if sets:
        lines.append(
            f"gradients are summed in order over {block} micro-batches a rank: {sets} more set(s) of gradients are held, "
            f"{sets * gradient_bytes / 2**20:.1f} MiB; deterministic_reduction=False needs none"
        )
    if ranks > 1 and block & (block - 1):
        lines.append(
            f"each rank runs {block} micro-batches, which is no power of two: last bits differ from those of other world sizes"
        )
    return "\n".join(lines) or None


def _samples(grid: Grid, global_step: int) -> int:
    """Samples that the first `global_step` steps of a run consume."""
    position = DataPosition.after(global_step, grid.steps_per_epoch)
    return position.epoch * grid.samples_before(grid.steps_per_epoch) + grid.samples_before(position.step)
