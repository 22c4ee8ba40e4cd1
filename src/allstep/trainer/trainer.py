"""`Trainer`: what people construct. It puts the parts of a run together and hands them to `loop.train`."""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.comm.communicator import communicator_for
from allstep.comm.process_group import join
from allstep.comm.watchdog import HERE
from allstep.data.loader import MicroBatchLoader, check_map_style
from allstep.data.position import DataPosition
from allstep.data.seeding import seed_generators
from allstep.data.stream_loader import StreamLoader
from allstep.data.streams import StreamGrid, is_stream
from allstep.errors import DataError
from allstep.report.record import RunReport
from allstep.report.sinks import make_sinks
from allstep.trainer import evaluation, loop
from allstep.trainer.assembly import (
    default_collator,
    make_feeds,
    make_grid,
    make_loader,
    make_report,
    order_line,
    sums_in_order,
)
from allstep.trainer.callbacks import CallbackHandler, DefaultFlowCallback, TrainerCallback
from allstep.trainer.decisions import heed_late_signals
from allstep.trainer.evaluation import EvaluationResult, Prediction, PredictionOutput
from allstep.trainer.ledger import open_ledger
from allstep.trainer.losses import LossFacts, call_model, loss_of, takes_count
from allstep.trainer.meter import Meter
from allstep.trainer.metric_states import MetricState, check_metrics
from allstep.trainer.metrics import Metrics
from allstep.trainer.models import bare, prepare_model, wrap
from allstep.trainer.optimizers import make_optimizer
from allstep.trainer.precision import autocast, warn_of_precision
from allstep.trainer.prediction import Predictor, summary
from allstep.trainer.run import Plan, Run
from allstep.trainer.saving import Saver
from allstep.trainer.schedulers import make_scheduler
from allstep.trainer.state import TrainerControl, TrainerState
from allstep.trainer.stopping import StopRequest, restarts, stop
from allstep.trainer.verification import StopAfter, Verification

__all__ = ["TrainOutput", "Trainer"]


