"""The part of a Trainer that says what it is fed with: datasets, samplers and loaders, each open to be overridden.

What these methods give is read, not iterated over (`data/dataloaders.py`): whatever loader or sampler stands there, ranks share
what it has without repeating a sample.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from allstep.data.dataloaders import RankDataLoader, Source, source_of
from allstep.data.lengths import has_transform, lengths_of
from allstep.data.loader import check_map_style
from allstep.data.order import BalancedOrder, LengthGroupedOrder, SequentialOrder, ShuffledOrder
from allstep.data.streams import is_stream
from allstep.errors import DataError
from allstep.trainer.models.losses import accepted_columns
from allstep.trainer.surface.computing import ComputingTrainer

__all__ = ["LoadingTrainer"]


class LoadingTrainer(ComputingTrainer):
    """Makes loaders. See `Trainer` for the arguments."""

    _train_dataloader: Any = None  # what `get_train_dataloader` gave for the run

    # ---- loaders, to be overridden

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data; override to give another: any DataLoader, with any sampler, for all ranks together.

        Raises:
            DataError: there is nothing to train on.
        """
        if self.train_dataset is None:
            raise DataError("Trainer.train() needs a train_dataset; this Trainer was made without one.")
        return self._loader_of(self.train_dataset, self.args.per_device_train_batch_size, self._get_train_sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of the data to evaluate on; override to give another.

        Args:
            eval_dataset: the data, or the name of one of several; None for those of the Trainer.

        Raises:
            DataError: there is nothing to evaluate.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        _check_not_empty(dataset)
        return self._loader_of(dataset, self.args.per_device_eval_batch_size, self._get_eval_sampler)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of the data to predict; override to give another.

        Raises:
            DataError: there is nothing to predict.
        """
        _check_not_empty(test_dataset)
        return self._loader_of(test_dataset, self.args.per_device_eval_batch_size, self._get_eval_sampler)

    # ---- samplers, to be overridden

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of the training data, as `train_sampling_strategy` says; override to give any sampler, of all ranks."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        args, seed = self.args, self._data_seed
        if args.train_sampling_strategy == "sequential":
            return SequentialOrder(len(dataset))
        if args.train_sampling_strategy == "random":
            return ShuffledOrder(len(dataset), seed)
        lengths = lengths_of(dataset, args.length_column_name, self.processing_class)
        if args.train_sampling_strategy == "group_by_length":
            return LengthGroupedOrder(lengths, self._global_batch_size(), seed)
        micro_batch = args.per_device_train_batch_size
        return BalancedOrder(lengths, micro_batch, max(1, self._global_batch_size() // micro_batch), seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of the data to evaluate, which predictions follow; override to give any sampler, of all ranks."""
        return SequentialOrder(len(eval_dataset))

    # ---- what goes with them

    def num_examples(self, dataloader: Any) -> int:
        """Samples of a loader; for an iterable without a dataset, its length times the micro-batch."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns that the model does not take, which are then not even read.

        Anything else as it is: of what a transform makes, columns are left out afterwards.

        Raises:
            DataError: no column is left.
        """
        columns, names = self._columns(), getattr(dataset, "column_names", None)
        if columns is None or not hasattr(dataset, "remove_columns") or not names or has_transform(dataset):
            return dataset
        unused = [name for name in names if name not in columns]
        if len(unused) == len(names):
            raise DataError(
                f"The dataset has the columns {', '.join(names)}, and the forward of {type(self.model).__name__} takes none of "
                f"them: expected some of {', '.join(sorted(columns))}. Tokenize the dataset first, or rename its columns; if a "
                f"data_collator makes the inputs, write remove_unused_columns=False."
            )
        return dataset.remove_columns(unused) if unused else dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator: columns are left out before it is called, by the loaders that are made here."""
        return data_collator

    def _columns(self) -> frozenset[str] | None:
        return accepted_columns(self.model, self.label_names) if self.args.remove_unused_columns else None

    def _loader_of(self, dataset: Any, batch_size: int, sampler_of: Callable[..., Any]) -> RankDataLoader:
        args, parts = self.args, {}
        if not is_stream(dataset):
            check_map_style(dataset)
            parts["sampler"] = sampler_of(dataset) if _takes_one(sampler_of) else sampler_of()
            dataset = self._remove_unused_columns(dataset)
        workers = args.dataloader_num_workers
        return RankDataLoader(
            dataset,
            columns=self._columns(),
            rank=self.communicator.rank,
            ranks=self.communicator.size,
            device=self.device,
            seed=self._data_seed,
            batch_size=batch_size,
            drop_last=args.dataloader_drop_last and sampler_of == self._get_train_sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            multiprocessing_context=args.dataloader_multiprocessing_context if workers else None,
            **parts,
        )

    def _source(self, loader: Any) -> Source:
        return source_of(loader, self._data_seed, pins=self.device.type != "cpu")

    def _find_source(self) -> Source:
        """The training data, by the user's loader if there is one."""
        self._train_dataloader = self.get_train_dataloader()
        return self._source(self._train_dataloader)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _global_batch_size(self) -> int:
        """Samples of one optimizer step: that of a run that is resumed, if there is one, else what the arguments say."""
        args = self.args
        if args.global_batch_size is not None:
            return args.global_batch_size
        if self._resumed_batch is not None:
            return self._resumed_batch
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.communicator.size


def _check_not_empty(dataset: Any) -> None:
    if dataset is not None and not is_stream(dataset):
        check_map_style(dataset)
    if dataset is None or (not is_stream(dataset) and not len(dataset)):
        raise DataError(f"There is nothing to evaluate: the dataset is {'missing' if dataset is None else 'empty'}.")


def _takes_one(sampler_of: Callable[..., Any]) -> bool:
    """Whether an override takes the dataset, as it does in newer scripts."""
    kinds: Sequence[Any] = [each.kind for each in inspect.signature(sampler_of).parameters.values()]
    return any(kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL) for kind in kinds)
