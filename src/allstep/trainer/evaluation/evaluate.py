"""Evaluation and prediction: each sample once, rows in dataset order, full results on every rank.

The dataset is cut into batches, rank r of N takes the r-th contiguous block of them (of a stream: each N-th), and what the
ranks computed is put together in the order of the batches. The loss is the mean over samples or label tokens, with the same
weights as in training, summed batch by batch without rounding: it has the same bits on any number of ranks. What is not asked
for is not kept, so that memory does not grow with the dataset.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from allstep.comm.agreement import failing_together
from allstep.comm.communicator import Communicator
from allstep.data.collate import size_of
from allstep.data.dataloaders import Source
from allstep.data.grid import evaluation_batches, evaluation_picks
from allstep.data.loader import Feed
from allstep.data.seeding import mixed, preserved_generators, seed_generators
from allstep.data.stream_loader import StreamLoader
from allstep.ddp.sync import send_buffers
from allstep.trainer.evaluation.exact_sum import ExactSum
from allstep.trainer.evaluation.gathering import by_batch, gathered, in_order, outlined, to_numpy
from allstep.trainer.models.precision import in_evaluation_dtype

__all__ = [
    "EvalLoopOutput",
    "EvalPrediction",
    "EvaluationResult",
    "Prediction",
    "PredictionOutput",
    "Rounds",
    "Spare",
    "evaluate",
    "feeds_of",
    "spare_of",
]

UNREAD = 64
"""Losses that are left on the device before they are read, so that it is seldom waited for."""


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

    def __getitem__(self, at: int) -> Any:
        return tuple(self)[at]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns, on every rank."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns, on every rank."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


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


class Rounds(NamedTuple):
    """Every rank computes a batch, then all ranks see the batches of all, and nothing is kept.

    Each rank then has every N-th batch, so that batches come in dataset order.
    """

    parts: frozenset[str]
    """What they see of it: "predictions", "label_ids", "inputs", "loss"."""
    see: Callable[[EvalPrediction, bool], None]
    """Called on every rank with every batch, and with whether it is the last."""


class Spare(NamedTuple):
    """A batch that counts nowhere, for ranks that have fewer than others: user code may talk to the other ranks in each."""

    most: int
    """Batches of the rank that has most."""
    fetch: Callable[[], Feed]


def feeds_of(source: Source, seed: int, communicator: Communicator, *, in_turns: bool) -> Iterator[Feed]:
    """The batches of `source` that this rank evaluates; with `in_turns`, each N-th."""
    loader, rank, size = source.loader(seed), communicator.rank, communicator.size
    if isinstance(loader, StreamLoader):
        return loader.evaluation(source.batch_size, rank, size)
    return loader.evaluation(source.batch_size, rank, size, in_turns=in_turns, order=source.order, drop_last=source.drop_last)


def spare_of(source: Source, seed: int, communicator: Communicator) -> Spare | None:
    """What ranks run where others have more batches of `source`; None where there is one rank, and for streams."""
    loader, order = source.loader(seed), source.order
    if communicator.size == 1 or order is None or isinstance(loader, StreamLoader):
        return None
    most = -(-evaluation_batches(len(order), source.batch_size, drop_last=source.drop_last) // communicator.size)
    return Spare(most, lambda: loader.fetch(next(evaluation_picks(len(order), source.batch_size, 0, 1, order))))


def evaluate(
    feeds: Iterable[Feed],
    predict: Callable[[Any], Prediction],
    model: nn.Module,
    communicator: Communicator,
    *,
    weigh: Callable[[Any], float],
    device: torch.device,
    seed: int,
    keep: frozenset[str],
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    on_batch: Callable[[Prediction], None] = lambda said: None,
    rounds: Rounds | None = None,
    spare: Spare | None = None,
    rows_by_inputs: bool = False,
    main_input: str = "input_ids",
    concatenates: bool = True,
    dtype: torch.dtype | None = None,
) -> EvaluationResult:
    """Collective. Run `predict` on this rank's batches, with the model in eval mode, and put all ranks' results together.

    All ranks use rank 0's buffers, which are also those that a checkpoint has.

    Args:
        predict: given inputs, which are not on the device yet.
        weigh: what the mean loss of inputs is taken over.
        keep: what to gather beside the loss: "predictions", "label_ids", "inputs", "loss"; nothing where ranks go in rounds.
        forward_context: entered around every `predict`.
        on_batch: called after each batch of this rank.
        rounds: where every rank is to see every batch.
        spare: what a rank computes besides, so that all call `predict` as often; None where they need not.
        rows_by_inputs: a feed's inputs tell how many samples they are, not its sample ids.
        main_input: name of the one that is kept where inputs are; all of them where there is none of that name.
        concatenates: give one array of all rows; else a list with those of each batch.
        dtype: what the model is cast to meanwhile; None for nothing.

    Raises:
        RankFailedError: another rank could not evaluate its part.
    """
    rows = _Rows(keep)

    def run(feed: Feed) -> dict[str, Any]:
        seed_generators(mixed(seed, feed.micro_batch.number))
        weight, inputs = weigh(feed.inputs), dict(feed.inputs) if type(feed.inputs) is dict else feed.inputs
        samples = (size_of(feed.inputs) if rows_by_inputs else None) or len(feed.sample_ids)
        with forward_context():
            said = predict(inputs)
        rows.add(said, weight, feed.micro_batch.number, samples)
        on_batch(said)
        has_main = isinstance(feed.inputs, Mapping) and main_input in feed.inputs
        return _parts(said, feed.inputs[main_input] if has_main else feed.inputs, samples)

    def run_spare() -> None:
        if spare is not None and len(rows.batches) < spare.most:
            with forward_context():
                predict(spare.fetch().inputs)

    send_buffers(communicator, model)  # or each rank would evaluate with batch statistics of its own
    was_training = model.training
    model.eval()
    try:
        with preserved_generators(), torch.no_grad(), in_evaluation_dtype(model, dtype):
            if rounds is None:
                with failing_together(communicator, "evaluating"):
                    for feed in feeds:
                        rows.keep_parts(run(feed))
                    run_spare()
            else:
                _go_in_rounds(iter(feeds), run, rounds, communicator, device, run_spare)
    finally:
        model.train(was_training)
    return _merged(rows, communicator, device, concatenates)


class _Rows:
    """What one rank computed."""

    def __init__(self, keep: frozenset[str]) -> None:
        self.loss_sum, self.weight_sum = ExactSum(), ExactSum()
        self.batches: list[tuple[int, int]] = []  # number and samples of each
        self.kept: dict[str, list[Any]] = {name: [] for name in sorted(keep)}  # name -> arrays of each batch
        self._unread: list[tuple[torch.Tensor, float]] = []

    def add(self, said: Prediction, weight: float, number: int, samples: int) -> None:
        """Count batch `number` in."""
        self.batches.append((number, samples))
        if said.loss is not None and weight:
            self._unread.append((said.loss.detach().reshape(()), weight))
            if len(self._unread) >= UNREAD:
                self.settle()

    def settle(self) -> None:
        """Read losses from the device."""
        if not self._unread:
            return
        for loss, (_, weight) in zip(torch.stack([loss for loss, _ in self._unread]).tolist(), self._unread, strict=True):
            self.loss_sum.add(loss * weight)
            self.weight_sum.add(float(weight))
        self._unread.clear()

    def keep_parts(self, parts: Mapping[str, Any]) -> None:
        """Keep of a batch what was asked for."""
        for name, batches in self.kept.items():
            if parts[name] is not None:
                batches.append(to_numpy(parts[name]))


def _parts(said: Prediction, inputs: Any, samples: int) -> dict[str, Any]:
    """What can be kept of a batch, by its name."""
    return {
        "predictions": said.predictions,
        "label_ids": said.labels,
        "inputs": inputs,
        "loss": None if said.loss is None else said.loss.reshape(1).expand(samples),
    }


def _merged(rows: _Rows, communicator: Communicator, device: torch.device, concatenates: bool) -> EvaluationResult:
    with failing_together(communicator, "putting together what was evaluated"):
        rows.settle()
        outlines = {name: outlined(batches) for name, batches in rows.kept.items()}
    ranks = communicator.all_gather_object((rows.loss_sum.parts, rows.weight_sum.parts, rows.batches, outlines))
    loss_sum, weight_sum, batches = ExactSum(), ExactSum(), []
    for losses, weights, of_rank, _ in ranks:
        batches += of_rank
        for value in losses:
            loss_sum.add(value)
        for value in weights:
            weight_sum.add(value)
    merged = {
        name: in_order(gathered(rows.kept.pop(name), [each[name] for *_, each in ranks], communicator, device), batches)
        for name in list(rows.kept)
    }
    if not concatenates:
        sizes = [samples for _, samples in sorted(batches)]
        merged = {name: by_batch(value, sizes) for name, value in merged.items()}
    weight = weight_sum.total()
    return EvaluationResult(
        loss=loss_sum.total() / weight if weight else None,
        samples=sum(samples for _, samples in batches),
        predictions=merged.get("predictions"),
        label_ids=merged.get("label_ids"),
        inputs=merged.get("inputs"),
        losses=merged.get("loss"),
    )


def _go_in_rounds(
    feeds: Iterator[Feed],
    run: Callable[[Feed], dict[str, Any]],
    rounds: Rounds,
    communicator: Communicator,
    device: torch.device,
    run_spare: Callable[[], None],
) -> None:
    """A batch on every rank, then all of them to all."""
    names = ("predictions", "label_ids", "inputs", "loss")
    with failing_together(communicator, "evaluating"):
        coming = next(feeds, None)
    while True:
        with failing_together(communicator, "evaluating"):
            feed, coming = coming, next(feeds, None)
            if feed is None:
                run_spare()
            own = [] if feed is None else [{name: part for name, part in run(feed).items() if name in rounds.parts}]
            own = [to_numpy({name: part for name, part in parts.items() if part is not None}) for parts in own]
            outline = outlined(own)
        said = communicator.all_gather_object((outline, feed is not None, coming is not None))
        outlines, having = [each for each, _, _ in said], sum(has for _, has, _ in said)
        is_last = not any(more for _, _, more in said)
        seen = [
            gathered(
                own if rank == communicator.rank else [],
                [each if at == rank else None for at, each in enumerate(outlines)],
                communicator,
                device,
            )
            for rank in range(having)
        ]
        with failing_together(communicator, "computing metrics"):
            for number, batch in enumerate(seen, 1):
                prediction = EvalPrediction(*(batch.get(name) for name in names))
                rounds.see(prediction, is_last and number == having)
        if is_last:
            return
