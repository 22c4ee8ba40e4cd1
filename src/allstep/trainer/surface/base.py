"""What a Trainer is made of, before it trains or evaluates: its parts, its callbacks, what it logs."""

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.comm.communicator import communicator_for
from allstep.comm.process_group import join
from allstep.data.seeding import seed_generators
from allstep.report.memory_stages import MemoryStages
from allstep.report.sink import RunFacts
from allstep.report.sinks import make_sinks
from allstep.trainer.assembly import default_collator
from allstep.trainer.callbacks.flow import with_defaults
from allstep.trainer.callbacks.handler import CallbackHandler, TrainerCallback
from allstep.trainer.evaluation.metric_states import MetricState, check_metrics
from allstep.trainer.models.losses import LossFacts
from allstep.trainer.models.precision import autocast, precision_line, precision_of, set_numerics
from allstep.trainer.models.prepare import bare, prepare_model
from allstep.trainer.run import Run
from allstep.trainer.state import TrainerControl, TrainerState
from allstep.trainer.stopping import restarts
from allstep.trainer.surface.accelerator import Accelerator
from allstep.trainer.verbosity import set_log_levels
from allstep.trainer.verification import Verification

__all__ = ["TrainerBase", "made"]


class TrainerBase:
    """The parts of a Trainer. See `Trainer` for the arguments."""

    is_deepspeed_enabled = is_fsdp_enabled = is_fsdp_xla_enabled = is_model_parallel = False
    """What scripts for Hugging Face's Trainer ask: every rank holds the whole model."""
    place_model_on_device = True
    hp_search_backend = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | MetricState | Mapping[str, MetricState] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        loss_weight_func: Callable[[Any], Any] | None = None,
    ) -> None:
        check_constructor(model, model_init, optimizers, optimizer_cls_and_kwargs, processing_class, tokenizer)
        check_metrics(compute_metrics)
        processing_class = tokenizer if processing_class is None else processing_class
        self.args = arguments_of(args)
        self._verification = Verification.asked_for()
        if self._verification is not None:
            self.args = self._verification.adapted(self.args)
        self.world = join(
            backend=self.args.ddp_backend,
            timeout=self.args.ddp_timeout_delta,
            use_cpu=self.args.use_cpu,
            wait_warning=self.args.ddp_wait_warning,
        )
        self.communicator = communicator_for(None)
        self.device = torch.device(self.world.device)
        self._memory = MemoryStages(not self.args.skip_memory_metrics, self.device)
        self._memory.begin("init")
        self.accelerator = Accelerator(
            self.world, self.communicator, self.args.seed, lambda: autocast(self.args, self.device), precision_of(self.args)
        )
        """This process among the others, under the names of Hugging Face's accelerate."""
        seed_generators(self.args.seed)
        set_numerics(self.args, os.environ)
        set_log_levels(self.args, is_main=self.args.should_log)
        self._model_init = model_init
        self.model: nn.Module = bare(model) if model is not None else made(model_init)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.data_collator = data_collator or default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.loss_weight_func = loss_weight_func
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._own_optimizers = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._made_scheduler: Any = None  # by this Trainer, for its last run
        self._prepared: nn.Module | None = None  # the model that is on the device
        self.is_in_train = False
        """Whether `train` is at work."""
        self._resumed_batch: int | None = None  # global batch of the run that `train` goes on with
        self.last_run: Run | None = None
        """What the last `train` worked with."""
        self._facts: tuple[nn.Module, LossFacts] | None = None  # a model and what was read from it
        self._flops: tuple[nn.Module, Callable[[Any], float]] | None = None  # the same
        self.callback_handler = CallbackHandler(
            with_defaults(callbacks, self.args.disable_tqdm), self.model, processing_class, *optimizers, args=self.args
        )
        self._set_state(TrainerState())
        self.sinks = make_sinks(
            self._output_dir,
            self.args.report_to,
            self.world.is_main,
            shows=lambda role: self.callback_handler.has_role(role),
            facts=lambda: RunFacts.of(self.args, self.model),
            is_restarted=restarts() > 0,
        )
        if (line := precision_line(self.args)) is not None:
            self.sinks.message(line)
        self.callback_handler.call("on_init_end")
        self._memory.end("init")
        warn_of_deaf_overrides(type(self))

    # ---- logging and callbacks

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers of the current step: into `state.log_history` on every rank, and to whatever reports on rank 0.

        From a training on, the epoch is added to `logs` itself; callbacks may change it before anything reports.
        """
        step, epoch = self.state.global_step, self.state.epoch
        if self.state.max_steps:  # before a training there is no epoch
            logs["epoch"] = epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": step})
        self.callback_handler.call("on_log", logs=logs)
        self.sinks.log({name: value for name, value in logs.items() if name != "epoch"}, step=step, epoch=epoch)
        if not self.is_in_train:
            self.sinks.close()

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or a class that is called for one."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Take a callback out and return it, given itself or its class."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take a callback out, given itself or its class."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.world.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank on its host."""
        return self.world.local_rank == 0

    @property
    def state(self) -> TrainerState:
        """Where the run stands."""
        return self.callback_handler.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self.callback_handler.state = state

    @property
    def control(self) -> TrainerControl:
        """What callbacks asked for."""
        return self.callback_handler.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self.callback_handler.control = control

    @property
    def model_wrapped(self) -> nn.Module:
        """The model as it trains, wrapped for all ranks; outside of training the model itself."""
        return self.last_run.model if self.last_run is not None and self.is_in_train else self.model

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.processing_class = tokenizer

    # ---- parts

    def _ready_model(self) -> nn.Module:
        if self._prepared is not self.model:
            self._prepared = prepare_model(self.model, self.args, self.device)
        return self.model

    def _set_state(self, state: TrainerState) -> None:
        state.is_world_process_zero, state.is_local_process_zero = self.world.is_main, self.world.local_rank == 0
        self.callback_handler.state, self.callback_handler.control = state, TrainerControl()

    @property
    def _output_dir(self) -> Path:
        assert self.args.output_dir is not None  # set when the arguments were checked
        return Path(self.args.output_dir)


