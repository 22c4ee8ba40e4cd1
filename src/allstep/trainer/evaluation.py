"""Evaluation and prediction: each sample once, rows in dataset order, full results on every rank.

The dataset is cut into batches, rank r of N takes the r-th contiguous block of them, and what the ranks computed is put
together in rank order. The loss is the mean over samples or label tokens, with the same weights as in training, summed batch by
batch in float64: it does not depend on the number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from allstep.comm.agreement import failing_together
from allstep.comm.communicator import Communicator
from allstep.data.collate import to_device
from allstep.data.loader import Feed
from allstep.data.seeding import mixed, preserved_generators, seed_generators
from allstep.ddp.sync import send_buffers
from allstep.trainer.losses import weight_of

__all__ = ["EvalPrediction", "EvaluationResult", "Prediction", "PredictionOutput", "evaluate"]

PADDING = -100
"""Fills rows that are shorter than the longest, as a label that counts nowhere."""


@dataclass
class EvalPrediction:
    """What `compute_metrics` is given: numpy arrays, or tuples of them, rows in dataset order."""

    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None

    def __iter__(self) -> Any:
        yield self.predictions
        yield self.label_ids
        yield from (extra for extra in (self.inputs, self.losses) if extra is not None)


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns, on every rank."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class Prediction(NamedTuple):
    """What the model said about one batch."""

    loss: torch.Tensor | None
    """0-dim; None where the batch has no labels."""
    predictions: Any
    labels: Any


@dataclass
class EvaluationResult:
    """What an evaluation gathered, the same on every rank."""

    loss: float | None
    """Weighted mean over the dataset; None where there were no labels."""
    samples: int
    predictions: Any = None
    label_ids: Any = None
    inputs: Any = None
    losses: Any = None


@dataclass
class _Rows:
    """What one rank computed."""

    losses: list[tuple[float, int]] = field(default_factory=list)  # (mean loss, weight) of each batch
    samples: int = 0
    arrays: dict[str, list[Any]] = field(default_factory=dict)  # name -> numpy arrays of each batch


def evaluate(
    feeds: Iterable[Feed],
    predict: Callable[[Any], Prediction],
    model: nn.Module,
    communicator: Communicator,
    *,
    label_names: Sequence[str],
    device: torch.device,
    seed: int,
    keep: frozenset[str],
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    on_batch: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Collective. Run `predict` on this rank's batches, with the model in eval mode, and put all ranks' results together.

    All ranks use rank 0's buffers, which are also those that a checkpoint has.

    Args:
        keep: what to gather beside the loss: "predictions", "label_ids", "inputs", "loss".
        forward_context: entered around every `predict`.
        on_batch: called after each batch of this rank.

    Raises:
        RankFailedError: another rank could not evaluate its part.
    """
    send_buffers(communicator, model)  # or each rank would evaluate with batch statistics of its own
    was_training = model.training
    model.eval()
    try:
        with failing_together(communicator, "evaluating"), preserved_generators(), torch.no_grad():
            rows = _Rows()
            for feed in feeds:
                seed_generators(mixed(seed, feed.micro_batch.number))
                inputs = to_device(feed.inputs, device)
                with forward_context():
                    said = predict(inputs)
                _add(rows, said, inputs, weight_of(feed.inputs, label_names), len(feed.sample_ids), keep)
                on_batch()
    finally:
        model.train(was_training)
    return _merged(communicator.all_gather_object(rows))


def _add(rows: _Rows, said: Prediction, inputs: Any, weight: int, samples: int, keep: frozenset[str]) -> None:
    rows.samples += samples
    if said.loss is not None and weight:
        rows.losses.append((float(said.loss), weight))
    parts = {
        "predictions": said.predictions,
        "label_ids": said.labels,
        "inputs": inputs,
        "loss": None if said.loss is None else said.loss.reshape(1).expand(samples),
    }
    for name in keep:
        if parts[name] is not None:
            rows.arrays.setdefault(name, []).append(_to_numpy(parts[name]))


def _merged(ranks: list[_Rows]) -> EvaluationResult:
    losses = [pair for rows in ranks for pair in rows.losses]
    weight = sum(weight for _, weight in losses)
    merged = {
        name: _concatenated([array for rows in ranks for array in rows.arrays.get(name, ())])
        for name in sorted({name for rows in ranks for name in rows.arrays})
    }
    return EvaluationResult(
        loss=math.fsum(loss * weight for loss, weight in losses) / weight if weight else None,
        samples=sum(rows.samples for rows in ranks),
        predictions=merged.get("predictions"),
        label_ids=merged.get("label_ids"),
        inputs=merged.get("inputs"),
        losses=merged.get("loss"),
    )


def _to_numpy(value: Any) -> Any:
    """Tensors as numpy arrays, in whatever holds them; bfloat16, which numpy lacks, as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_to_numpy(item) for item in value)
    return value


def _concatenated(batches: list[Any]) -> Any:
    """Rows of all batches; arrays of unequal width are filled with `PADDING`, or 0 where the dtype has none."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: _concatenated([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenated([batch[index] for batch in batches]) for index in range(len(first)))
    if not isinstance(first, np.ndarray):
        return batches
    if first.ndim < 2 or len({batch.shape[1:] for batch in batches}) == 1:
        return np.concatenate([np.atleast_1d(batch) for batch in batches])
    widest = [max(batch.shape[axis] for batch in batches) for axis in range(1, first.ndim)]
    filler = 0 if first.dtype.kind in "bu" else PADDING  # booleans and unsigned numbers have no -100
    rows = np.full((sum(len(batch) for batch in batches), *widest), filler, dtype=first.dtype)
    at = 0
    for batch in batches:
        place = (slice(at, at + len(batch)), *map(slice, batch.shape[1:]))
        rows[place] = batch
        at += len(batch)
    return rows
