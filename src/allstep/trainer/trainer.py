"""`Trainer`: what people construct. It puts the parts of a run together and hands them to `loop.train`."""

import os
import time
from typing import NamedTuple

from allstep.checkpoint.manager import CheckpointManager
from allstep.comm.watchdog import HERE
from allstep.data.position import DataPosition
from allstep.data.seeding import seed_generators
from allstep.data.streams import StreamGrid
from allstep.report.record import RunReport
from allstep.trainer import loop
from allstep.trainer.assembly import (
    make_feeds,
    make_grid,
    make_report,
    order_line,
    sums_in_order,
)
from allstep.trainer.decisions import heed_late_signals
from allstep.trainer.ledger import open_ledger
from allstep.trainer.meter import make_meter
from allstep.trainer.models.precision import precision_of
from allstep.trainer.models.prepare import in_training, wrap
from allstep.trainer.optimization.scaling import make_scaler
from allstep.trainer.run import Plan, Run
from allstep.trainer.saving import Saver
from allstep.trainer.state import TrainerState
from allstep.trainer.stopping import StopRequest, restarts, stop
from allstep.trainer.surface.base import made
from allstep.trainer.surface.evaluating import EvaluatingTrainer
from allstep.trainer.surface.keeping import KeepingTrainer
from allstep.trainer.surface.optimizing import OptimizingTrainer
from allstep.trainer.throughput import run_metrics
from allstep.trainer.verification import StopAfter

__all__ = ["TrainOutput", "Trainer"]