def arguments_of(args: Any) -> TrainingArguments:
    """What was handed to a Trainer, as TrainingArguments: None, ours, or those of transformers."""
    if isinstance(args, TrainingArguments):
        return args
    if args is None:
        return TrainingArguments()
    if dataclasses.is_dataclass(args) and hasattr(args, "per_device_train_batch_size"):
        return TrainingArguments.from_transformers(args)
    raise TypeError(f"args is a {type(args).__name__}; expected allstep's TrainingArguments, or those of transformers.")


def check_constructor(
    model: Any, model_init: Any, optimizers: Any, optimizer_cls_and_kwargs: Any, processing_class: Any, tokenizer: Any
) -> None:
    """Refuse what cannot be given to a Trainer together.

    Raises:
        TypeError: with what to leave out.
    """
    if (model is None) == (model_init is None):
        raise TypeError("Trainer takes either model or model_init, and one of them has to be given.")
    if model is not None and not callable(getattr(model, "forward", None)):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module. Load it first (from_pretrained).")
    if optimizer_cls_and_kwargs is not None and any(each is not None for each in optimizers):
        raise TypeError("Trainer takes either optimizers or optimizer_cls_and_kwargs; leave one of them out.")
    if tokenizer is not None and processing_class is not None and tokenizer is not processing_class:
        raise TypeError("tokenizer is the older name of processing_class; give one of them.")


NEVER_CALLED = (
    "_inner_training_loop", "_run_epoch", "_maybe_log_save_evaluate", "_load_best_model", "_load_from_checkpoint",
    "_determine_best_metric", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_save_rng_state",
    "_wrap_model", "get_batch_samples", "_get_num_items_in_batch", "_clip_grad_norm",
)  # fmt: skip
"""Inner methods of Hugging Face's Trainer that scripts override now and then, and that nothing here calls."""


def warn_of_deaf_overrides(kind: type) -> None:
    """Say which methods of a subclass will never be called, though they would be in Hugging Face's Trainer."""
    deaf = [name for name in NEVER_CALLED if hasattr(kind, name)]
    if deaf:
        warnings.warn(
            f"{kind.__name__} overrides {', '.join(deaf)}, which allstep's Trainer does not have and never calls. What can be "
            f"overridden: training_step, compute_loss, prediction_step, evaluation_loop, _save_checkpoint, save_model, log, "
            f"the get_*_dataloader methods, create_optimizer, create_scheduler; and callbacks.",
            stacklevel=4,
        )


def made(model_init: Callable[..., nn.Module] | None) -> nn.Module:
    """A new model, without the wrappers that it may come in; a function that takes a trial gets None for it."""
    assert model_init is not None
    parameters = inspect.signature(model_init).parameters.values()
    takes_trial = any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    return bare(model_init(None) if takes_trial else model_init())
