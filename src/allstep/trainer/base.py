"""What a Trainer is made of, before it trains or evaluates: its parts, its loss, what it saves and logs."""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.comm.communicator import communicator_for
from allstep.comm.process_group import join
from allstep.data.loader import MicroBatchLoader
from allstep.data.seeding import seed_generators
from allstep.data.stream_loader import StreamLoader
from allstep.report.sink import RunFacts
from allstep.report.sinks import make_sinks
from allstep.trainer.assembly import (
    default_collator,
    make_loader,
)
from allstep.trainer.callbacks import CallbackHandler, TrainerCallback
from allstep.trainer.flow import with_defaults
from allstep.trainer.losses import LossFacts, call_model, loss_of, takes_count
from allstep.trainer.metric_states import MetricState, check_metrics
from allstep.trainer.models import bare, prepare_model
from allstep.trainer.precision import warn_of_precision
from allstep.trainer.run import Run
from allstep.trainer.state import TrainerControl, TrainerState
from allstep.trainer.stopping import restarts
from allstep.trainer.verification import Verification

__all__ = ["TrainerBase", "made"]


class TrainerBase:
    """The parts of a Trainer. See `Trainer` for the arguments."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | MetricState | Mapping[str, MetricState] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        loss_weight_func: Callable[[Any], Any] | None = None,
    ) -> None:
        if (model is None) == (model_init is None):
            raise TypeError("Trainer takes either model or model_init, and one of them has to be given.")
        check_metrics(compute_metrics)
        self.args = TrainingArguments() if args is None else args
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
        seed_generators(self.args.seed)
        if self.args.full_determinism:
            torch.use_deterministic_algorithms(True)
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
        self._made_scheduler: Any = None  # by this Trainer, for its last run
        self._prepared: nn.Module | None = None  # the model that is on the device
        self._is_training = False
        self.last_run: Run | None = None
        """What the last `train` worked with."""
        self._facts: tuple[nn.Module, LossFacts] | None = None  # a model and what was read from it
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
        warn_of_precision(self.args, os.environ)
        self.callback_handler.call("on_init_end")

    # ---- loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: int | float | None = None
    ) -> Any:
        """The mean loss of a micro-batch, and with `return_outputs` also what the model returned; override for your own.

        Args:
            num_items_in_batch: what the mean is taken over, label tokens or samples of this micro-batch: its weight. It is
                handed to `compute_loss_func`, else to the model, where they have a parameter of that name.
        """
        count = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if self.compute_loss_func is None:
            outputs = call_model(model, inputs, **(count if self._loss_facts.counted else {}))
            loss = loss_of(outputs, self.model)
        else:
            labels = None
            if isinstance(inputs, dict):
                names = self.label_names
                labels = next((inputs[name] for name in names if name in inputs), None)
                inputs = {key: value for key, value in inputs.items() if key not in names}
            outputs = call_model(model, inputs)
            loss = self.compute_loss_func(outputs, labels, **(count if self._loss_func_takes_count else {}))
        return (loss, outputs) if return_outputs else loss

    def _counted_loss(self, model: nn.Module, inputs: Any, weight: float, **options: Any) -> Any:
        """`compute_loss`, told what its mean is taken over where it asks for that."""
        if self._loss_takes_count:
            options["num_items_in_batch"] = weight
        return self.compute_loss(model, inputs, **options)

    @functools.cached_property
    def _loss_takes_count(self) -> bool:
        return takes_count(self.compute_loss)

    @functools.cached_property
    def _loss_func_takes_count(self) -> bool:
        return self.compute_loss_func is not None and takes_count(self.compute_loss_func)

    @property
    def _loss_facts(self) -> LossFacts:
        if self._facts is None or self._facts[0] is not self.model:
            self._facts = self.model, LossFacts.of(self.model, self.args.label_names, self.loss_weight_func)
        return self._facts[1]

    # ---- saving and logging

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Collective. Write the model, and the tokenizer if there is one, as files that `from_pretrained` reads.

        Args:
            output_dir: where to; None is `args.output_dir`.
        """
        checkpoints = CheckpointManager(self._output_dir, self.communicator)
        checkpoints.save_model(TrainState(model=self.model, processing_class=self.processing_class), output_dir)

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`, on rank 0."""
        if self.is_world_process_zero():
            self._output_dir.mkdir(parents=True, exist_ok=True)
            (self._output_dir / "trainer_state.json").write_text(json.dumps(self.state.to_dict(), indent=2) + "\n")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers of the current step: into `state.log_history` on every rank, and to whatever reports on rank 0."""
        entry = {**logs, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self.callback_handler.call("on_log", logs=logs)
        self.sinks.log(logs, step=self.state.global_step, epoch=self.state.epoch)
        if not self._is_training:
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
    def label_names(self) -> list[str]:
        """Names of inputs that are labels."""
        return list(self._loss_facts.label_names)

    @property
    def state(self) -> TrainerState:
        """Where the run stands."""
        return self.callback_handler.state

    @property
    def control(self) -> TrainerControl:
        """What callbacks asked for."""
        return self.callback_handler.control

    # ---- parts

    def _ready_model(self) -> nn.Module:
        if self._prepared is not self.model:
            self._prepared = prepare_model(self.model, self.args, self.device)
        return self.model

    def _loader(self, dataset: Any) -> MicroBatchLoader | StreamLoader:
        return make_loader(self.args, dataset, self.model, self.label_names, self.data_collator, self.device)

    def _set_state(self, state: TrainerState) -> None:
        state.is_world_process_zero, state.is_local_process_zero = self.world.is_main, self.world.local_rank == 0
        self.callback_handler.state, self.callback_handler.control = state, TrainerControl()

    @property
    def _output_dir(self) -> Path:
        assert self.args.output_dir is not None  # set when the arguments were checked
        return Path(self.args.output_dir)


def made(model_init: Callable[[], nn.Module] | None) -> nn.Module:
    """A new model, without the wrappers that it may come in."""
    assert model_init is not None
    return bare(model_init())
