"""Reads a stream, sample by sample, from the beginning or from a state that the dataset gave."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker
from tqdm import tqdm

from allstep.data.collate import select_columns
from allstep.data.seeding import mixed, seed_generators
from allstep.data.streams import Places

__all__ = ["SavedStream", "StreamReader", "fingerprint", "is_plain", "keeps_state"]

_NOTHING = object()
_SHOWN_FROM = 1000
"""Samples that are skipped without a word."""


class SavedStream(NamedTuple):
    """What a dataset said of itself at a place of an epoch."""

    epoch: int
    position: int
    """Samples that were read before."""
    state: Any
    """What its `state_dict` gave."""
    next_sample: str
    """Fingerprint of the sample that comes next, by which a state is known that does not lead there."""


class StreamReader:
    """Reads `dataset` as one process would, in whatever process: every rank and loader worker sees the same samples.

    Before each sample the generators of Python, numpy and torch are seeded by (seed, epoch, sample id).

    Args:
        dataset: what is read; `set_epoch` is called where it has one, and it is asked to.
        seed: of what is random in the dataset.
        columns: names that are kept of a sample; None keeps all.
        places: gives ids to samples.
    """

    def __init__(self, dataset: Any, seed: int, columns: frozenset[str] | None, places: Places) -> None:
        self._dataset, self._seed, self._columns, self._places = dataset, seed, columns, places
        self._read = dataset  # what this pass reads: `dataset`, or a copy of it that was given a state
        self._samples: Iterator[Any] = iter(())
        self._ahead: Any = _NOTHING  # a sample that was read to see whether there is one
        self._saved: SavedStream | None = None  # at the place where the sample ahead comes next
        self.epoch = 0
        """The pass that is under way."""
        self.position = 0
        """Samples of it that were taken or passed over."""
        self.first = ""
        """Fingerprint of the first sample of the first pass that began at the beginning."""

    def open(self, epoch: int, *, tell_epoch: bool, saved: SavedStream | None = None) -> bool:
        """Begin a pass, or go on where `saved` stood; whether that was done, else it begins at the beginning."""
        _own_epoch(self._dataset)
        if tell_epoch and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if saved is not None:
            with_state = _copied(self._dataset)  # a state that was loaded would count for later passes, too
            with_state.load_state_dict(saved.state)
            self._begin(with_state, epoch, saved.position)
            if self._next_fingerprint() == saved.next_sample:
                return True
        self._begin(self._dataset, epoch, 0)
        return False

    def _begin(self, dataset: Any, epoch: int, position: int) -> None:
        self._read, self.epoch, self.position, self._ahead, self._saved = dataset, epoch, position, _NOTHING, None
        seed_generators(mixed(self._seed, epoch))
        _hide_worker()
        self._samples = iter(dataset)

    def has_more(self) -> bool:
        """Whether the stream goes on; reads a sample ahead to know."""
        if self._ahead is _NOTHING:
            seed_generators(mixed(self._seed, self.epoch, self._places.sample_id(self.position)))
            self._ahead = next(self._samples, _NOTHING)
            if self._ahead is _NOTHING:
                self._samples = iter(())
            elif not self.first and not self.position:
                self.first = fingerprint(self._ahead)
        return self._ahead is not _NOTHING

    def take(self, number: int) -> list[Any]:
        """The next `number` samples, fewer where the stream ends."""
        samples: list[Any] = []
        while len(samples) < number and self.has_more():
            samples.append(select_columns(self._ahead, self._columns))
            self._pass()
        return samples

    def skip_to(self, position: int, *, show: bool = False) -> None:
        """Read on to `position`, or to the end.

        Args:
            show: with a progress bar, where standard error is a terminal.
        """
        number = position - self.position
        if number <= 0:
            return
        hidden = None if show and number >= _SHOWN_FROM else True  # None: where standard error is no terminal
        with tqdm(total=number, desc="skipping", unit=" samples", disable=hidden) as bar:
            while self.position < position and self.has_more():
                self._pass()
                bar.update()

    def _pass(self) -> None:
        self._ahead, self._saved = _NOTHING, None
        self.position += 1

    def saved_at(self, position: int) -> SavedStream | None:
        """The dataset's state at `position`, which is not yet passed; None where it has none that can be written down."""
        self.skip_to(position)
        if self._saved is not None and self._saved.position == position:
            return self._saved
        if self._ahead is not _NOTHING or self.position != position:
            return None
        state = self._read.state_dict()
        if is_plain(state):
            self._saved = SavedStream(self.epoch, position, state, self._next_fingerprint())
        return self._saved

    def _next_fingerprint(self) -> str:
        return fingerprint(self._ahead) if self.has_more() else "end"


def keeps_state(dataset: Any) -> bool:
    """Whether `dataset` has a state that says exactly where it was.

    Hugging Face's has one, but what waits in a shuffle buffer is not in it.
    """
    if not all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict", "__dict__")):
        return False
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return False
        parts += [*getattr(part, "ex_iterables", ()), *filter(None, [getattr(part, "ex_iterable", None)])]
    return True


def is_plain(value: Any) -> bool:
    """Whether `value` is made of tensors, numbers, strings and containers of them only, as a checkpoint takes it."""
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor):
        return True
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple) and all(map(is_plain, value))


def fingerprint(sample: Any) -> str:
    """A digest of numbers, strings, arrays and containers; of other objects only the kind, as their bytes may tell nothing."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.view(torch.uint8) if value.dim() and value.dtype is torch.bfloat16 else value).numpy()
        digest.update(f"{type(value).__name__}:".encode())
        if isinstance(value, np.ndarray) and value.dtype != object:
            digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, (bytes, str, bool, int, float, np.generic)) or value is None:
            digest.update(repr(value).encode() + b";")

    add(sample)
    return digest.hexdigest()


def _copied(dataset: Any) -> Any:
    """Another object with the same attributes; copy.copy of a Hugging Face stream shares the dictionary of them."""
    copied = object.__new__(type(dataset))
    copied.__dict__.update(dataset.__dict__)
    return copied


def _own_epoch(dataset: Any) -> None:
    """In a loader worker, let a Hugging Face stream have its epoch for itself.

    It lies in memory that all workers share, where one that has begun the next epoch would change that of another, which has
    yet to begin this one (test_stream_training.py, "of hugging face is the same").
    """
    epoch = getattr(dataset, "_epoch", None)
    if get_worker_info() is not None and isinstance(epoch, torch.Tensor):
        dataset._epoch = epoch.clone()


def _hide_worker() -> None:
    """In a loader worker, let the dataset believe that it is read by one process.

    Many datasets ask torch for their worker, and then give each a part; Hugging Face's also shuffle otherwise there. Here the
    samples are dealt out after they are read (test_stream_training.py, "splits itself among workers").
    """
    if get_worker_info() is not None:
        torch_worker._worker_info = None
