"""The parts of a run that follow from arguments and data: grid, loader, collator, report."""

import dataclasses
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from allstep.arguments import TrainingArguments
from allstep.comm.agreement import digest, failing_together
from allstep.comm.communicator import Communicator
from allstep.data.collate import collate
from allstep.data.dataloaders import Source
from allstep.data.feeds import MapFeeds, TrainingFeeds
from allstep.data.global_batch import accumulation_for
from allstep.data.grid import Grid
from allstep.data.loader import MicroBatchLoader
from allstep.data.order import Order, SampledOrder
from allstep.data.stream_feeds import StreamFeeds
from allstep.data.stream_loader import StreamLoader
from allstep.data.streams import StreamGrid, choose_split, length_of, shards_of, steps_of
from allstep.ddp.sync import send_buffers
from allstep.errors import ArgumentsError
from allstep.report.record import RunReport
from allstep.trainer.models.precision import precision_of
from allstep.trainer.run import Run

__all__ = ["default_collator", "make_feeds", "make_grid", "make_report", "order_line", "sums_in_order"]


_OF_ONE_RANK = ("output_dir", "local_rank", "run_name", "report_to", "disable_tqdm", "dataloader_")
"""What the names of arguments begin with that ranks need not agree on."""

_PADDING = frozenset({"PreTrainedTokenizerBase", "SequenceFeatureExtractor"})
"""Classes whose `pad` makes a batch. Some processors of images have a method of that name, which does something else."""


def make_grid(
    args: TrainingArguments, find_source: Callable[[], Source], communicator: Communicator, resumed_batch: int | None = None
) -> tuple[Source, Grid | StreamGrid]:
    """Collective. The training data, and how it is laid out over the steps of all ranks, which have to agree on all of it.

    Args:
        args: how to train.
        find_source: gives the training data.
        communicator: the ranks.
        resumed_batch: global batch of the run that goes on, which is kept where `global_batch_size` does not say otherwise.

    Raises:
        DataError: there is nothing to train on, or nothing that `dataloader_drop_last` leaves.
        ArgumentsError: on every rank; ranks were given other arguments, or a dataset of another length.
        RankFailedError: another rank has nothing to train on.
    """
    with failing_together(communicator, "looking at what to train on"):
        source = find_source()
        grid: Grid | StreamGrid = (_stream_grid_of if source.order is None else _grid_of)(
            args, source, communicator.size, resumed_batch
        )
        said: dict[str, Any] = {"len(train_dataset)": grid.samples, "dataloader_drop_last": grid.drop_last}
        said["dataloader_split_streams"] = args.dataloader_split_streams
        if source.order is None:
            said["shards of train_dataset"] = shards_of(source.dataset)
        if isinstance(source.order, SampledOrder):
            given = source.order.take(0, 0, len(source.order))
            said["what the sampler gives"] = hashlib.sha256(repr(given).encode()).hexdigest()
    ours = {each.name for each in dataclasses.fields(TrainingArguments)}  # a subclass may have more, for whatever it likes
    said |= {name: value for name, value in args.to_dict().items() if name in ours and not name.startswith(_OF_ONE_RANK)}
    said["precision"] = precision_of(args)
    everyone = communicator.all_gather_object(said)
    for name, value in everyone[0].items():
        for rank, others in enumerate(everyone):
            if others.get(name) != value:
                raise ArgumentsError(
                    f"The ranks do not agree: {name} is {value!r} on rank 0 and {others.get(name)!r} on rank {rank}. They "
                    f"would take different steps, and wait for each other for ever. Give every rank the same."
                )
    return source, _with_steps(grid, source.dataset, communicator) if isinstance(grid, StreamGrid) else grid


def _stream_grid_of(args: TrainingArguments, source: Source, size: int, resumed_batch: int | None) -> StreamGrid:
    return StreamGrid(
        split=choose_split(args.dataloader_split_streams, shards_of(source.dataset), size),
        samples=source.samples,
        micro_batch_size=source.batch_size,
        micro_batches_per_step=size * _accumulation(args, source.batch_size, size, resumed_batch),
        drop_last=source.drop_last,
    )


def _with_steps(grid: StreamGrid, dataset: Any, communicator: Communicator) -> StreamGrid:
    """Collective. `grid` with the steps of an epoch, where the lengths of what the ranks read tell them."""
    rank, size = communicator.rank, communicator.size
    lengths = [grid.samples]
    if grid.split.by_shards:
        lengths = communicator.all_gather_object(length_of(dataset.shard(num_shards=size, index=rank)))
    steps = steps_of(lengths, grid.places(rank, size).step_size, grid.drop_last)
    return dataclasses.replace(grid, steps_per_epoch=steps)


def _grid_of(args: TrainingArguments, source: Source, size: int, resumed_batch: int | None) -> Grid:
    accumulation = _accumulation(args, source.batch_size, size, resumed_batch)
    grid = Grid(
        samples=source.samples or 0,
        micro_batch_size=source.batch_size,
        micro_batches_per_step=size * accumulation,
        drop_last=source.drop_last,
    )
    if grid.samples < grid.global_batch_size:
        warnings.warn(
            f"The training dataset has {grid.samples} samples, fewer than one global batch of {grid.global_batch_size} "
            f"({size} ranks x {accumulation} micro-batches x {source.batch_size} samples): "
            f"each step is made of all {grid.samples}, and ranks without samples take part with weight zero.",
            stacklevel=5,
        )
    return grid


def _accumulation(args: TrainingArguments, micro_batch: int, size: int, resumed_batch: int | None) -> int:
    """Micro-batches of one step on each rank."""
    given = args.gradient_accumulation_steps
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


def make_feeds(
    loader: MicroBatchLoader | StreamLoader,
    grid: Grid | StreamGrid,
    communicator: Communicator,
    order: Order | None,
    say: Callable[[str], None],
) -> TrainingFeeds:
    """This rank's micro-batches for training; `order` is that of map-style data."""
    if isinstance(loader, MicroBatchLoader):
        assert isinstance(grid, Grid)
        assert order is not None
        return MapFeeds(loader, grid, communicator.rank, communicator.size, order)
    assert isinstance(grid, StreamGrid)
    return StreamFeeds(loader.training(grid, communicator), grid, communicator, say)


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Pads where `processing_class` is a tokenizer, or takes features of sounds, as transformers' are; else stacks."""
    if not _PADDING.isdisjoint(kind.__name__ for kind in type(processing_class).__mro__):
        from transformers import DataCollatorWithPadding  # optional, and slow to import

        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return padding
    return collate


def make_report(run: Run, first_step: int, seconds: float, output_dir: str) -> RunReport:
    """Collective. What `run` amounted to since `first_step`, with the digest of every rank's weights."""
    send_buffers(run.communicator, run.bare_model)
    state = run.callbacks.state
    own = digest((*run.bare_model.named_parameters(), *run.bare_model.named_buffers()))
    return RunReport(
        steps=state.global_step,
        first_step=first_step,
        epoch=state.epoch,
        samples=sum(run.communicator.all_gather_object(run.feeds.samples)),
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


def order_line(grid: Grid | StreamGrid, ranks: int, gradient_bytes: int) -> str | None:
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
