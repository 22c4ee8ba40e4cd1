"""`Trainer`: what people construct. It puts the parts of a run together and hands them to `loop.train`."""

import os
import time
from typing import Any, NamedTuple

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
from allstep.trainer.base import made
from allstep.trainer.decisions import heed_late_signals
from allstep.trainer.evaluating import EvaluatingTrainer
from allstep.trainer.ledger import open_ledger
from allstep.trainer.meter import make_meter
from allstep.trainer.models import wrap
from allstep.trainer.optimizers import make_optimizer
from allstep.trainer.run import Plan, Run
from allstep.trainer.saving import Saver
from allstep.trainer.schedulers import make_scheduler
from allstep.trainer.state import TrainerState
from allstep.trainer.stopping import StopRequest, restarts, stop
from allstep.trainer.verification import StopAfter

__all__ = ["TrainOutput", "Trainer"]


class Trainer(EvaluatingTrainer):
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
            self.model = made(self._model_init)
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
            meter=make_meter(
                args,
                model,
                self.communicator,
                self.device,
                self.processing_class,
                self.sinks.step if self.world.is_main else None,
            ),
            say=self.sinks.message,
            log=self.log,
            evaluate=self.evaluate,
        )
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = model, run.optimizer, run.scheduler
        handler.train_dataloader = run.loader
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


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, on every rank."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    report: RunReport


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    assert not isinstance(value, str)  # JSON became a dict when the arguments were checked
    return value or {}