class Trainer:
    """Trains, evaluates and predicts, with one process or many: the same script under every launcher.

    Constructing a Trainer joins the job that this process was started for. Names and meanings of the arguments are those of
    Hugging Face's Trainer.

    Args:
        model: returns its loss: a dict or object with "loss", a tuple that begins with it, or the loss itself.
        args: how to train; None takes all defaults.
        data_collator: makes a micro-batch of a list of samples; None stacks them.
        train_dataset: has `__len__` and `__getitem__`; or a stream, which has `__iter__`.
        eval_dataset: the same, or a dict of several, evaluated under their names.
        processing_class: a tokenizer or processor; saved with the model, used to pad where it can.
        model_init: makes the model at the start of `train`, instead of `model`.
        compute_loss_func: `f(outputs, labels, num_items_in_batch)` gives the loss; labels are then kept from the model.
        compute_metrics: `f(EvalPrediction)` gives a dict of numbers. Or a metric, or a dict of them by name, that is updated
            with every batch and merged over ranks, so that no logits are gathered: any object that has `update(predictions,
            labels)`, `merge_state(others)` and `compute()`, as torcheval's have.
        callbacks: objects or classes with methods named like the events of `TrainerCallback`.
        optimizers: an optimizer and a schedule of your own; None for those that the arguments describe.
        preprocess_logits_for_metrics: `f(logits, labels)`, called on each batch before anything is gathered.
        loss_weight_func: `f(inputs)` gives what the mean loss of a micro-batch is taken over, one number; 0 leaves the
            micro-batch out. None: the labels that are not -100 where they are whole numbers of two or more dimensions (without
            the first of each row where the model shifts them), else the samples.
    """

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
        self.model: nn.Module = bare(model) if model is not None else _made(model_init)
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
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *(callbacks or ())], self.args)
        self._set_state(TrainerState())
        self.sinks = make_sinks(self._output_dir, self.args.disable_tqdm, self.args.report_to, self.world.is_main)
        warn_of_precision(self.args, os.environ)
        self.callback_handler.kwargs = {"model": self.model, "processing_class": processing_class, "eval_dataloader": None}
        self.callback_handler.call("on_init_end")

    # ---- training

    def train(self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None) -> "TrainOutput":
        """Collective. Train to the end and return the mean loss and the numbers of the run.

        Args:
            resume_from_checkpoint: a checkpoint folder, True for the newest whole one in `output_dir`, or "auto" for that one
                or the beginning. "true" and "false" are True and False. A job that its launcher has started again after a
                failure goes on from its own newest one where this is None or False.

        Raises:
            DataError: there is nothing to train on.
            CheckpointError: `output_dir` cannot be written, or the checkpoint cannot be read.
            RankFailedError: another rank failed.
        """
        began = time.perf_counter()
        if self._verification is not None:
            resume_from_checkpoint = self._verification.resume_from
            self.add_callback(StopAfter(self._verification.steps))
        if self._model_init is not None:
            seed_generators(self.args.seed)
            self.model = _made(self._model_init)
            self.optimizer, self.lr_scheduler = self._own_optimizers
        if self.lr_scheduler is self._made_scheduler:
            self.lr_scheduler = None  # that of the run before, which is at its end
        checkpoints = CheckpointManager(self._output_dir, self.communicator, self.args.save_total_limit, say=self.sinks.message)
        try:
            output = self._train(checkpoints, resume_from_checkpoint, began)
        finally:
            checkpoints.close()
        if self._verification is not None:
            raise SystemExit(0)  # what the script does afterwards is not looked at
        return output

    def _train(
        self, checkpoints: CheckpointManager, resume_from_checkpoint: str | os.PathLike[str] | bool | None, began: float
    ) -> "TrainOutput":
        run, saver = self._make_run(checkpoints, resume_from_checkpoint)
        self.last_run = run
        first_step = self.state.global_step
        try:
            self.sinks.open(run.plan.max_steps, first_step)
            self._is_training = True
            with StopRequest() as request:
                run.model.raise_hand_if(request.is_asked)
                loop.train(run, saver)
                if heed_late_signals(run, request.is_asked()):
                    stop(run, saver, request, self.sinks.message)
            if self.args.load_best_model_at_end:
                saver.load_best()
            output = self._finish(run, first_step, time.perf_counter() - began)
            if (words := saver.last_words()) is not None:
                self.sinks.message(words)
        finally:
            self._is_training = False
            HERE.step = HERE.micro_batch = None
            HERE.enter("")
            saver.abandon()
            run.feeds.close()
            run.model.release()
            self.sinks.close()
            if run.ledger is not None:
                run.ledger.close()
        return output

    def _make_run(
        self, checkpoints: CheckpointManager, resume_from_checkpoint: str | os.PathLike[str] | bool | None
    ) -> tuple[Run, Saver]:
        """Everything that can be wrong is found here, before the first step."""
        args, size = self.args, self.communicator.size
        if restarts() > 0 and not resume_from_checkpoint and self._verification is None:
            # what the script says is for the first time
            folder = checkpoints.resolve("auto", of_this_job=True)
        else:
            folder = checkpoints.resolve(resume_from_checkpoint)
        grid = make_grid(
            args, self.train_dataset, self.communicator, None if folder is None else checkpoints.global_batch_size(folder)
        )
        plan = Plan.of(args, grid.steps_per_epoch)
        checkpoints.prepare()
        model = self._ready_model()
        in_order = sums_in_order(args, self.communicator, self.device)
        wrapped = wrap(model, args, in_order=in_order)
        self.create_optimizer_and_scheduler(plan.max_steps)
        assert self.optimizer is not None
        self._set_state(
            TrainerState(
                max_steps=plan.max_steps,
                num_train_epochs=plan.epochs,
                logging_steps=args.get_interval("logging", plan.max_steps),
                eval_steps=args.get_interval("eval", plan.max_steps),
                save_steps=args.get_interval("save", plan.max_steps),
                train_batch_size=args.per_device_train_batch_size,
                log_history=self.state.log_history,  # what was evaluated before training
                world_size=size,
                global_batch_size=grid.global_batch_size,
            )
        )
        loader, seed = self._loader(self.train_dataset), args.seed if args.data_seed is None else args.data_seed
        run = Run(
            args=args,
            plan=plan,
            communicator=self.communicator,
            device=self.device,
            model=wrapped,
            bare_model=model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            grid=grid,
            loader=loader,
            feeds=make_feeds(loader, grid, self.communicator, seed, self.sinks.message),
            position=DataPosition(),
            callbacks=self.callback_handler,
            sums_in_order=in_order,
            weigh=self._loss_facts.weight,
            compute_loss=self._counted_loss,
            meter=Meter(self.sinks.step if self.world.is_main else None),
            say=self.sinks.message,
            log=self.log,
            evaluate=self.evaluate,
        )
        self.callback_handler.kwargs |= {
            "model": model,
            "optimizer": run.optimizer,
            "lr_scheduler": run.scheduler,
            "train_dataloader": run.loader,
        }
        if isinstance(grid, StreamGrid):
            self.sinks.message(f"the training stream {type(self.train_dataset).__name__} is split {grid.split.reason}")
        saver = Saver(run, checkpoints, self.processing_class)
        if folder is not None:
            self.sinks.message(saver.resume(folder))
        if in_order and (line := order_line(grid, size, sum(p.numel() * p.element_size() for p in run.parameters))):
            self.sinks.message(line)
        run.ledger = open_ledger(run, self._output_dir, with_rows=self._verification is not None)
        return run, saver

    def _finish(self, run: Run, first_step: int, seconds: float) -> "TrainOutput":
        state = self.state
        report = make_report(run, first_step, seconds, str(self._output_dir))
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(report.samples_per_second, 3),
            "train_steps_per_second": round((state.global_step - first_step) / seconds, 3),
            "train_loss": state.run.mean,
        }
        self.log(metrics)
        self.sinks.message(str(report))
        if state.skipped_steps:
            self.sinks.message(
                f"{state.skipped_steps} of {state.global_step} steps were left out, as their gradients were not finite"
            )
        return TrainOutput(state.global_step, state.run.mean, {**metrics, "epoch": state.epoch}, report)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that were not given; override to make your own."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.args)
        if self.lr_scheduler is None:
            self.lr_scheduler = make_scheduler(
                self.args.lr_scheduler_type,
                self.optimizer,
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                **_as_dict(self.args.lr_scheduler_kwargs),
            )
            self._made_scheduler = self.lr_scheduler

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

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Collective. Evaluate on `eval_dataset`, or on the Trainer's own; the metrics, the same on every rank.

        Raises:
            DataError: there is no dataset, or an empty one.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        only_loss = self.args.prediction_loss_only or self.compute_metrics is None
        with HERE.within("evaluate"):
            _, metrics = self._evaluated(dataset, ignore_keys, metric_key_prefix, only_loss)
        self.log(metrics)
        self.callback_handler.call("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Collective. What the model says about `test_dataset`, rows in its order, the same on every rank."""
        only_loss = self.args.prediction_loss_only
        with HERE.within("predict"):
            result, metrics = self._evaluated(test_dataset, ignore_keys, metric_key_prefix, only_loss, keeps_rows=not only_loss)
        self.callback_handler.call("on_predict", metrics=metrics)
        return PredictionOutput(result.predictions, result.label_ids, metrics)

    def _evaluated(
        self, dataset: Any, ignore_keys: list[str] | None, prefix: str, only_loss: bool, *, keeps_rows: bool = False
    ) -> tuple[EvaluationResult, dict[str, float]]:
        if dataset is not None and not is_stream(dataset):
            check_map_style(dataset)
        if dataset is None or (not is_stream(dataset) and not len(dataset)):
            raise DataError(f"There is nothing to evaluate: the dataset is {'missing' if dataset is None else 'empty'}.")
        began = time.perf_counter()
        args, model, communicator = self.args, self._ready_model(), self.communicator
        batch_size = args.per_device_eval_batch_size
        predictor = Predictor(
            model=model,
            compute_loss=self._counted_loss,
            label_names=self.label_names,
            only_loss=only_loss,
            ignored=ignore_keys or (),
            preprocess=self.preprocess_logits_for_metrics,
        )
        metrics = Metrics(
            None if only_loss else self.compute_metrics,
            self.device,
            by_batch=args.batch_eval_metrics,
            keeps_rows=keeps_rows,
            include=args.include_for_metrics,
        )

        def on_batch(said: Prediction) -> None:
            metrics.update(said)
            self.callback_handler.call("on_prediction_step")

        rounds = metrics.rounds()
        result = evaluation.evaluate(
            self._loader(dataset).evaluation(batch_size, communicator.rank, communicator.size, in_turns=rounds is not None),
            predictor,
            model,
            communicator,
            weigh=self._loss_facts.weight,
            device=self.device,
            seed=args.seed,
            keep=metrics.keep,
            forward_context=lambda: autocast(args, self.device),
            on_batch=on_batch,
            rounds=rounds,
        )
        if not result.samples:
            raise DataError(f"There is nothing to evaluate: the stream {type(dataset).__name__} is empty. Expected a sample.")
        computed = metrics.compute(result, communicator)
        seconds = max(time.perf_counter() - began, 1e-9)
        return result, summary(result, computed, prefix, seconds, math.ceil(result.samples / batch_size))

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
        self.callback_handler.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Take a callback out and return it, given itself or its class."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take a callback out, given itself or its class."""
        self.callback_handler.pop(callback)

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


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, on every rank."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    report: RunReport


def _made(model_init: Callable[[], nn.Module] | None) -> nn.Module:
    assert model_init is not None
    return bare(model_init())


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    assert not isinstance(value, str)  # JSON became a dict when the arguments were checked
    return value or {}
