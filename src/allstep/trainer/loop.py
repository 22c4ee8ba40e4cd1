"""A run, from top to bottom: fetch, forward, backward, reduce, step, report, evaluate, save.

Every rank runs these lines, one rank or many. The order of things within an optimizer step stands in `step.py`; which samples
it is made of, in `data/grid.py` and, for streams, in `data/streams.py`; how gradients become the mean over ranks, in
`ddp/reducer.py`.
"""

import itertools

from allstep.comm.watchdog import HERE
from allstep.data.position import DataPosition
from allstep.data.streams import StreamGrid
from allstep.trainer.decisions import EVALUATION_EVENTS, STEP_EVENTS, agree, find_deciders, heed_signals
from allstep.trainer.drift import check_drift, is_due
from allstep.trainer.ledger import note_step
from allstep.trainer.meter import StepResult
from allstep.trainer.optimization.metric_schedulers import advance_by_metric
from allstep.trainer.optimization.optimizers import resting, set_training
from allstep.trainer.run import Run
from allstep.trainer.saving import Saver
from allstep.trainer.step import take_step

__all__ = ["save", "train"]


def train(run: Run, saver: Saver) -> None:
    """Take the steps of `run` that are still to be taken."""
    state = run.callbacks.state
    run.bare_model.train()
    set_training(run.optimizer, True)
    run.optimizer.zero_grad(set_to_none=True)
    find_deciders(run)
    run.callbacks.call("on_train_begin")
    agree(run, ["on_train_begin"])
    if run.args.eval_on_start and state.global_step == 0:
        _evaluate(run)
        agree(run, EVALUATION_EVENTS)
    _begin(run)
    run.meter.begin()
    while _goes_on(run):
        _epoch(run, saver)
        if run.position.step and not run.is_stopping:  # a callback ended the epoch before its end
            run.position = state.position = DataPosition(epoch=run.position.epoch + 1)
            _begin(run)
    HERE.enter("the end of training")
    saver.finish()
    run.settle()
    set_training(run.optimizer, False)
    run.meter.gather(state)


def _goes_on(run: Run) -> bool:
    """Whether there are steps and epochs left; an epoch that a callback ended early counts as one."""
    return (
        run.callbacks.state.global_step < run.plan.max_steps
        and (run.position.epoch < run.plan.epochs or isinstance(run.grid, StreamGrid))  # which may have been longer than it is
        and not run.callbacks.control.should_training_stop
    )


def _begin(run: Run) -> None:
    """Fetch from `run.position` on; a checkpoint may have been written where a stream ended, but nobody knew it yet."""
    run.feeds.begin(run.position, run.plan.max_steps - run.callbacks.state.global_step)
    if run.position.step and not run.feeds.has_step(run.position.epoch, run.position.step):
        run.position = run.callbacks.state.position = DataPosition(epoch=run.position.epoch + 1)


def _epoch(run: Run, saver: Saver) -> None:
    """The rest of the epoch at `run.position`."""
    epoch, state = run.position.epoch, run.callbacks.state
    run.callbacks.call("on_epoch_begin")
    agree(run, ["on_epoch_begin"])
    _show_data_anew(run)
    for step in itertools.count(run.position.step):
        if not run.feeds.has_step(epoch, step):
            run.position = state.position = DataPosition(epoch=epoch + 1)
            state.epoch = epoch + 1.0
            break
        HERE.step = state.global_step + 1
        HERE.enter("callbacks")
        run.callbacks.call("on_step_begin")
        result = take_step(run, epoch, step)
        HERE.enter("callbacks")
        _advance(run, result)
        run.callbacks.call("on_step_end")
        heed_signals(run)
        agree(run, STEP_EVENTS)
        if is_due(run):
            check_drift(run)
        _log_evaluate_save(run, saver, result)
        if run.callbacks.control.should_training_stop or run.callbacks.control.should_epoch_stop:
            break
    run.callbacks.control.should_epoch_stop = False
    if run.is_stopping:
        return  # the epoch goes on when the run does
    run.callbacks.call("on_epoch_end")
    agree(run, ["on_epoch_end"])
    _log_evaluate_save(run, saver, result)


def _show_data_anew(run: Run) -> None:
    """Tell a map-style dataset the epoch; loader workers, which have copies of it, begin anew where it may have changed."""
    dataset, options = run.source.dataset, run.source.options
    if run.source.order is None:
        return  # streams are told by their readers
    tell = getattr(dataset, "set_epoch", None)
    if callable(tell):
        tell(run.position.epoch)
    heard = not run.deciding_events.isdisjoint(("on_epoch_begin", "on_epoch_end"))
    if options.num_workers and not options.persistent_workers and (heard or callable(tell)):
        run.feeds.begin(run.position, run.plan.max_steps - run.callbacks.state.global_step)


def _advance(run: Run, result: StepResult) -> None:
    """A step is done: move state and position on."""
    state, position = run.callbacks.state, run.position
    state.global_step += 1
    state.skipped_steps += result.skipped
    state.epoch = run.feeds.epoch_at(position.epoch, position.step + 1, run.plan.max_steps)
    run.position = state.position = run.feeds.advanced(position)
    note_step(run, result, position.epoch)
    run.meter.add(result, run.grid.samples_before(position.step + 1) - run.grid.samples_before(position.step), state)


def _log_evaluate_save(run: Run, saver: Saver, result: StepResult) -> None:
    """Do what callbacks asked for, in this order, so that a checkpoint holds what was logged and measured."""
    wanted = run.callbacks.control.should_save
    if saver.poll():
        run.callbacks.control.should_save |= wanted  # what came in is of an earlier step
        agree(run, ["on_save"])
    if run.callbacks.control.should_log:
        _log(run, result)
        agree(run, ["on_log"])
    if run.callbacks.control.should_evaluate:
        metrics = _evaluate(run)
        advance_by_metric(run.scheduler, metrics, run.args.metric_for_best_model, run.communicator)
        if saver.note(metrics) and run.args.save_strategy == "best":
            run.callbacks.control.should_save = True
        agree(run, EVALUATION_EVENTS)
    if run.callbacks.control.should_save:
        run.save()
        agree(run, ["on_save"])
    control = run.callbacks.control
    control.should_log = control.should_evaluate = control.should_save = False


def save(run: Run, saver: Saver) -> None:
    """Collective. Write a checkpoint of where the run stands."""
    run.settle()
    run.meter.gather(run.callbacks.state)
    with run.meter.paused(), HERE.within("save"), resting(run.optimizer):
        check_drift(run)  # weights that differ are worth no checkpoint
        saver.save()


def _log(run: Run, result: StepResult) -> None:
    state = run.callbacks.state
    run.meter.settle(state)
    if not run.meter.has_news:
        return  # logged already at this step
    logs = {"loss": state.interval.mean} if state.interval.weight else {}  # else no label counted
    if result.grad_norm is not None:
        logs["grad_norm"] = float(result.grad_norm)
    logs |= {"learning_rate": result.learning_rate, "epoch": state.epoch}
    if state.skipped_steps:
        logs["skipped_steps"] = state.skipped_steps
    state.interval.clear()
    run.log(logs | run.meter.logs(state))


def _evaluate(run: Run) -> dict[str, float]:
    with run.meter.paused(), resting(run.optimizer):
        metrics = run.evaluate()
    run.bare_model.train()
    return metrics
