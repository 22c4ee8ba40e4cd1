"""The part of a Trainer that runs a micro-batch: inputs, loss, backward, each open to be overridden."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from allstep.data.collate import to_device
from allstep.trainer.models.losses import LossFacts, call_model, loss_of, takes_count
from allstep.trainer.models.precision import autocast
from allstep.trainer.models.smoothing import smoothed_loss
from allstep.trainer.surface.base import TrainerBase
from allstep.trainer.throughput import model_flops

__all__ = ["ComputingTrainer"]


class ComputingTrainer(TrainerBase):
    """Computes losses and gradients. See `Trainer` for the arguments."""

    current_gradient_accumulation_steps = 1
    """What `training_step` is to divide a loss by: nothing, see `Accelerator.gradient_accumulation_steps`."""
    model_accepts_loss_kwargs = True
    """That a loss need not be divided by hand."""

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; its mean loss, without a graph. Override for your own.

        Call `self.accelerator.backward(loss)`, as often as you like: it weights the mean loss by `num_items_in_batch`, so that
        a step is the mean over all ranks and micro-batches. With `loss.backward()` instead, gradients are summed over
        micro-batches and averaged over ranks as they come. Either way they are reduced when the window is done.

        Args:
            model: wrapped for all ranks, in train mode.
            inputs: a micro-batch, not yet on the device.
            num_items_in_batch: what its mean loss is taken over, label tokens or samples.
        """
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._counted_loss(model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: int | float | None = None
    ) -> Any:
        """The mean loss of a micro-batch, and with `return_outputs` also what the model returned; override for your own.

        Args:
            model: the model.
            inputs: a micro-batch, on the device.
            return_outputs: give (loss, outputs).
            num_items_in_batch: what the mean is taken over, label tokens or samples of this micro-batch: its weight. It is
                handed to `compute_loss_func`, else to the model, where they have a parameter of that name.
        """
        count = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if self.compute_loss_func is not None:
            labels, inputs = self._without_labels(inputs)
            outputs = call_model(model, inputs)
            loss = self.compute_loss_func(outputs, labels, **(count if self._loss_func_takes_count else {}))
        elif self.args.label_smoothing_factor and isinstance(inputs, Mapping) and "labels" in inputs:
            outputs = call_model(model, inputs)  # with the labels, of which decoders may make their inputs
            loss = smoothed_loss(outputs, inputs["labels"], self.args.label_smoothing_factor, self._loss_facts.shifted)
        else:
            outputs = call_model(model, inputs, **(count if self._loss_facts.counted else {}))
            loss = loss_of(outputs, self.model)
        return (loss, outputs) if return_outputs else loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A micro-batch on the device; override to change it."""
        return to_device(inputs, self.device)

    def _prepare_input(self, data: Any) -> Any:
        """Anything with tensors in it, on the device."""
        return to_device(data, self.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Another model, such as a teacher, on a device."""
        model.to(device)

    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """What `compute_loss` runs in."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[object]:
        """The precision that the arguments ask for."""
        return autocast(self.args, self.device)

    def _without_labels(self, inputs: Any) -> tuple[Any, Any]:
        """The labels of a micro-batch, None where it has no names for them, and the rest of it."""
        if not isinstance(inputs, Mapping):
            return None, inputs
        names = self.label_names
        labels = next((inputs[name] for name in names if name in inputs), None)
        return labels, {key: value for key, value in inputs.items() if key not in names}

    # ---- what the run calls

    def _counted_loss(self, model: nn.Module, inputs: Any, weight: Any, **options: Any) -> Any:
        """`compute_loss`, told what its mean is taken over where it asks for that."""
        if self._loss_takes_count:
            options["num_items_in_batch"] = weight
        return self.compute_loss(model, inputs, **options)

    def _step_of(self, model: nn.Module, inputs: Any, weight: float, backward: Callable[[torch.Tensor], None]) -> Any:
        """`training_step`, with what `accelerator.backward` does there."""
        self.accelerator.take_backward = backward
        try:
            count = {"num_items_in_batch": weight} if self._step_takes_count else {}
            return self.training_step(model, inputs, **count)
        finally:
            self.accelerator.take_backward = None

    @property
    def _has_own_step(self) -> bool:
        """Whether `training_step` is not the one above, so that nobody knows how often it goes backward."""
        return getattr(self.training_step, "__func__", None) is not ComputingTrainer.training_step

    @functools.cached_property
    def _step_takes_count(self) -> bool:
        return takes_count(self.training_step)

    @functools.cached_property
    def _loss_takes_count(self) -> bool:
        return takes_count(self.compute_loss)

    @functools.cached_property
    def _loss_func_takes_count(self) -> bool:
        return self.compute_loss_func is not None and takes_count(self.compute_loss_func)

    def floating_point_ops(self, inputs: Any) -> float:
        """Floating-point operations of forward and backward over `inputs`, which `state.total_flos` counts; may be overridden.

        The model's own `floating_point_ops`, or 6 for each token and each parameter that is no embedding. `state.total_flos` is
        their sum over all micro-batches and ranks.
        """
        if self._flops is None or self._flops[0] is not self.model:
            self._flops = self.model, model_flops(self.model)
        return self._flops[1](inputs)

    @property
    def _loss_facts(self) -> LossFacts:
        if self._facts is None or self._facts[0] is not self.model:
            self._facts = self.model, LossFacts.of(self.model, self.args.label_names, self.loss_weight_func)
        return self._facts[1]

    @property
    def label_names(self) -> list[str]:
        """Names of inputs that are labels."""
        return list(self._loss_facts.label_names)
