"""`DistributedDataParallel`: the module that people wrap theirs in."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function

from allstep.comm.agreement import check_same_replicas, first_difference
from allstep.comm.communicator import Communicator, SoloCommunicator, communicator_for
from allstep.ddp.alike import Structure
from allstep.ddp.arguments import (
    bucket_caps,
    buffer_flags,
    check_parameters,
    delayed_parameters,
    group_of,
    input_device,
)
from allstep.ddp.buckets import Buckets
from allstep.ddp.comm_hooks import builtin_hook
from allstep.ddp.compiling import keep_engine_out_of_graphs
from allstep.ddp.in_backward import take_over_optimizers
from allstep.ddp.join import UnevenInputs
from allstep.ddp.layout import BucketLayout
from allstep.ddp.mixed_precision import call_in_low_precision, cast_buffers, cast_inputs, mark_parameters, reduce_in
from allstep.ddp.plan import BucketPlan
from allstep.ddp.reducer import Reducer
from allstep.ddp.riders import Totals
from allstep.ddp.sharing import SharedParameters
from allstep.ddp.sparse import sparse_parameters
from allstep.ddp.sync import broadcast_states, buffers_of, describe_states, rename_to_fit, send_buffers, states_to_compare
from allstep.ddp.torch_surface import BufferHook, TorchSurface
from allstep.ddp.unused import tensors_in, unreached_parameters
from allstep.errors import ReplicaError
from allstep.launchers.undistributed import check_joined

__all__ = ["DistributedDataParallel"]


_NUMBERS = itertools.count(1)


class DistributedDataParallel(TorchSurface, UnevenInputs, SharedParameters, nn.Module):
    """Train one replica of `module` on each rank, with gradients averaged over ranks while backward runs.

    Argument names and values are those of `torch.nn.parallel.DistributedDataParallel`. After `backward()` every rank holds
    the mean over ranks of the gradients; all replicas start from rank 0's parameters and buffers.

    Args:
        module: the model, on its device. All ranks must build the same one.
        device_ids: the one device of this rank, for a module on an accelerator; inputs are moved there.
        output_device: accepted for compatibility; must be the same device.
        dim: accepted for compatibility; samples lie along the first dimension.
        broadcast_buffers: torch's older name of `forward_sync_buffers`; warns.
        init_sync: compare the replicas when wrapping, and send rank 0's parameters and buffers to all.
        process_group: the ranks to average over; None is the default group, or a world of one where nobody joined a group.
        bucket_cap_mb: size of buckets in MiB; several are those of the buckets in the order in which they fill, the last one
            for all that follow. None: about 1 where ranks share memory; elsewhere 5 on the CPU and 25 on devices, with a
            first and last bucket of at most 1, until cuts are planned from measured times after four reductions, see
            `bucket_plan`.
        find_unused_parameters: False: a parameter without a gradient is an error in the same backward. True: walk the graph
            after each forward to know such parameters beforehand. None: no walk; a rank without a gradient takes part
            with zeros, and a parameter that no rank used keeps the `.grad` it had.
        static_graph: every backward uses the same parameters; those that the first one did not use are not waited for.
        check_reduction: accepted for compatibility; every reduction is checked.
        gradient_as_bucket_view: leave `.grad` as views of flat storage, so that gradients exist once in memory.
        delay_all_reduce_named_params: (name, parameter) of those to reduce together, in buckets of their own behind all others.
        param_to_hook_all_reduce: the delayed parameters are not reduced before the gradient of this one has come.
        mixed_precision: torch's `_MixedPrecision`: dtypes of parameters and inputs in forward and backward, of the reduction,
            and of buffers. Parameters and gradients stay in their own.
        device_mesh: the ranks, as a mesh of one dimension, in place of `process_group`.
        skip_all_reduce_unused_params: accepted for compatibility; what no rank used stays as it was.
        bucket_cap_mb_list: as `bucket_cap_mb` with several sizes.
        batched_grad_copy: accepted for compatibility; copies into buckets are always batched.
        forward_sync_buffers: send rank 0's buffers to all ranks at the start of a forward, once for each reduction.
        deterministic_reduction: add in a tree by rank on any backend, ((0 + 1) + (2 + 3)) + …. `shm` on one host does that
            anyway, and for two ranks there is one order only. See `begin_micro_batch` for the sum within a rank.

    Attributes that this class does not have are those of `module`. Keys of `state_dict()` begin with "module.", as torch's do;
    `load_state_dict` takes those of a bare or compiled module too, and `ddp.module.state_dict()` is what a bare one loads.

    A wrapper inside `module` hands its parameters over to this one, unless it has another group; then it keeps them, and is
    only told of `no_sync`.

    Raises:
        ReplicaError: on every rank, where the ranks' modules differ.
        LaunchVariablesError: a launcher started several processes, and this one has joined no group.
        RuntimeError: nothing in `module` can be trained, or it is a lazy module that has seen no input.
        ValueError: `device_ids` or another argument does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Communicator | None = None,
        bucket_cap_mb: float | Sequence[float] | None = None,
        find_unused_parameters: bool | None = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = True,
        forward_sync_buffers: bool | None = None,
        deterministic_reduction: bool = False,
    ) -> None:
        super().__init__()
        keep_engine_out_of_graphs()
        check_parameters(module)
        self._ignored: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self._is_released = False
        self._lent = {}
        self.dim = dim
        self.device_mesh = device_mesh
        group = group_of(process_group, device_mesh)
        self._communicator = communicator_for(group)
        if group is None and isinstance(self._communicator, SoloCommunicator):
            check_joined(os.environ)
        self._inner = self._take_over_wrappers()
        named = self._trainable()
        self.forward_sync_buffers = buffer_flags(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.deterministic_reduction = deterministic_reduction
        self.require_backward_grad_sync = True
        """Whether the next forward's backward is reduced; `no_sync` clears it for a while."""
        self._buffers_sent_at = -1  # reductions that were done when rank 0's buffers were sent
        self._buffer_hook: tuple[Any, BufferHook, str] | None = None  # brings buffers together in place of rank 0's
        self._hook_name = ""
        self._error = ""  # the last error that this wrapper raised outside of its constructor
        self._has_own_group = process_group not in (None, dist.group.WORLD) or device_mesh is not None
        if init_sync:
            arguments = f"bucket_cap_mb={bucket_cap_mb_list or bucket_cap_mb}, forward_sync_buffers={self.forward_sync_buffers}"
            check_same_replicas(self._communicator, describe_states(module, self._ignored), arguments)
            states = [p for n, p in module.named_parameters() if n not in self._ignored]
            broadcast_states(self._communicator, [*states, *buffers_of(module, self._ignored)])
        if not named:
            raise RuntimeError(
                f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to reduce. Use it "
                f"without the wrapper."
            )
        self.device = named[0][1].device
        self._input_device = input_device(self.device, device_ids, output_device)
        self._delayed = delayed_parameters(named, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._number = self._communicator.broadcast_object(next(_NUMBERS))
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list, self.device, shared=self._communicator.shares_memory)
        self._make_reducer(named)
        self._take_from_others()
        self.mixed_precision = mixed_precision
        if mixed_precision is not None:
            mark_parameters(module, mixed_precision.param_dtype, self._ignored)
            if mixed_precision.buffer_dtype is not None:
                cast_buffers(module, mixed_precision.buffer_dtype, self._ignored)
            reduced_in = mixed_precision.reduce_dtype or mixed_precision.param_dtype
            if reduced_in is not None:
                self._reducer.buckets.hook = (self.process_group, reduce_in(reduced_in, builtin_hook("ALLREDUCE")))

    def _make_reducer(self, named: Sequence[tuple[str, nn.Parameter]], *, at_once: bool = True) -> None:
        """Collective for the first wrapper over a group; with `at_once=False` only when gradients are first reduced."""
        self._index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        index_of_name = {name: index for index, (name, _) in enumerate(named)}
        delayed, trigger = self._delayed
        self._structure = Structure(self.module, self._ignored | self._lent_names(), self._index_of)
        communicator = self._communicator.channel(at_once=at_once)
        buckets = Buckets(
            named,
            communicator,
            self._caps,
            as_views=self.gradient_as_bucket_view,
            sparse=[self._index_of[identity] for identity in sparse_parameters(self.module) & self._index_of.keys()],
            delayed=[index_of_name[name] for name in delayed if name in index_of_name],
            trigger=index_of_name.get(trigger),
            in_order=self.deterministic_reduction,
        )
        strict = self.find_unused_parameters is False and not self.static_graph
        self._reducer = Reducer(buckets, list(index_of_name), communicator, strict=strict, number=self._number)

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of all that is reduced, in registration order."""
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and n not in self._ignored]

    def _take_over_wrappers(self) -> "list[DistributedDataParallel]":
        """The wrappers inside; those of the same group reduce no more, the parameters of others are left to them."""
        found = [(name, layer) for name, layer in self.module.named_modules() if isinstance(layer, DistributedDataParallel)]
        for name, wrapper in found:
            if wrapper.process_group is self.process_group:
                wrapper.release()
            else:
                states = [*wrapper.named_parameters(), *wrapper.named_buffers()]
                self._ignored |= {f"{name}.{state}" for state, _ in states}
        return [wrapper for _, wrapper in found]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        rename_to_fit(state_dict, prefix, self.state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _notice_changes(self) -> None:
        """Parameters may have been added, replaced or thawed since the last forward; see `alike`."""
        if self._lent:
            self._take_back()
        if self._reducer.is_outdated or not self._reducer.buckets.gradients.fit():
            self._fit_reducer()
        self._reducer.changes = self._structure.changes()
        if self._reducer.stepped is None:
            self._reducer.stepped = take_over_optimizers(self._reducer.parameters)

    def _fit_reducer(self) -> None:
        before, known = self._reducer, self._index_of.keys() | self._lent.keys()
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self._ignored and id(p) not in self._lent]
        kept = [(n, p) for n, p in named if p.requires_grad or id(p) in known]
        if kept:
            self._make_reducer(kept)
            self._reducer.take_over(before)
        else:  # all are lent
            self._index_of = {}
            before.remove_hooks()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy; a copy reduces by itself, over the default group of the process in which it is made.

        Raises:
            RuntimeError: this wrapper has a group of its own, which no copy could find again.
        """
        if self._has_own_group:
            raise RuntimeError(
                "A DistributedDataParallel with a process_group of its own cannot be pickled or copied, as the group cannot. "
                "Copy or save its .module, or its state_dict(), and wrap the copy."
            )
        if self._reducer.buckets.hook is not None:
            raise RuntimeError(
                "A DistributedDataParallel with a communication hook cannot be pickled or copied. Copy its .module, wrap the "
                "copy, and register the hook there."
            )
        made_anew = ("_reducer", "_communicator", "_index_of", "_structure", "_lent")
        return {key: value for key, value in self.__dict__.items() if key not in made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        keep_engine_out_of_graphs()
        self._communicator = communicator_for(None)
        self._buffers_sent_at = -1
        self._lent = {}
        self._number = 0  # of copies, which one rank may make more of than another
        self._make_reducer(self._trainable(), at_once=False)  # a copy may be loaded on one rank only
        self._take_from_others()
        if self._is_released:
            self.release()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; its backward is reduced, unless it runs under `no_sync` or without gradients."""
        if self._input_device is not None:
            inputs, kwargs = _moved((inputs, kwargs), self._input_device)
        if self._lent and not self._index_of:
            self._take_back()
        if self._is_released or not self._index_of or not torch.is_grad_enabled():
            return self._call(inputs, kwargs)
        self._reducer.close_what_broke_off()
        self._announce(self.require_backward_grad_sync)
        self._send_buffers_if_due()
        try:
            with _span("DistributedDataParallel.forward"):
                outputs = self._call(inputs, kwargs)
        except BaseException as error:
            if self.require_backward_grad_sync and self.training:
                self._reducer.note_broken_forward(error)
            raise
        self._run_buffer_hook("POST_FORWARD")
        if not self.require_backward_grad_sync:
            self._reducer.disarm()
            for tensor in tensors_in(outputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._reducer.begin_local)
            return outputs
        computed = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        roots = [tensor.grad_fn for tensor in computed]
        forward = self._reducer.arm(self._unreached(outputs), roots, in_training=self.training)
        for tensor in computed:  # a hook on a parameter that is itself an output would stay there for ever
            # the outermost backward starts here; a parameter's hook may fire inside a nested one (checkpointing)
            tensor.register_hook(partial(self._reducer.begin_at_output, forward))
        return outputs

    def _call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, in low precision where that was asked for."""
        low = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        if low is None:
            return self.module(*inputs, **kwargs)
        inputs, kwargs = cast_inputs((inputs, kwargs), low)
        return call_in_low_precision(self.module, low, self._ignored, inputs, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside keep their gradients on this rank; the first one after it reduces all that was accumulated."""
        before = [(wrapper, wrapper.require_backward_grad_sync) for wrapper in (self, *self._inner)]
        for wrapper, _ in before:
            wrapper._set_sync(False)
        try:
            yield
        finally:
            for wrapper, flag in before:
                wrapper._set_sync(flag)

    def _set_sync(self, flag: bool) -> None:
        self.require_backward_grad_sync = flag
        self._reducer.under_no_sync = not flag

    def weigh(self, weight: float, carried: float | torch.Tensor = 0.0) -> None:
        """Between forward and backward: divide the coming reduction by the sum over ranks of `weight`, not by their number.

        Losses must then have been multiplied by what they are worth, for example a mean over samples by the number of
        samples, and `weight` is the total of this rank since the last reduction. `carried` is one more number to sum over
        ranks. Both sums come at no collective of their own and are in `totals` after the backward.
        """
        self._check_divisor()
        self._reducer.weigh(weight, carried)

    def raise_hand_if(self, has_hand_up: Callable[[], bool]) -> None:
        """From now on, ask this in each reduction; `totals.hands` then says, on every rank alike, how many ranks said yes.

        So one rank's wish, to stop for instance, becomes known to all at the same step, at no collective of its own.
        """
        self._reducer.has_hand_up = has_hand_up

    def begin_micro_batch(self, place: int) -> None:
        """The next forward and backward are of the micro-batch at `place` of this rank's window, counted from 0.

        With it the gradients of a window are summed as a binary tree over places, (0 + 1) + (2 + 3), not one after the other;
        places may be left out, and count as zero. Where each rank runs as many places as a power of two, and ranks add in
        order too, gradients have the same bits however many ranks share the micro-batches of a step. It keeps one set of
        gradients aside for 4 micro-batches, two for 8, three for 16. Sparse gradients are summed as they come.
        """
        self._reducer.buckets.gradients.tree.begin(place)

    @property
    def gradients_aside(self) -> int:
        """The largest number of sets of gradients that were kept aside in a window so far; see `begin_micro_batch`."""
        return self._reducer.buckets.gradients.tree.most_kept

    def take_part(self, *, weight: float | None = None, carried: float | torch.Tensor = 0.0) -> None:
        """Collective. Reduce without a backward: for a rank that has no micro-batch left while others still have one."""
        self._announce(True)
        self._send_buffers_if_due()
        if weight is not None:
            self.weigh(weight, carried)
        self._reducer.take_part()

    def abandon(self, reason: str, *, weight: float | None = None) -> None:
        """Collective. Take part in the reduction that the others wait in, and tell them that this rank failed, and why.

        Where the others `weigh` theirs, give a weight too: 0.

        Raises:
            RankFailedError: unless all ranks abandoned this reduction.
        """
        self._announce(True)
        self._send_buffers_if_due()
        if weight is not None:
            self.weigh(weight)
        self._reducer.abandon(reason)

    def check_consistency(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Collective. Compare parameters, buffers and, where given, the state of `optimizer` over all ranks, bit for bit.

        Raises:
            ReplicaError: on every rank, with the first thing that differs, and on which ranks.
        """
        for kind, tensors in states_to_compare(self.module, self._ignored, optimizer):
            difference = first_difference(self._communicator, tensors)
            if difference is not None:
                raise ReplicaError(
                    f"The replicas have drifted apart: {kind} {difference}. It was loaded or changed on some ranks only, or "
                    f"computed from something that differs between ranks. Load and change the same on every rank."
                )

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let `hook(state, bucket)` average the gradients of each full bucket; see `comm_hooks`. Before the first backward.

        Raises:
            TypeError: `hook` cannot be called.
            RuntimeError: there is a hook already.
        """
        if not callable(hook):
            self._error = f"A communication hook must be callable as hook(state, bucket); got {type(hook).__name__}."
            raise TypeError(self._error)
        if self._reducer.buckets.hook is not None:
            raise RuntimeError("register_comm_hook was called before; a wrapper has one communication hook.")
        self._reducer.buckets.hook = (state, hook)
        self._hook_name = getattr(hook, "__qualname__", str(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, builtin_hook(str(comm_hook_type).rpartition(".")[2]))
        self._hook_name = str(comm_hook_type)

    def release(self) -> None:
        """Let go of the module: its gradients are reduced no more. A wrapper that is dropped does so by itself."""
        self._is_released = True
        self._reducer.remove_hooks()

    @property
    def totals(self) -> Totals | None:
        """What the last reduction summed beside gradients: the weight, and the number carried."""
        return self._reducer.totals

    @property
    def bucket_layout(self) -> BucketLayout:
        """Which gradient lies where in which bucket; print it."""
        return self._reducer.buckets.layout

    @property
    def bucket_plan(self) -> BucketPlan | None:
        """Where `bucket_cap_mb=None` has cut the buckets, and why; print it. None where there is no plan, or not yet.

        It is made after four reductions, from times of the last three of them and of collectives of several sizes.
        There is none where ranks share memory, for gradients of less than 256 KiB, with a communication hook, delayed
        parameters, or deterministic algorithms on more than two ranks, nor after the model has changed.
        """
        return self._reducer.plan

    @property
    def reductions(self) -> int:
        """How often the gradients have been reduced."""
        return self._reducer.reductions

    @property
    def bytes_reduced(self) -> int:
        """Bytes of all buckets that have been reduced; the difference over a step is what that step sent."""
        return self._reducer.buckets.bytes_reduced

    @property
    def collectives_per_bucket(self) -> list[int]:
        """Per bucket, how many collectives have been started."""
        return list(self._reducer.buckets.launched)

    def _send_buffers_if_due(self) -> None:
        """Once for each reduction, at its first forward: a rank that fails in between has sent them (test_buffers.py)."""
        self._notice_changes()
        self._reducer.raise_unread()  # it may end in a collective, which has to come before that of the buffers
        if self._buffer_hook is not None:
            self._run_buffer_hook("PRE_FORWARD")
            return
        if self.forward_sync_buffers and self._buffers_sent_at != self._reducer.reductions and self._structure.has_buffers():
            send_buffers(self._communicator, self.module, self._ignored, self._buffers_from)
            self._buffers_sent_at = self._reducer.reductions

    def _unreached(self, outputs: Any) -> Collection[int]:
        """Parameters that the coming backward will leave without a gradient, as far as that is known beforehand."""
        if self.static_graph:
            return self._reducer.untouched or ()
        if not self.find_unused_parameters:
            return ()
        with _span("search_unused_parameters"):
            return unreached_parameters(outputs, self._index_of)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
            try:
                return getattr(self.module, name)
            except AttributeError:
                wrapped = type(self.module).__name__
                raise AttributeError(f"Neither DistributedDataParallel nor the {wrapped} in it has {name!r}.") from None


# Libraries that look for torch's class, to unwrap a model or to name its states, find this one too (test_torch_surface.py).
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)


def _span(name: str) -> AbstractContextManager[Any]:
    """A name in a profile; without a profiler it would cost a small model 28 µs a step."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()  # type: ignore[attr-defined]


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in tuples, lists and dicts on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
