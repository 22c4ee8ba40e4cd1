"""A run, from top to bottom: fetch, forward, backward, reduce, step, report, evaluate, save.

Every rank runs these lines, one rank or many. The order of things within an optimizer step stands in `step.py`; which samples
it is made of, in `data/grid.py`; how gradients become the mean over ranks, in `ddp/reducer.py`.
"""

from collections.abc import Iterator

from allstep.data.grid import training_picks
from allstep.data.loader import Feed
from allstep.data.position import DataPosition
from allstep.trainer.ledger import note_step
from allstep.trainer.meter import StepResult
from allstep.trainer.run import Run
from allstep.trainer.saving import Saver
from allstep.trainer.step import take_step

__all__ = ["train"]


def train(run: Run, saver: Saver) -> None:
    """Take the steps of `run` that are still to be taken."""
    state = run.callbacks.state
    run.bare_model.train()
    run.optimizer.zero_grad(set_to_none=True)
    run.callbacks.call("on_train_begin")
    if run.args.eval_on_start and state.global_step == 0:
        _evaluate(run)
    feeds = _feeds(run)
    while state.global_step < run.plan.max_steps and not run.callbacks.control.should_training_stop:
        _epoch(run, saver, feeds)
        if run.position.step:  # a callback ended the epoch before its end
            run.position = state.position = DataPosition(epoch=run.position.epoch + 1)
            feeds = _feeds(run)
    run.settle()
    run.callbacks.call("on_train_end")


def _feeds(run: Run) -> Iterator[Feed]:
    """This rank's micro-batches up to the end of the run; loader workers go on fetching over the ends of epochs."""
    steps = run.plan.max_steps - run.callbacks.state.global_step
    rank, size = run.communicator.rank, run.communicator.size
    return run.loader.feeds(training_picks(run.grid, run.position, steps, rank, size, run.seed))


def _epoch(run: Run, saver: Saver, feeds: Iterator[Feed]) -> None:
    """The rest of the epoch at `run.position`."""
    rank, size, epoch = run.communicator.rank, run.communicator.size, run.position.epoch
    run.callbacks.call("on_epoch_begin")
    for step in range(run.position.step, run.grid.steps_per_epoch):
        run.callbacks.call("on_step_begin")
        result = take_step(run, feeds, run.grid.window(epoch, step, rank, size))
        _advance(run, result)
        run.callbacks.call("on_step_end")
        _log_evaluate_save(run, saver, result)
        if run.callbacks.control.should_training_stop or run.callbacks.control.should_epoch_stop:
            break
    run.callbacks.control.should_epoch_stop = False
    run.callbacks.call("on_epoch_end")
    _log_evaluate_save(run, saver, result)


def _advance(run: Run, result: StepResult) -> None:
    """A step is done: move state and position on."""
    state, position, steps = run.callbacks.state, run.position, run.grid.steps_per_epoch
    state.global_step += 1
    state.epoch = position.epoch + (position.step + 1) / steps
    run.position = state.position = position.advanced(steps)
    note_step(run, result, position.epoch)
    run.meter.add(result, run.grid.samples_before(position.step + 1) - run.grid.samples_before(position.step), state)


def _log_evaluate_save(run: Run, saver: Saver, result: StepResult) -> None:
    """Do what callbacks asked for, in this order, so that a checkpoint holds what was logged and measured."""
    control = run.callbacks.control
    if control.should_log:
        _log(run, result)
    if control.should_evaluate and saver.note(_evaluate(run)) and run.args.save_strategy == "best":
        control.should_save = True
    if control.should_save:
        run.settle()
        with run.meter.paused():
            saver.save()
        run.callbacks.call("on_save")
    control.should_log = control.should_evaluate = control.should_save = False


def _log(run: Run, result: StepResult) -> None:
    state = run.callbacks.state
    run.meter.settle(state)
    if not state.interval.weight:
        return  # logged already at this step
    logs = {"loss": state.interval.mean, "learning_rate": result.learning_rate}
    if result.grad_norm is not None:
        logs["grad_norm"] = float(result.grad_norm)
    state.interval.clear()
    run.log(logs)


def _evaluate(run: Run) -> dict[str, float]:
    with run.meter.paused():
        metrics = run.evaluate()
    run.bare_model.train()
    return metrics
