"""One rank acts, or all do; then all know how it went. An error on one rank becomes the same error on every rank."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from allstep.checkpoint.reasons import system_error
from allstep.errors import CheckpointError

__all__ = ["Communicator", "Votes"]

T = TypeVar("T")


class Communicator(Protocol):
    """What saving and loading need of the ranks' communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...

    def broadcast_object(self, value: Any) -> Any: ...


class _Refusal(NamedTuple):
    """What one rank tells the others of its error."""

    words: str
    by_file_system: bool

    @classmethod
    def of(cls, error: Exception) -> "_Refusal":
        words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return cls(words, system_error(error) is not None)


class Votes:
    """Actions on one rank or all, followed by agreement on how they ended. Every method is collective."""

    def __init__(self, communicator: Communicator) -> None:
        self._ranks = communicator

    def on_first(self, action: Callable[[], T], doing: str, advice: str = "") -> T:
        """Collective. Act on rank 0, and hand every rank the result, or raise the error on every rank.

        The error tells what the rank was `doing`, what went wrong, and the `advice`.
        """
        value, error = _attempt(action) if self._ranks.rank == 0 else (None, None)
        value, refusal = self._ranks.broadcast_object((value, None if error is None else _Refusal.of(error)))
        if refusal is not None:
            raise _failure({0: refusal}, doing, advice, self._ranks.rank) from error
        return value  # type: ignore[no-any-return]

    def on_all(
        self, action: Callable[[], T], doing: str, advice: str = "", *, undo: Callable[[], None] = lambda: None
    ) -> list[T]:
        """Collective. Act on every rank, and hand each the results of all, by rank; they have to be small.

        If the action failed on any rank, rank 0 undoes it, and then the error is raised on every rank.
        """
        value, error = _attempt(action)
        outcomes = self._ranks.all_gather_object((value, None if error is None else _Refusal.of(error)))
        failed = {rank: refusal for rank, (_, refusal) in enumerate(outcomes) if refusal is not None}
        if failed:
            if self._ranks.rank == 0:
                with contextlib.suppress(OSError):  # the peers wait at the barrier, and the first error is the one to tell
                    undo()
            self._ranks.barrier()  # whoever catches the error finds everything undone
            raise _failure(failed, doing, advice, self._ranks.rank) from error
        return [value for value, _ in outcomes]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it, or they wait for this rank
        return None, error


def _failure(failed: dict[int, _Refusal], doing: str, advice: str, rank: int) -> CheckpointError:
    lines = [f"Rank {number} could not {doing}. {refusal.words}" for number, refusal in failed.items()]
    error = CheckpointError("\n".join(lines) + (f" {advice}" if advice else ""))
    error.collateral = rank not in failed
    error.by_file_system = all(refusal.by_file_system for refusal in failed.values())
    return error
