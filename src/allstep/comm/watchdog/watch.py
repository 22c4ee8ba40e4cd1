"""The thread of each rank that tells the others where the rank is, and tells a person when a wait grows long.

It never takes part in a collective, so it still speaks when they hang. Every two seconds it leaves word on the `Board`; rank 0,
and every rank that has waited for a while or has not heard of all yet, reads what the others left. Who speaks is rank 0, or
where that is lost the first rank that waits. When a collective breaks off, `told` adds the story to the error, on every rank.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from allstep.comm.watchdog.board import Board, process_state
from allstep.comm.watchdog.pace import Pace, held_up
from allstep.comm.watchdog.place import HERE
from allstep.comm.watchdog.story import Sighting, Story, tell
from allstep.errors import CollectiveError

__all__ = ["Watchdog", "quiet_watchdog", "start_watchdog", "stop_watchdog", "told"]

TICK = 2.0
"""Seconds between two words of a rank; more among many ranks, see `Watchdog`."""
LOOK_AFTER = 3.0
"""Seconds that a rank waits before it reads what the others say."""
PATIENCE = 5.0
"""Seconds that a broken collective waits for a story: two words of each rank."""
_QUICK = 0.2


class Watchdog:
    """That thread.

    Args:
        store: of the group whose ranks are watched.
        rank: this rank.
        size: number of ranks.
        name: the same on all ranks, and no other group's in that store.
        warn_after: seconds of a wait after which a person is told, and told again when it has doubled; 0: only of ranks
            that are lost.
        say: gets what a person should read; None prints it to stderr.
        tick: seconds between two words of a rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "",
        warn_after: float = 60.0,
        say: Callable[[str], None] | None = None,
        tick: float = TICK,
    ) -> None:
        self.warn_after = warn_after
        self._rank, self._size, self._say = rank, size, say or _to_stderr
        self._board = Board(store, rank, size, name)
        self._tick = max(tick, size / 64)  # rank 0 reads all words
        self._heard: dict[int, tuple[int, float, dict[str, Any]]] = {}  # rank -> number of its word, when first seen, the word
        self._said_of: frozenset[int] = frozenset()
        self._warn_at = 0.0
        self._paces: list[Pace] = []  # of all ranks, when they were last compared
        self._slow: tuple[int, ...] = ()  # who held up the others then
        self._slow_told: tuple[int, ...] = ()
        self._wake, self._news = threading.Event(), threading.Condition()
        self._is_over, self._wanted, self._listened_at = False, 0, 0.0
        self._is_forgotten = False
        self.busy = threading.Lock()
        """Held while the thread does something; who forks holds it meanwhile."""
        self._thread = threading.Thread(target=self._run, name="allstep-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended: it was stopped, or the store is gone."""
        return self._is_over

    def stop(self, why: str) -> None:
        """Leave a last word, and end the thread."""
        HERE.left = HERE.left or why
        self._is_over = True
        self._wake.set()
        self._thread.join(1.0)  # it may hang in a store that does not answer

    def give_up(self) -> None:
        """End the thread, without a word: there is nobody left to read it."""
        self._is_forgotten = self._is_over = True
        self._wake.set()

    def story(self, patience: float = PATIENCE) -> Story:
        """The story of now; waits at most `patience` seconds until those that are late have left word again."""
        began = time.monotonic()
        with self._news:
            self._wanted += 1
            self._wake.set()
            while not (self._is_over or self._knows_since(began)) and (left := began + patience - time.monotonic()) > 0:
                self._news.wait(left)
            self._wanted -= 1
        return tell(self.sightings())

    def sightings(self) -> list[Sighting]:
        """All ranks, by what was heard last and what the kernel says now."""
        now = time.monotonic()
        own = (0, now, {**HERE.told(), **self._board.who})
        return [_sighting(r, own if r == self._rank else self._heard.get(r), now) for r in range(self._size)]

    def _knows_since(self, began: float) -> bool:
        """Whether it has listened since, and whoever is late has left word since or never will."""
        if self._listened_at < began:
            return False
        return all(
            each.rank == self._rank or each.is_waiting or each.is_lost or each.left or self._heard_at(each.rank) >= began
            for each in self.sightings()
        )

    @property
    def _knows_all(self) -> bool:
        return len(self._heard) == self._size

    def _heard_at(self, rank: int) -> float:
        return self._heard[rank][1] if rank in self._heard else 0.0

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_over:
                with self.busy:
                    self._round()
                with self._news:
                    self._news.notify_all()
                self._wake.wait(_QUICK if self._wanted or not self._knows_all else self._tick)
                self._wake.clear()
            if not self._is_forgotten:
                with self.busy:
                    self._board.post(HERE.told())
        except RuntimeError:
            pass  # the store went with the rank that kept it
        finally:
            self._is_over = True
            with self._news:
                self._news.notify_all()

    def _round(self) -> None:
        if self._is_keeper_lost():  # a store that does not answer would hold this thread for ever
            self._listened_at = time.monotonic()
            self._speak()
            return
        own = HERE.told()
        self._board.post(own)
        if self._rank == 0 or own["waited"] > LOOK_AFTER or self._wanted or not self._knows_all:
            self._listen()
            self._speak()
            self._compare_paces()

    def _is_keeper_lost(self) -> bool:
        """Whether the kernel says that rank 0, which keeps the store, cannot answer."""
        if self._rank == 0 or 0 not in self._heard:
            return False
        word = self._heard[0][2]
        return process_state(word["pid"], word["key"]) in ("gone", "stopped")

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, word in self._board.read().items():
            if rank not in self._heard or self._heard[rank][0] != word["number"]:
                self._heard[rank] = (word["number"], now, word)
        self._listened_at = time.monotonic()

    def _speak(self) -> None:
        """Tell a person, where this is the rank to do so and there is something to tell."""
        sightings = self.sightings()
        waiting = [each for each in sightings if each.is_waiting]
        if not waiting:
            self._said_of, self._warn_at = frozenset(), 0.0
            return
        lost = frozenset(each.rank for each in sightings if each.is_lost and not each.left)
        speaker = 0 if 0 not in lost else waiting[0].rank
        longest = max(each.waited for each in waiting)
        is_long = self.warn_after > 0 and longest >= max(self.warn_after, self._warn_at)
        is_news = bool(lost - self._said_of) and longest >= LOOK_AFTER
        if speaker != self._rank or not (is_long or is_news):
            self._said_of &= lost
            return
        self._said_of, self._warn_at = lost, 2 * longest
        self._say(f"allstep: {longest:.0f} s of waiting. {tell(sightings)}")

    def _compare_paces(self) -> None:
        """On rank 0, where all take part in training: tell a person of ranks that hold up the others, once each time."""
        if self._rank != 0 or not self._knows_all:
            return
        words = [self._heard[rank][2] for rank in range(self._size)]
        paces = [Pace(word["step"], word["waits"], word["spent"]) for word in words if word["step"] is not None]
        have_gone_on = all(late.step >= early.step for early, late in zip(self._paces, paces, strict=False))
        if len(paces) < self._size or len(self._paces) < self._size or not have_gone_on:  # another run has begun
            self._paces = paces
            return
        judged = held_up(self._paces, paces)
        if judged is not None:
            slow, sentence = judged
            if slow and slow == self._slow != self._slow_told:  # twice in a row
                self._slow_told = slow
                self._say(f"allstep: {sentence}")
            self._paces, self._slow = paces, slow


def _sighting(rank: int, heard: tuple[int, float, Mapping[str, Any]] | None, now: float) -> Sighting:
    if heard is None:
        return Sighting(rank=rank, unknown=True)
    _, since, word = heard
    age = now - since
    return Sighting(
        rank=rank,
        host=word["host"],
        pid=word["pid"],
        phase=word["phase"],
        phase_age=word["phase_age"] + age,
        step=word["step"],
        micro_batch=word["micro_batch"],
        waiting=word["waiting"],
        waited=word["waited"] + age if word["waiting"] is not None else 0.0,
        detail=word["detail"],
        left=word["left"],
        frames=tuple(word["frames"]),
        silent=age,
        process=process_state(word["pid"], word["key"]),
    )


# ---- the one of this process


class _Running(NamedTuple):
    watchdog: Watchdog
    group: "weakref.ref[Any]"
    """Whose ranks are watched; known weakly, as gloo's threads end with it."""


_RUNNING: dict[int, _Running] = {}
"""Process -> its watchdog; a forked process has none."""


def start_watchdog(group: Any, store: Store, *, warn_after: float) -> None:
    """Watch over the ranks of `group`, which met in `store`; where this process does so already, only with `warn_after`."""
    running = _RUNNING.get(os.getpid())
    if running is not None and not running.watchdog.is_over and running.group() is group:
        running.watchdog.warn_after = warn_after
        return
    if running is not None:
        running.watchdog.give_up()  # of a group that has been destroyed
    HERE.left = ""
    watchdog = Watchdog(store, group.rank(), group.size(), name=group.group_name, warn_after=warn_after)
    _RUNNING[os.getpid()] = _Running(watchdog, weakref.ref(group, lambda _: watchdog.give_up()))


def stop_watchdog(why: str = "has left the job") -> None:
    """End the watchdog of this process, if there is one, and tell the others why."""
    running = _RUNNING.pop(os.getpid(), None)
    if running is not None:
        running.watchdog.stop(why)


def _watchdog() -> Watchdog | None:
    """The one of this process that is at work."""
    running = _RUNNING.get(os.getpid())
    return None if running is None or running.watchdog.is_over else running.watchdog


def told(error: CollectiveError, more: str = "") -> CollectiveError:
    """`error`, with where all ranks were, as far as a watchdog knows; `more` stands behind its first sentences.

    `late` of the error that is returned holds the ranks that the others waited for.
    """
    watchdog = _watchdog()
    text = f"{error} {more}".rstrip()
    if error.late is not None or watchdog is None:
        head, _, rest = str(error).partition("\n")
        again = CollectiveError("\n".join(filter(None, [f"{head} {more}".rstrip(), rest])))
        again.late = error.late
        return again
    story = watchdog.story()
    again = CollectiveError(f"{text}\n{story}")
    again.late = story.late
    return again


class quiet_watchdog:  # noqa: N801 - a context manager, used like a function
    """A context in which the watchdog's thread does nothing: for a fork."""

    def __enter__(self) -> None:
        watchdog = _watchdog()
        self._held = watchdog.busy if watchdog is not None and watchdog.busy.acquire(timeout=1.0) else None

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.release()


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # a closed stream must not end the watch
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
