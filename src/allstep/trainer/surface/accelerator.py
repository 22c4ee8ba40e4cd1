"""`Trainer.accelerator`: what scripts reach for under that name, in the words of Hugging Face's accelerate.

It is a face of the job that the Trainer has joined, and needs no accelerate.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from allstep.checkpoint.names import unwrapped
from allstep.comm.communicator import Communicator
from allstep.comm.process_group import World
from allstep.data.dataloaders import RankDataLoader
from allstep.trainer.models.prepare import bare

__all__ = ["Accelerator"]


class Accelerator:
    """This process among the others of its job.

    Args:
        world: the job.
        communicator: its ranks.
        seed: of loaders that say no order.
        autocast: makes the context that a forward runs in.
        mixed_precision: what that is.
    """

    gradient_accumulation_steps = 1
    """What `backward` divides by: nothing. Micro-batches are weighted, and their sum is divided once, after the reduction."""
    sync_gradients = True

    def __init__(
        self,
        world: World,
        communicator: Communicator,
        seed: int,
        autocast: Callable[[], AbstractContextManager[object]],
        mixed_precision: str = "no",
    ) -> None:
        self._world, self._communicator, self._seed, self._autocast = world, communicator, seed, autocast
        self.mixed_precision = mixed_precision
        """"no", "bf16" or "fp16"."""
        self.scaler: Any = None
        """The loss scale of an fp16 run; None for others."""
        self.has_skipped: Callable[[], bool] = lambda: False
        """What `optimizer_step_was_skipped` asks."""
        self._loaders: list[RankDataLoader] = []
        self.take_backward: Callable[[torch.Tensor], None] | None = None
        """What becomes of a loss in `backward`, while the Trainer runs a micro-batch."""

    # ---- who this is

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self._world.device)

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """This rank, among those of its host."""
        return self._world.local_rank

    @property
    def num_processes(self) -> int:
        """How many ranks there are."""
        return self._communicator.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return self._world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._world.rank == self._communicator.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self._communicator.size > 1

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was left out, as its gradients were not finite."""
        return self.has_skipped()

    # ---- made ready

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The same objects: DataLoaders give each rank its part, models go to the device, anything else is as it was.

        The Trainer wraps the model that it trains by itself. One object comes back alone, several as a tuple.
        """
        ready = tuple(self._prepared(each) for each in objects)
        return ready[0] if len(ready) == 1 else ready

    def prepare_data_loader(self, data_loader: "DataLoader[Any]", **_: Any) -> RankDataLoader:
        """A DataLoader that gives each rank its part."""
        world, ranks = self._world, self._communicator.size
        loader = RankDataLoader.of(data_loader, rank=world.rank, ranks=ranks, device=self.device, seed=self._seed)
        self._loaders.append(loader)
        return loader

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """The model on the device."""
        return model.to(self.device)

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, DataLoader):
            return self.prepare_data_loader(each)
        return self.prepare_model(each) if isinstance(each, nn.Module) else each

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> nn.Module:
        """The model inside data-parallel wrappers and, unless it is to be kept, torch.compile."""
        return bare(model) if keep_torch_compile else unwrapped(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The weights of the model, every rank holds all of them."""
        return (unwrapped(model) if unwrap else model).state_dict()

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, of a mean loss; inside `Trainer.training_step` weighted by what the mean is taken over."""
        if self.take_backward is None:
            loss.backward(**kwargs)
        else:
            self.take_backward(loss)

    def autocast(self, *_: Any, **__: Any) -> AbstractContextManager[object]:
        """The precision that the arguments ask for."""
        return self._autocast()

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Nothing: the Trainer accumulates."""
        yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """`model.no_sync()`, where it is wrapped."""
        no_sync: Any = getattr(model, "no_sync", None)
        if callable(no_sync):
            with no_sync():
                yield
        else:
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients down to a common norm; the norm before. The Trainer does so by itself, for `max_grad_norm`."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- together

    def wait_for_everyone(self) -> None:
        """Collective. Go on when all ranks have come here."""
        self._communicator.barrier()

    def gather(self, tensor: Any) -> Any:
        """Collective. Tensors of all ranks, one after the other along the first dimension, in whatever holds them.

        A 0-dim tensor counts as one row. Ranks may have different numbers of rows; other dimensions have to agree.
        """
        return _gathered(tensor, self._communicator)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Collective. As `gather`, without what a loader of `prepare` repeated to fill up its last round.

        What is no tensor comes as one list of all ranks.
        """
        if use_gather_object or not _holds_tensors(input_data):
            return self._cut([item for of_rank in self._communicator.all_gather_object(input_data) for item in of_rank])
        return self._cut(self.gather(input_data))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Collective. Tensors as long in `dim` as the longest of all ranks, filled up with `pad_index`."""
        if isinstance(tensor, (list, tuple)):
            return _alike(tensor, [self.pad_across_processes(each, dim, pad_index, pad_first) for each in tensor])
        if isinstance(tensor, Mapping):
            return {key: self.pad_across_processes(each, dim, pad_index, pad_first) for key, each in tensor.items()}
        if not isinstance(tensor, torch.Tensor) or dim >= tensor.dim():
            return tensor
        longest = max(self._communicator.all_gather_object(tensor.shape[dim]))
        shape = list(tensor.shape)
        shape[dim] = longest - shape[dim]
        filling = tensor.new_full(shape, pad_index)
        return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        """Collective. The "sum" or "mean" over ranks of a tensor, times `scale`; "none" gives it back."""
        if reduction == "none":
            return tensor
        total = tensor.detach().clone()
        self._communicator.all_reduce(total).wait()
        total = total * scale if scale != 1.0 else total
        return total / self._communicator.size if reduction == "mean" else total

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Collective. Rank 0 runs the block first, then all others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        try:
            yield
        finally:  # the others wait, also for a block that failed
            if self.is_main_process:
                self.wait_for_everyone()

    # ---- said and written

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on rank 0."""
        if self.is_main_process:
            print(*args, **{"file": sys.stdout, **kwargs})  # noqa: T201 - that is what it is for

    def save(self, obj: Any, f: Any, **_: Any) -> None:
        """`torch.save`, on rank 0."""
        if self.is_main_process:
            torch.save(obj, f)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget the loaders that were prepared; None for each object."""
        self._loaders.clear()
        return (None,) * len(objects)

    def _cut(self, gathered: Any) -> Any:
        real = next((each.real_samples for each in self._loaders if each.real_samples is not None), None)
        return gathered if real is None else _first_rows(gathered, real)


def _alike(before: Any, items: list[Any]) -> Any:
    """`items` in a list or tuple, with or without names, of the class of `before`."""
    return type(before)(*items) if hasattr(before, "_fields") else type(before)(items)


def _gathered(value: Any, communicator: Communicator) -> Any:
    if isinstance(value, Mapping):
        return {key: _gathered(each, communicator) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _alike(value, [_gathered(each, communicator) for each in value])
    if not isinstance(value, torch.Tensor):
        return value
    own = (value if value.dim() else value[None]).detach().contiguous()
    parts = []
    for rank, rows in enumerate(communicator.all_gather_object(own.shape[0])):
        part = own if rank == communicator.rank else own.new_empty((rows, *own.shape[1:]))
        if part.numel() and communicator.size > 1:
            communicator.broadcast([part], rank)
        parts.append(part)
    return torch.cat(parts)


def _first_rows(value: Any, rows: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _first_rows(each, rows) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_rows(each, rows) for each in value)
    if isinstance(value, list) and value and _holds_tensors(value[0]):
        return [_first_rows(each, rows) for each in value]
    return value[:rows] if isinstance(value, (torch.Tensor, list)) else value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return any(map(_holds_tensors, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.Tensor)
