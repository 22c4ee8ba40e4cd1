"""Groups of arguments that are set together, in calls that can be chained: `args.set_training(...).set_save(...)`."""

from typing import Any, TypeVar

from allstep._arguments.process import ProcessArguments

__all__ = ["SettableArguments"]

_Arguments = TypeVar("_Arguments", bound="SettableArguments")


class SettableArguments(ProcessArguments):
    """Arguments with setters. Each sets all arguments of its group, those left out to the values of its signature.

    They return the arguments themselves, checked again.

    Raises:
        ArgumentsError: values that cannot hold together; the arguments stay as they were.
    """

    def _check(self) -> None:
        raise NotImplementedError

    def _set(self: _Arguments, **values: Any) -> _Arguments:
        before = dict(vars(self))
        vars(self).update(values)
        try:
            self._check()
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        return self

    def set_training(
        self: _Arguments,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> _Arguments:
        """What training is, and `do_train=True`."""
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=recompute,
            gradient_checkpointing=recompute,
        )

    def set_evaluate(
        self: _Arguments,
        strategy: str = "no",
        steps: float = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> _Arguments:
        """When and how to evaluate; `do_eval` follows from it."""
        return self._set(
            eval_strategy=strategy,
            do_eval=False,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self: _Arguments, batch_size: int = 8, loss_only: bool = False) -> _Arguments:
        """How to predict, and `do_predict=True`."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self: _Arguments,
        strategy: str = "steps",
        steps: float = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> _Arguments:
        """When to save, and how many checkpoints to keep."""
        return self._set(save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node)

    def set_logging(
        self: _Arguments,
        strategy: str = "steps",
        steps: float = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> _Arguments:
        """When and where to log."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(self: _Arguments, model_id: str, *args: Any, **kwargs: Any) -> _Arguments:
        """Always refused: nothing is uploaded from here."""
        return self._set(push_to_hub=True, hub_model_id=model_id)

    def set_optimizer(
        self: _Arguments,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> _Arguments:
        """The optimizer and its settings."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self: _Arguments, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> _Arguments:
        """The learning rate's schedule, and the length of training that it covers."""
        return self._set(lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps)

    def set_dataloader(
        self: _Arguments,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> _Arguments:
        """How data is loaded."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
