"""How long samples are, for orders that put like lengths together."""

from collections.abc import Mapping, Sequence
from typing import Any

from allstep.errors import DataError

__all__ = ["has_transform", "lengths_of"]

_INPUTS = ("input_ids", "input_values", "input_features")
"""Columns whose lengths are those of samples, where a tokenizer or processor does not say otherwise."""


def lengths_of(dataset: Any, column: str, processing_class: Any = None) -> Sequence[int]:
    """The length of every sample: what stands in `column`, else the length of the model's main input.

    Args:
        dataset: map-style.
        column: name of a column that holds lengths (`length_column_name`).
        processing_class: a tokenizer or processor, whose first `model_input_names` is the main input.

    Raises:
        DataError: samples have neither.
    """
    columns = () if has_transform(dataset) else getattr(dataset, "column_names", None) or ()  # it takes whole samples
    if column in columns:
        return [int(length) for length in dataset[column]]
    first = dataset[0]
    if isinstance(first, Mapping) and column in first:
        return [int(dataset[index][column]) for index in range(len(dataset))]
    names = [*(getattr(processing_class, "model_input_names", None) or ())[:1], *_INPUTS]
    name = next((name for name in names if isinstance(first, Mapping) and name in first), None)
    if name is None:
        found = f"the columns {', '.join(map(str, first))}" if isinstance(first, Mapping) else type(first).__name__
        raise DataError(
            f"train_sampling_strategy needs the lengths of samples: found {found}; expected {column!r} (length_column_name) or "
            f"one of {', '.join(dict.fromkeys(names))}. Add such a column, or override Trainer._get_train_sampler."
        )
    if name in columns:
        return [len(each) for each in dataset[name]]
    return [len(dataset[index][name]) for index in range(len(dataset))]


def has_transform(dataset: Any) -> bool:
    """Whether `dataset` is a `datasets.Dataset` whose samples are made by a function (`set_transform`), from any columns."""
    given = getattr(dataset, "format", None)
    return isinstance(given, Mapping) and given.get("type") == "custom"
