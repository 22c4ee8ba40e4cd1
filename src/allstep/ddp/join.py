"""Uneven inputs: ranks that run out of data take part, with zeros, in what the others still do.

Under `join` every forward with gradients begins with a word of each rank: that it accumulates, that its backward will be
reduced, that it has no data left, or that it failed. So ranks without data do what the others do: send buffers, reduce. Words
are sent once for each reduction; a forward whose backward never comes, or a second one before a backward, disturbs nothing.

    rank with data      forward: count, word │ buffers if due │ backward: reduce
    rank without        Join:    count, word │ buffers if due │           reduce zeros

The count is that of `torch.distributed.algorithms.join.Join`, so the wrapper can also share a `Join` with other joinables.
"""

import enum
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from allstep.comm.communicator import Communicator, GroupCommunicator
from allstep.ddp.reducer import Phase, Reducer
from allstep.ddp.sync import broadcast_states, buffers_of, parameters_of
from allstep.errors import CollectiveError, RankFailedError, UnusedParametersError

__all__ = ["UnevenInputs"]


class _Word(enum.IntEnum):
    """What a rank says before a forward, or in the place of one."""

    JOINED = 0
    """It has no data left and does what the others do."""
    ACCUMULATES = 1
    """The gradients of its forward stay on it."""
    REDUCES = 2
    """The backward of its forward will be reduced."""
    FAILED = 3
    """It runs no forward, because of an exception."""


