"""One optimizer step: gradients of the window, reduced; unscale; clip; move the weights, or leave the step out."""

import math

import torch

from allstep.comm.watchdog import HERE
from allstep.trainer.ledger import note_gradients
from allstep.trainer.memory import Reduced, free_device_memory, reduce_within_memory
from allstep.trainer.meter import StepResult
from allstep.trainer.nonfinite import report_nonfinite
from allstep.trainer.optimization.gradients import clip_gradients, drop_gradients, gradient_norm
from allstep.trainer.optimization.metric_schedulers import advance
from allstep.trainer.optimization.scaling import AgreedGradScaler
from allstep.trainer.run import Run

__all__ = ["take_step"]


def take_step(run: Run, epoch: int, step: int) -> StepResult:
    """Collective. Run this rank's window of a step, and let the optimizer take that step, the same on every rank.

    Args:
        run: the run.
        epoch: pass over the data.
        step: optimizer step in that pass.

    Raises:
        RankFailedError: another rank could not run its window; the optimizer has not moved.
        NonFiniteGradientsError: gradients are not finite, and the arguments do not say to go on; neither has it.
        Exception: whatever this rank's data or model raised, after the other ranks were told.
    """
    free_device_memory(run)
    reduced = reduce_within_memory(run, epoch, step)
    HERE.enter("optimizer")
    if run.scaler is not None and _overflows(run, run.scaler):
        return _pass_over(run, reduced)
    norm = _norm(run)
    if norm is not None and run.args.nonfinite_gradients != "ignore" and not math.isfinite(norm):
        return _leave_out(run, reduced)
    run.skipped_in_a_row = 0
    return _step(run, norm if run.args.max_grad_norm > 0 else None)


def _norm(run: Run) -> torch.Tensor | None:
    """The norm of the reduced gradients, 0-dim, which are clipped to what the arguments say; None where nobody asks for it."""
    note_gradients(run)
    if run.args.max_grad_norm > 0:
        return clip_gradients(run.parameters, run.args.max_grad_norm)
    return None if run.args.nonfinite_gradients == "ignore" else gradient_norm(run.parameters)


def _overflows(run: Run, scaler: AgreedGradScaler) -> bool:
    """Collective. Take the scale out of the gradients; whether they are infinite because of it, and not by themselves."""
    totals = run.model.totals
    assert totals is not None
    weight = float(totals.weight)
    overflowed = scaler.unscale_gradients(run.optimizer, weight)
    return overflowed and (run.args.nonfinite_gradients == "ignore" or not scaler.is_used_up(weight))


def _pass_over(run: Run, reduced: Reduced) -> StepResult:
    """Gradients were scaled up too far for float16: the next step has a smaller scale."""
    run.say(f"step {run.callbacks.state.global_step + 1}: gradients overflow in float16; it is left out, and the scale halved")
    return _not_taken(run, reduced)


def _leave_out(run: Run, reduced: Reduced) -> StepResult:
    """Collective. The gradients are not finite: raise, or count the step, and leave everything as it was."""
    text = report_nonfinite(run, reduced.counted)
    run.say(f"{text}\n  This step is left out.")
    run.skipped_in_a_row += 1
    return _not_taken(run, reduced)


def _not_taken(run: Run, reduced: Reduced) -> StepResult:
    """Drop the gradients, and put buffers back where they were copied."""
    totals = run.model.totals
    assert totals is not None
    reduced.buffers.put_back()
    drop_gradients(run.optimizer)
    learning_rate = float(run.optimizer.param_groups[0]["lr"])
    return StepResult(totals.carried, totals.weight, None, learning_rate, skipped=True)


def _step(run: Run, norm: torch.Tensor | None) -> StepResult:
    totals = run.model.totals
    assert totals is not None
    run.callbacks.call("on_pre_optimizer_step")
    learning_rate = float(run.optimizer.param_groups[0]["lr"])
    run.optimizer.step()
    run.callbacks.call("on_optimizer_step")
    advance(run.scheduler)
    drop_gradients(run.optimizer)
    return StepResult(totals.carried, totals.weight, norm, learning_rate)
