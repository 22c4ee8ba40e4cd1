"""What a run writes into its ledger, and when."""

from pathlib import Path

import torch

from allstep.comm.agreement import failing_together
from allstep.report.ledger import LEDGER_FOLDER, Ledger, cut_ledger
from allstep.trainer.meter import StepResult
from allstep.trainer.run import Run

__all__ = ["note_gradients", "note_step", "open_ledger"]


def open_ledger(run: Run, output_dir: Path, *, with_rows: bool) -> Ledger | None:
    """Collective. The ledger of `run`, where its arguments ask for one; lines of steps that will be done again are gone.

    Raises:
        OSError: it cannot be written.
        RankFailedError: another rank cannot write its own.
    """
    if not run.args.ledger:
        return None
    folder, rank = output_dir / LEDGER_FOLDER, run.communicator.rank
    with failing_together(run.communicator, "opening the ledger"):
        if rank == 0:
            cut_ledger(folder, run.callbacks.state.global_step)
    size = run.communicator.size
    facts = {
        "world_size": size,
        "threads": torch.get_num_threads(),
        "block": run.grid.micro_batches_per_step // size,
        "in_order": run.sums_in_order,
    }
    with failing_together(run.communicator, "opening the ledger"):
        return Ledger(folder, rank, facts, digest_steps=run.args.ledger_digest_steps, with_rows=with_rows)


def note_gradients(run: Run) -> None:
    """Digests of the reduced gradients, where they are due; before they are clipped."""
    if run.ledger is not None and run.ledger.is_due(run.callbacks.state.global_step + 1):
        run.ledger.note_tensors("gradients", ((name, p.grad) for name, p in run.bare_model.named_parameters()))


def note_step(run: Run, result: StepResult, epoch: int) -> None:
    """The step that has just been counted, of samples of `epoch`."""
    ledger, step = run.ledger, run.callbacks.state.global_step
    if ledger is None:
        return
    if ledger.is_due(step):
        ledger.note_tensors("parameters", run.bare_model.named_parameters())
        ledger.note_tensors("buffers", run.bare_model.named_buffers())
    mean = result.loss_sum / result.weight_sum
    numbers = {"loss": mean, "weight": result.weight_sum, "grad_norm": result.grad_norm}
    ledger.end_step(step, epoch, learning_rate=result.learning_rate, **numbers)
