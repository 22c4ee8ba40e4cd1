"""The part of a Trainer that makes optimizer and schedule, each open to be overridden."""

from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.trainer.optimization.optimizers import make_optimizer, optimizer_class_and_kwargs, split_by_decay
from allstep.trainer.optimization.schedulers import make_scheduler
from allstep.trainer.surface.base import TrainerBase

__all__ = ["OptimizingTrainer"]


class OptimizingTrainer(TrainerBase):
    """Makes optimizers and schedules. See `Trainer` for the arguments."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that were not given; override to make your own.

        Args:
            num_training_steps: optimizer steps of the whole run.
        """
        self.create_optimizer()
        if self.lr_scheduler is None:
            self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)
            self._made_scheduler = self.lr_scheduler

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that was not given, set `self.optimizer` to it and return it; override to make your own.

        Args:
            model: whose parameters are trained; None for the Trainer's.
        """
        if self.optimizer is None:
            trained = self.model if model is None else model
            kind = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = make_optimizer(trained, self.args, kind, self.get_decay_parameter_names(trained))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make the schedule that was not given, set `self.lr_scheduler` to it and return it; override to make your own.

        Args:
            num_training_steps: optimizer steps of the whole run.
            optimizer: whose learning rate it sets; None for the Trainer's.
        """
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None  # made before the schedule
            self.lr_scheduler = make_scheduler(
                self.args.lr_scheduler_type,
                optimizer,
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                larger_is_better=bool(self.args.greater_is_better),
                **_as_dict(self.args.lr_scheduler_kwargs),
            )
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """The class of the optimizer that `args.optim` names, and what it is made with beside parameters; may be overridden."""
        return optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay shrinks: all but biases, normalisation layers and other vectors."""
        return list(split_by_decay(model)[0])

    def get_num_trainable_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group.

        Raises:
            ValueError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self._given_optimizer().param_groups]

    def get_optimizer_group(self, param: nn.Parameter | str | None = None) -> Any:
        """The parameter group that holds `param`; without one, the parameters of each group.

        Raises:
            ValueError: there is no optimizer yet.
        """
        groups = self._given_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(each is param for each in group["params"])), None)

    def _given_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: it is made when training begins, or by create_optimizer().")
        return self.optimizer


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    assert not isinstance(value, str)  # JSON became a dict when the arguments were checked
    return value or {}