class UnevenInputs(Joinable):
    """The part of a wrapper that lets ranks have unequal numbers of batches.

    A forward calls `_announce` before its first collective; so does whatever reduces without a forward.
    """

    module: nn.Module
    device: torch.device
    forward_sync_buffers: bool
    _ignored: set[str]
    _communicator: Communicator
    _reducer: Reducer

    def __init__(self) -> None:
        super().__init__()
        self._divide_by_initial_world_size = True
        self._has_joined = False
        self._authoritative_rank = 0
        """Whose parameters and buffers all ranks had at the end of the last `join`."""
        self._buffers_from = 0  # rank whose buffers are sent; under `join` the highest with data, as in torch
        self._announced_at = -1  # reductions that were done when this rank said that its next backward is reduced
        self._heard_of_the_end = False  # an announcement raised, as it did on every other rank

    @abstractmethod
    def _send_buffers_if_due(self) -> None: ...

    @abstractmethod
    def _run_buffer_hook(self, location: str) -> None: ...

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def abandon(self, reason: str) -> None: ...

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Collective. Train inside with unequal numbers of batches; returns on all ranks when the last one has no more.

        A rank that leaves the block takes part in the reductions of the others with zeros. In the end all ranks have the
        parameters and buffers of the one that had most batches (of several, the one with the highest number), but not the
        state of its optimizer. What a rank accumulated under `no_sync` after its last reduction stays in its gradients.

        An exception inside is raised on the other ranks too, as a `RankFailedError`, wherever they are in their steps. Each
        forward with gradients costs two all-reduces of one number and of one number a rank.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the world size; False: by the number of ranks that
                still had a batch, or by the sum of what they `weigh`.
            enable: False, where all ranks surely have equally many batches: nothing is done and nothing costs.
            throw_on_early_termination: raise on all ranks as soon as one has no more batches. For models with collectives
                in their own forward, such as SyncBatchNorm, which nobody can join in.

        Raises:
            RuntimeError: `throw_on_early_termination`, and some ranks had fewer batches than others; or, of ranks with
                data, some were under `no_sync` and others not.
            RankFailedError: another rank left the block by an exception.
            TypeError: the wrapper's communicator is not a torch process group.
        """
        if not enable or self._communicator.size == 1:
            yield
            return
        joining = Join([self], True, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size)
        self._heard_of_the_end = False
        try:
            try:
                yield
            except Exception as error:
                self._tell(error)
                raise
            with warnings.catch_warnings(), joining:  # it sets a filter of warnings for the whole process
                self._bring_what_was_announced()
        finally:
            self._reducer.bring_back()
            self._join_config = _JoinConfig.construct_disabled_join_config()
            self._buffers_from, self._announced_at = 0, -1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `Join`: what this rank does while others still have data; takes `divide_by_initial_world_size`.

        Under a `Join` of several joinables an exception on one rank is not told to the others, who wait for the timeout.
        Their gradients are the mean also on ranks without data, so that an optimizer among them steps there as elsewhere.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._has_joined = True
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """For `Join`: where it counts ranks."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For `Join`: among whom it counts."""
        if not isinstance(self._communicator, GroupCommunicator):
            raise TypeError(
                f"join needs a torch process group, and this wrapper has a {type(self._communicator).__name__}: give "
                f"DistributedDataParallel a process_group, or leave it out to use the default one."
            )
        group = self._communicator.group or dist.group.WORLD
        assert group is not None
        return group

    def _announce(self, reduces: bool) -> None:
        """Collective, under `join`. Say what this rank's next backward will be, where it is not yet said."""
        if not self._join_config.enable or self._owes_a_reduction:
            return
        self._reducer.raise_unread()
        try:
            self._count()
            self._exchange(_Word.REDUCES if reduces else _Word.ACCUMULATES)
        except Exception:
            self._heard_of_the_end = True
            raise
        if reduces:
            self._announced_at = self._reducer.reductions
            if not self._divide_by_initial_world_size:
                self._reducer.weigh(1.0)

    def _check_divisor(self) -> None:
        """Refuse weights where `join` was told to divide by something else.

        Raises:
            ValueError: under `join(divide_by_initial_world_size=True)`.
        """
        if self._join_config.enable and self._divide_by_initial_world_size:
            raise ValueError(
                "Gradients can be divided by the sum of weights or by the initial world size, and here both were asked for: "
                "write join(divide_by_initial_world_size=False) around `weigh`."
            )

    @property
    def _owes_a_reduction(self) -> bool:
        return self._announced_at == self._reducer.reductions

    def _count(self) -> None:
        """Take part in the count of ranks that have data; those without may have asked to end it all."""
        try:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            if "exhausted inputs" in str(error):
                raise
            assert isinstance(self._communicator, GroupCommunicator)
            raise self._communicator.broken("count of ranks with data", error) from error

    def _exchange(self, word: _Word, reason: str | None = None) -> bool:
        """Collective. Say `word`; whether ranks with data are going to reduce, by their words."""
        said = torch.zeros(self._communicator.size, device=self.device)
        said[self._communicator.rank] = float(word)
        self._communicator.all_reduce(said).wait()
        words = [_Word(round(number)) for number in said.tolist()]
        failed = _ranks_that_say(_Word.FAILED, words)
        if failed:
            reasons = self._communicator.all_gather_object(reason)
            told = "; ".join(f"rank {rank}: {reasons[rank]}" for rank in failed)
            raise RankFailedError(f"Rank {self._communicator.rank} stops because another rank failed: {told}")
        reducing, accumulating = _ranks_that_say(_Word.REDUCES, words), _ranks_that_say(_Word.ACCUMULATES, words)
        if reducing and accumulating:
            raise RuntimeError(
                f"Rank {self._communicator.rank}: under join, all ranks with data have to reduce in the same iterations, but "
                f"now rank(s) {', '.join(map(str, accumulating))} ran a forward under no_sync, and rank(s) "
                f"{', '.join(map(str, reducing))} one without it. Let every rank decide by the number of its batch."
            )
        self._buffers_from = max(reducing + accumulating)
        return bool(reducing)

    def _shadow_an_iteration(self) -> None:
        """Collective. For a rank without data: what the others do from one forward to the next."""
        reduces = self._exchange(_Word.JOINED)
        with nullcontext() if reduces else self.no_sync():  # hooks on buffers ask for that
            self._send_buffers_if_due()
            self._run_buffer_hook("POST_FORWARD")
        if reduces:
            if not self._divide_by_initial_world_size:
                self._reducer.weigh(0.0)
            self._reducer.take_part(empty=True)

    def _end_together(self, is_last: bool) -> None:
        """Collective. Bring the model of the rank that had most batches to all."""
        lasting = self._communicator.all_gather_object(is_last)
        self._reducer.bring_back()
        self._authoritative_rank = max(rank for rank, lasted in enumerate(lasting) if lasted)
        states = parameters_of(self.module, self._ignored)
        if self.forward_sync_buffers:
            states += buffers_of(self.module, self._ignored)
        broadcast_states(self._communicator, states, self._authoritative_rank)

    def _bring_what_was_announced(self) -> None:
        """After the last batch: the others wait in a reduction whose forward ran here, if its backward did not."""
        self._reducer.raise_unread()
        if not self._owes_a_reduction:
            return
        if self._reducer.phase is Phase.COLLECTING:
            self._reducer.abandon("its last backward did not come to its end")
        else:
            self._reducer.take_part()

    def _tell(self, error: Exception) -> None:
        """Collective, unless the others have `error` too. Meet them where they wait, and say why this rank leaves."""
        if self._heard_of_the_end or _all_ranks_have(error):
            return
        reason = f"{type(error).__name__}: {error}"
        with suppress(Exception):  # whatever comes of it, the caller raises this rank's own error
            if self._owes_a_reduction:
                self.abandon(reason)
            else:
                self._count()
                self._exchange(_Word.FAILED, reason)


class _Shadow(JoinHook):
    """What `Join` calls on a rank without data."""

    def __init__(self, wrapper: UnevenInputs) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        self._wrapper._shadow_an_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._wrapper._end_together(is_last_joiner)


def _ranks_that_say(word: _Word, words: list[_Word]) -> list[int]:
    return [rank for rank, said in enumerate(words) if said is word]


def _all_ranks_have(error: BaseException | None) -> bool:
    """Whether `error` is, or comes from, one that the engine raises on every rank."""
    while error is not None:
        if isinstance(error, (CollectiveError, RankFailedError, UnusedParametersError)):
            return True
        error = error.__cause__ or error.__context__
    return False
