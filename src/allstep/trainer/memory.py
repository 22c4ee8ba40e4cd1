"""A rank that runs out of memory: all take smaller micro-batches, and the step is taken again with the same samples."""

import dataclasses
import gc
from typing import NamedTuple

import torch

from allstep.comm.agreement import any_rank
from allstep.data.grid import Grid, MicroBatch
from allstep.data.loader import MicroBatchLoader
from allstep.errors import CollectiveError, RankFailedError
from allstep.trainer.assembly import make_feeds
from allstep.trainer.nonfinite import BufferCopies
from allstep.trainer.run import Run
from allstep.trainer.window import reduce_gradients

__all__ = ["Reduced", "free_device_memory", "is_out_of_memory", "reduce_within_memory", "smaller"]

_HERE, _ELSE = 1, 2
_WORDS = ("out of memory", "can't allocate memory", "alloc_failed")
"""What torch's allocators and libraries say, in lower case, in errors that are no OutOfMemoryError."""


class Reduced(NamedTuple):
    """A window whose gradients are reduced."""

    counted: list[tuple[MicroBatch, float]]
    """This rank's micro-batches that counted, with their weights."""
    buffers: BufferCopies
    """The model's buffers before the step."""


def reduce_within_memory(run: Run, epoch: int, step: int) -> Reduced:
    """Collective. `reduce_gradients`; with `auto_find_batch_size`, again with smaller micro-batches while a rank lacks memory.

    What goes wrong behind the reduction is not seen here: the optimizer may have moved by then.

    Raises:
        Exception: what `reduce_gradients` raised; for want of memory only where micro-batches cannot be smaller.
    """
    finds_size = run.args.auto_find_batch_size
    while True:
        buffers = BufferCopies(run.bare_model if finds_size or run.args.nonfinite_gradients == "skip" else None)
        window = run.feeds.window(epoch, step)
        try:
            return Reduced(reduce_gradients(run, window), buffers)
        except CollectiveError:
            raise
        except Exception as error:
            if not (finds_size and _can_go_on(run, error)):
                raise
        # outside of the handler: the error's traceback holds the activations
        buffers.put_back()
        _use_smaller(run)


def free_device_memory(run: Run) -> None:
    """Give back what torch's allocator holds and nobody uses, each `torch_empty_cache_steps` steps; nothing on the CPU."""
    every = run.args.torch_empty_cache_steps
    if every is not None and run.device.type != "cpu" and run.callbacks.state.global_step % every == 0:
        torch.accelerator.memory.empty_cache()


def _can_go_on(run: Run, error: Exception) -> bool:
    """Collective. Whether a want of memory is all that went wrong, and there is a smaller size."""
    own = _HERE if is_out_of_memory(error) else 0 if isinstance(error, RankFailedError) else _ELSE
    if any_rank(run.communicator, own) != _HERE:
        return False
    if not isinstance(run.grid, Grid):
        run.say("auto_find_batch_size cannot help here: a stream does not give its samples again")
        return False
    if run.grid.micro_batch_size == 1:
        run.say("auto_find_batch_size cannot help here: micro-batches are of one sample already")
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def smaller(micro_batch: int) -> int:
    """The largest size that divides `micro_batch` and is smaller: half of it where that is whole."""
    factor = next(each for each in range(2, micro_batch + 1) if micro_batch % each == 0)
    return micro_batch // factor


def _use_smaller(run: Run) -> None:
    """Lay the same global batches out in more micro-batches, and stand before the same step again."""
    grid, state = run.grid, run.callbacks.state
    assert isinstance(grid, Grid)
    assert isinstance(run.loader, MicroBatchLoader)
    size = smaller(grid.micro_batch_size)
    factor = grid.micro_batch_size // size
    run.grid = dataclasses.replace(grid, micro_batch_size=size, micro_batches_per_step=grid.micro_batches_per_step * factor)
    run.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if run.device.type != "cpu":
        torch.accelerator.memory.empty_cache()
    samples = run.feeds.samples
    run.feeds.close()
    run.feeds = make_feeds(run.loader, run.grid, run.communicator, run.source.order, lambda text: None)
    run.feeds.samples = samples
    run.feeds.begin(run.position, run.plan.max_steps - state.global_step)
    state.train_batch_size = size
    run.say(
        f"out of memory in step {state.global_step + 1} with micro-batches of {grid.micro_batch_size} samples; from now on all "
        f"ranks run {run.grid.micro_batches_per_step // run.communicator.size} micro-batches of {size}: the global batch is "
        f"{run.grid.global_batch_size} as before, and the step is taken again"
    )
