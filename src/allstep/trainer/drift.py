"""Ranks whose weights have come apart: found by comparing digests, named, and brought together again where that is asked for.

Replicas that start equal and take equal steps stay equal to the bit. Where they do not, memory, a device or a callback has
changed one of them, and every gradient from then on is that of different models.
"""

from collections import Counter
from collections.abc import Iterator

import torch

from allstep.comm.agreement import digest, first_difference
from allstep.errors import ReplicaError
from allstep.trainer.run import Run
from allstep.words import ranks_in_words

__all__ = ["check_drift", "is_due", "majority"]


def is_due(run: Run) -> bool:
    """Whether the arguments ask for a comparison after this step."""
    every = run.args.ddp_drift_check_steps
    return every > 0 and run.communicator.size > 1 and run.callbacks.state.global_step % every == 0


def check_drift(run: Run) -> None:
    """Collective. Compare all ranks' weights, bit by bit.

    Raises:
        ReplicaError: on every rank, where they differ and the arguments say "raise"; with step, ranks and the first tensor.
    """
    communicator = run.communicator
    if communicator.size == 1:
        return
    digests = communicator.all_gather_object(digest(run.bare_model.named_parameters()))
    if len(set(digests)) == 1:
        return
    source = majority(digests)
    others = [rank for rank, each in enumerate(digests) if each != digests[source]]
    counted = Counter(digests)[digests[source]]
    kept = f"{counted} of {communicator.size} ranks agree"
    if counted == 1:
        kept = "No two ranks agree, so nobody can tell which is right"
    difference = first_difference(communicator, run.bare_model.named_parameters())
    text = (
        f"Weights have come apart after step {run.callbacks.state.global_step}: {difference}. "
        f"{kept}{f'; {ranks_in_words(others)} differ' if counted > 1 else ''}."
    )
    if run.args.ddp_drift_action == "raise":
        raise ReplicaError(
            f"{text} Memory or a device may be faulty there, or a callback changes the model on one rank alone. Go on from a "
            f'checkpoint of before, or let ddp_drift_action="repair" give all ranks the weights of rank {source}.'
        )
    state = list(_state(run))
    names = communicator.all_gather_object([name for name, _ in state])
    if any(each != names[source] for each in names):
        raise ReplicaError(f"{text} It cannot be repaired: the optimizers of the ranks do not keep the same tensors.")
    communicator.broadcast([tensor for _, tensor in state], source)
    run.say(f"{text} All ranks go on with the weights and the optimizer state of rank {source}.")


def majority(digests: list[str]) -> int:
    """The first rank of those that most ranks agree with; rank 0 where no two agree, or as many hold one thing as another."""
    (first, count), *rest = Counter(digests).most_common()
    if count == 1 or (rest and rest[0][1] == count):
        return 0
    return digests.index(first)


def _state(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and what the optimizer keeps of each, in an order that is equal on all ranks."""
    for name, parameter in run.bare_model.named_parameters():
        yield name, parameter.detach()
        kept = run.optimizer.state.get(parameter, {})
        for key in sorted(kept):
            if isinstance(kept[key], torch.Tensor):
                yield f"{name}.{key}", kept[key]
