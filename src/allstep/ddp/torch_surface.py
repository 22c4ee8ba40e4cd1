"""What else people call on torch's DistributedDataParallel.

Its lesser public methods, and the underscore calls that torch's own tests and other libraries use. The engine needs none of
them.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from allstep.comm.communicator import Communicator, GroupCommunicator
from allstep.ddp.layout import BucketCaps
from allstep.ddp.sync import broadcast_states, buffers_of
from allstep.ddp.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from allstep.ddp.reducer import Reducer

__all__ = ["BufferHook", "TorchSurface"]

BufferHook = Callable[[Any, dict[str, torch.Tensor]], Any]


class _ReducerSurface:
    """The few methods of torch's C++ reducer that Python code calls."""

    def __init__(self, wrapper: "TorchSurface") -> None:
        self._wrapper = wrapper

    def prepare_for_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reduce the next backward, also where its forward ran under `no_sync`. `tensors` are the outputs, where known."""
        wrapper = self._wrapper
        wrapper._reducer.arm(wrapper._unreached(tensors) if tensors else (), in_training=False)

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt when that is due; False, as nothing is done here."""
        return False

    def _get_local_used_map(self) -> torch.Tensor:
        return self._wrapper._reducer.buckets.riders.used.round().to(torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self._wrapper._reducer.is_static


class TorchSurface:
    """Mixed into `DistributedDataParallel`."""

    module: nn.Module
    device: torch.device
    forward_sync_buffers: bool
    find_unused_parameters: bool | None
    gradient_as_bucket_view: bool
    static_graph: bool
    require_backward_grad_sync: bool
    broadcast_bucket_size = 250 << 20
    """Bytes of a message when states are broadcast, under torch's name."""
    _communicator: Communicator
    _ignored: set[str]
    _reducer: "Reducer"
    _input_device: torch.device | None
    _buffer_hook: tuple[Any, BufferHook, str] | None
    _error: str
    _hook_name: str
    _caps: BucketCaps
    _has_joined: bool
    require_forward_param_sync = True
    """Under torch's name; buffers are sent where they are due, whatever it says."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of this wrapper's ranks; None in a world of one that nobody joined."""
        if isinstance(self._communicator, GroupCommunicator):
            return self._communicator.group or dist.group.WORLD
        return None

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are neither broadcast nor reduced."""
        return self._ignored

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Bytes of the buckets that were given one by one."""
        return list(self._caps.given)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward sends rank 0's buffers."""
        return self.forward_sync_buffers and bool(buffers_of(self.module, self._ignored))

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Inputs split over `device_ids`, as torch does; a rank here has one device."""
        return nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, list(device_ids))

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[Any, Any]:
        """Inputs on a device, as the tuple of one pair that torch gives."""
        from torch.distributed.utils import _to_kwargs  # private, and only needed by who calls this

        pair: tuple[Any, Any] = _to_kwargs(inputs, kwargs, torch.device(self.device.type, device_id), False)
        return pair

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Outputs of several devices on one, as torch does."""
        return nn.parallel.scatter_gather.gather(outputs, output_device)

    # ---- underscore calls, and others that are no part of torch's documentation

    @property
    def reducer(self) -> "_ReducerSurface":
        """What libraries reach for in torch's engine: `prepare_for_backward`."""
        return _ReducerSurface(self)

    @abstractmethod
    def _unreached(self, outputs: Any) -> Collection[int]: ...

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Iterable[str]) -> None:
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, state in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                state._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters = self._reducer.parameters
        return list(parameters), [False] * len(parameters)

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        places = {id(parameter): index for index, parameter in enumerate(parameters)}
        missing = [name for identity, name in names.items() if identity not in places and name not in self._ignored]
        if missing:
            raise ValueError(f"Param with name {missing[0]} found in module parameters, but not in DDP parameters.")
        mapping = {places[identity]: name for identity, name in names.items() if identity in places}
        if len(mapping) != len(parameters):
            raise ValueError(f"Expected param to name mapping of {len(parameters)} parameters; found names for {len(mapping)}.")
        return mapping

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        tensors = buffers_of(self.module, self._ignored) if bufs is None else bufs
        broadcast_states(self._communicator, tensors, authoritative_rank)

    def _register_buffer_comm_hook(self, state: Any, hook: BufferHook, comm_hook_location: Any = None) -> None:
        if not callable(hook):
            raise TypeError(f"A buffer hook must be callable as hook(state, named_buffers); got {type(hook).__name__}.")
        self._buffer_hook = (state, hook, getattr(comm_hook_location, "name", "POST_FORWARD"))

    def _run_buffer_hook(self, location: str) -> None:
        """Let the user's hook bring buffers together, where one is registered for `location`."""
        if self._buffer_hook is None or not self.require_backward_grad_sync:
            return
        state, hook, where = self._buffer_hook
        if where == location:
            futures = hook(state, {name: b for name, b in self.module.named_buffers() if name not in self._ignored})
            self._reducer.wait_for(futures if isinstance(futures, list) else [] if futures is None else [futures])

    def _remove_autograd_hooks(self) -> None:
        self._reducer.remove_hooks()

    def _set_static_graph(self) -> None:
        if self._reducer.has_started:
            raise RuntimeError(
                "_set_static_graph should be called before training loop starts: a forward has run. Set static_graph=True when "
                "wrapping."
            )
        self.static_graph = True
        self._reducer.strict = False

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are never cloned here."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise RuntimeError(f"DDP runtime logging sample rate should be equal or greater than 1; got {sample_rate}.")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts of this wrapper under torch's names; times are not taken."""
        parameters, layout = self._reducer.parameters, self._reducer.buckets.layout
        sizes = ", ".join(str(bucket.gradients * bucket.itemsize) for bucket in layout.buckets if bucket.slots)
        has_rebuilt = self._reducer.has_rebuilt
        error = self._reducer.error or self._error
        facts = {
            "world_size": self._communicator.size,
            "rank": self._communicator.rank,
            "module_name": type(self.module).__name__,
            "device_ids": "" if self._input_device is None else str(self._input_device.index),
            "output_device": -1 if self._input_device is None else self._input_device.index,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(bool(self.find_unused_parameters)),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "backend_name": self._communicator.backend,
            "master_addr": os.environ.get("MASTER_ADDR", ""),
            "master_port": os.environ.get("MASTER_PORT", ""),
            "iteration": self._reducer.reductions,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            "bucket_cap_bytes": self._caps.middle,
            "bucket_sizes": sizes,
            "has_rebuilt_buckets": int(has_rebuilt),
            "rebuilt_bucket_sizes": sizes if has_rebuilt else "",
            "num_buckets_reduced": len(layout.buckets),
            "has_sync_bn": int(any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in self.module.modules())),
            "join_uneven_inputs": int(self._has_joined),
            "has_error": int(bool(error)),
            "error": error,
        }
        return {**facts, "comm_hook": self._hook_name} if self._hook_name else facts