class Trainer(EvaluatingTrainer, OptimizingTrainer, KeepingTrainer):
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

    _ignored_in_evaluations: list[str] | None = None

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | None = None,
    ) -> "TrainOutput":
        """Collective. Train to the end and return the mean loss and the numbers of the run.

        Args:
            resume_from_checkpoint: a checkpoint folder, True for the newest whole one in `output_dir`, or "auto" for that one
                or the beginning. "true" and "false" are True and False. A job that its launcher has started again after a
                failure goes on from its own newest one where this is None or False.
            trial: None; there is no search of hyper-parameters here.
            ignore_keys_for_eval: keys of the model's outputs that evaluations during training leave out.
            model_path: the older name of `resume_from_checkpoint`.

        Raises:
            TypeError: a trial was given.
            DataError: there is nothing to train on.
            CheckpointError: `output_dir` cannot be written, or the checkpoint cannot be read.
            RankFailedError: another rank failed.
        """
        began = time.perf_counter()
        if trial is not None:
            raise TypeError("train(trial=...) is for a search of hyper-parameters, which is not supported; leave it out.")
        self._memory.begin("train")
        resume_from_checkpoint = resume_from_checkpoint or model_path
        self._ignored_in_evaluations = ignore_keys_for_eval
        if self._verification is not None:
            resume_from_checkpoint = self._verification.resume_from
            self.add_callback(StopAfter(self._verification.steps))
        if self._model_init is not None:
            seed_generators(self.args.seed)
            self.model = made(self._model_init)
            self.optimizer, self.lr_scheduler = self._own_optimizers
        if self.lr_scheduler is self._made_scheduler:
            self.lr_scheduler = None  # that of the run before, which is at its end
        checkpoints = CheckpointManager(self._output_dir, self.communicator, self.args.save_total_limit, say=self.sinks.message)
        try:
            output = self._train(checkpoints, resume_from_checkpoint, began)
        finally:
            checkpoints.close()
            self._memory.end("train")
        if self._verification is not None:
            raise SystemExit(0)  # what the script does afterwards is not looked at
        return output

    def _train(
        self, checkpoints: CheckpointManager, resume_from_checkpoint: str | os.PathLike[str] | bool | None, began: float
    ) -> "TrainOutput":
        run, saver = self._make_run(checkpoints, resume_from_checkpoint)
        self.last_run, self._saver = run, saver
        self.accelerator.scaler, self.accelerator.has_skipped = run.scaler, lambda: run.skipped_in_a_row > 0
        first_step, first_token = self.state.global_step, self.state.num_input_tokens_seen
        try:
            self.sinks.open(run.plan.max_steps, first_step)
            self.is_in_train = True
            with StopRequest() as request, in_training(self.model, self.args):
                run.model.raise_hand_if(request.is_asked)
                loop.train(run, saver)
                if heed_late_signals(run, request.is_asked()):
                    self.callback_handler.call("on_train_end")
                    stop(run, saver, request, self.sinks.message)
            if self.args.load_best_model_at_end:
                saver.load_best()
            output = self._finish(run, first_step, first_token, time.perf_counter() - began)
            self.callback_handler.call("on_train_end")
            if (words := saver.last_words()) is not None:
                self.sinks.message(words)
        finally:
            self.is_in_train = False
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
        self._resumed_batch = None if folder is None else checkpoints.global_batch_size(folder)
        source, grid = make_grid(args, self._find_source, self.communicator, self._resumed_batch)
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
                log_history=self.state.log_history if self.last_run is None else [],  # what was evaluated before training
                world_size=size,
                global_batch_size=grid.global_batch_size,
            )
        )
        loader = source.loader(args.seed)
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
            source=source,
            loader=loader,
            feeds=make_feeds(loader, grid, self.communicator, source.order, self.sinks.message),
            position=DataPosition(),
            callbacks=self.callback_handler,
            sums_in_order=in_order,
            scaler=make_scaler(precision_of(args), model, self.device, self.communicator, grid.global_batch_size),
            weigh=self._loss_facts.weight,
            compute_loss=self._counted_loss,
            training_step=self._step_of,
            has_own_step=self._has_own_step,
            has_own_parts=self._has_own_parts,
            meter=make_meter(
                args,
                model,
                self.communicator,
                self.device,
                self.processing_class,
                self.sinks.step if self.world.is_main else None,
                self.floating_point_ops,
            ),
            say=self.sinks.message,
            log=self.log,
            save=self._checkpoint,
            evaluate=self._evaluate,
        )
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = model, run.optimizer, run.scheduler
        handler.train_dataloader = self._train_dataloader
        handler.args, handler.processing_class = args, self.processing_class  # they may have been set since
        if isinstance(grid, StreamGrid):
            self.sinks.message(f"the training stream {type(source.dataset).__name__} is split {grid.split.reason}")
        saver = Saver(run, checkpoints, self.processing_class, self._own_way(), writes_together=self._has_own_save_model)
        if folder is not None:
            self.sinks.message(saver.resume(folder))
        if in_order and (line := order_line(grid, size, sum(p.numel() * p.element_size() for p in run.parameters))):
            self.sinks.message(line)
        run.ledger = open_ledger(run, self._output_dir, with_rows=self._verification is not None)
        return run, saver

    def _evaluate(self) -> dict[str, float]:
        """`evaluate`, for the loop; an override may have fewer parameters, and return nothing."""
        ignored = self._ignored_in_evaluations
        metrics: dict[str, float] | None = self.evaluate() if ignored is None else self.evaluate(ignore_keys=ignored)
        return metrics or {}

    def _finish(self, run: Run, first_step: int, first_token: int, seconds: float) -> "TrainOutput":
        state = self.state
        report = make_report(run, first_step, seconds, str(self._output_dir))
        counted = self.args.include_num_input_tokens_seen != "no"
        metrics = run_metrics(report, state, state.num_input_tokens_seen - first_token if counted else None)
        self._memory.end("train", metrics)
        self.log(metrics)
        self.sinks.message(str(report))
        if state.skipped_steps:
            self.sinks.message(
                f"{state.skipped_steps} of {state.global_step} steps were left out, as their gradients were not finite"
            )
        output = TrainOutput(state.global_step, state.run.mean, metrics)
        output.report = report
        return output


class _TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainOutput(_TrainOutput):
    """What `Trainer.train` returns, on every rank: three values, and what the run amounted to as `report`."""

    report: RunReport
