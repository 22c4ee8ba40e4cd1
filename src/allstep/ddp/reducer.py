"""One backward: gradients come in, full buckets go out in fixed order, and at the end every rank holds the mean.

    forward ──arm──> ARMED ──first gradient──> COLLECTING ──end of backward: finish──> ARMED
    forward under no_sync ──disarm──> LOCAL

A hook on each parameter counts down its bucket. Buckets are launched strictly in layout order, whatever the order in which
they fill, so that ranks can never pair different buckets. What no gradient came for is closed at the end of backward.

Behind the last bucket's gradients ride numbers of each rank (`riders`). So a rank that ran out of data, that used other
parameters, or that failed, is known to all at no collective more.
"""

import enum
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from allstep.comm.communicator import Communicator
from allstep.comm.watchdog import HERE, told
from allstep.ddp.alike import Changes, states_in_training
from allstep.ddp.buckets import Buckets
from allstep.ddp.in_backward import step_in_backward
from allstep.ddp.listening import GradientHooks
from allstep.ddp.plan import BucketPlan
from allstep.ddp.planning import MEASURED_REDUCTIONS, plan_buckets, ready_times_for
from allstep.ddp.riders import Evidence, Totals, raise_what_was_said
from allstep.ddp.unused import taken_message, unexpected_message
from allstep.ddp.window import Forward, Window
from allstep.errors import CollectiveError, RankFailedError, UnusedParametersError

__all__ = ["Phase", "Reducer"]


class Phase(enum.Enum):
    """Where the reducer stands."""

    LOCAL = "the last forward ran under no_sync: gradients stay on this rank"
    ARMED = "the next backward will be reduced; no gradient of it has come yet"
    COLLECTING = "a backward runs: gradients come in, full buckets are on their way"


_COLLECTING = Phase.COLLECTING  # looked up once for each gradient
_current_backward = torch._C._current_graph_task_id


class Reducer:
    """Averages the gradients in `buckets` over the ranks of `communicator`, overlapped with backward.

    Args:
        buckets: the gradients, and how they are sent.
        names: of the parameters, in registration order.
        communicator: the ranks to average over.
        strict: a parameter without a gradient is an error; otherwise a rank without one takes part with zeros.
        number: that of the wrapper, equal on all ranks; gradients of different wrappers are not averaged with each other.
    """

    def __init__(
        self, buckets: Buckets, names: Sequence[str], communicator: Communicator, *, strict: bool, number: int = 0
    ) -> None:
        itself = weakref.ref(self)
        self.buckets = buckets
        buckets.write_riders = partial(_through, itself, Reducer._write_riders)
        self.strict = strict
        self._number = number
        self._names = list(names)
        self._communicator = communicator
        self._came: list[int] | None = []  # parameters in the order of their gradients, until buckets are rebuilt

        self._times = ready_times_for(buckets)  # of gradients, until buckets are planned
        self.plan: BucketPlan | None = None
        """Where buckets are cut, and why; None before they are planned, and where they are not."""
        self.reductions = 0
        """Reductions done since the start, each of every bucket once."""
        self.untouched: list[int] | None = None
        """Parameters that got no gradient on this rank in its first backward that was reduced; None before it."""
        self.under_no_sync = False
        """Whether the wrapper's `no_sync` is entered."""
        self.stepped: list[torch.Tensor] | None = None
        """Parameters whose own optimizers step inside a backward; None before the first forward."""
        self.is_static = True
        """Whether all backwards of this rank left the `untouched` parameters without a gradient, and no others."""
        self.error = ""
        """What the ranks said last that was an error."""
        self._has_warned = False
        self.changes = Changes()
        """How the model has changed since its parameters were laid out; the wrapper keeps it up to date."""
        self.is_outdated = False
        """Whether all ranks have changed alike, so that the wrapper has to make another reducer."""
        self.has_hand_up: Callable[[], bool] = _no_hand
        """Asked in each reduction, as late as can be: whether this rank wants the others to know of something."""
        self.is_shared = False
        """Whether some parameters are another wrapper's too, so that a backward need not be that of a forward of this one."""
        self.totals: Totals | None = None
        """Sums over ranks of the last reduction; None before the first."""

        self.has_started = False
        """Whether a forward has run whose backward is to be reduced."""
        self._is_local = False  # the backward of a forward under no_sync runs
        self._backward = -1  # autograd's number of the backward that is being reduced
        self._futures: list[Any] = []  # of hooks on buffers
        self._touched_aside = bytearray()  # which gradients are those that were set aside
        self._unread: tuple[torch.Tensor, torch.Event] | None = None  # words on a device, and when they are there
        self._reset()
        self._hooks = GradientHooks(self.parameters, itself, Reducer._on_gradient)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All that are reduced, in registration order."""
        return self.buckets.gradients.parameters

    @property
    def has_rebuilt(self) -> bool:
        """Whether buckets were laid out anew in the order in which gradients come."""
        return self._came is None

    def _rebuild_once(self) -> None:
        """Collective, after the first reduction: lay buckets out in the order in which rank 0's gradients really came."""
        if self._came is None or not self.reductions or self.phase is Phase.COLLECTING or self._communicator.size == 1:
            return
        sparse = self.buckets.gradients.sparse
        came, self._came = [index for index in self._came if index not in sparse], None
        seen, device = list(dict.fromkeys([*came, *self.buckets.order])), self.buckets.riders.numbers.device
        order = torch.tensor(seen, dtype=torch.int64, device=device)
        self._communicator.broadcast([order])
        if order.tolist() != self.buckets.order:
            self.buckets.lay_out(order.tolist())

    def _plan_once(self) -> None:
        """Collective, after a few reductions: cut buckets where measurements say, unless somebody chose their sizes."""
        if self._times is None or self.reductions < MEASURED_REDUCTIONS or self.phase is Phase.COLLECTING:
            return
        times, self._times = self._times, None
        self.plan = plan_buckets(self.buckets, self._communicator, times)

    # ---- what the wrapper calls around a forward

    def arm(self, unreached: Collection[int] = (), roots: Sequence[Any] = (), *, in_training: bool = True) -> Forward:
        """Reduce the next backward; returns the forward that it belongs to, for `begin_at_output`.

        Args:
            unreached: parameters that get no gradient in it and need not be waited for.
            roots: the graph nodes of the outputs: an error can then say which parameters the forward used.
            in_training: a backward has to follow on all ranks or on none.
        """
        self.raise_unread()
        self._rebuild_once()
        self._plan_once()
        self.close_what_broke_off()
        self.phase = Phase.ARMED
        self._hooks.be_last()
        self._window.expect(self.parameters, unreached, roots if self.strict else ())
        self.has_started = True
        forward = Forward()
        if in_training and roots:
            self._window.unanswered.add(forward)  # one that gets no backward is told to all ranks: others may wait in theirs
        return forward

    def note_broken_forward(self, error: BaseException) -> None:
        """A forward whose backward was to be reduced has raised: `close_what_broke_off` will say so."""
        self._window.broken = f"its forward failed: {type(error).__name__}: {error}"

    def close_what_broke_off(self) -> None:
        """Collective, where this rank's last forward or backward broke off: meet the others where they wait, and tell them.

        This rank has had its own error, so it goes on, with the others, in the step after that one.
        """
        with suppress(RankFailedError):
            if self.phase is Phase.COLLECTING:
                self.abandon("its last backward did not come to its end")
            elif self._window.broken is not None:
                self._window.failure = self._window.broken
                try:
                    self.take_part(empty=True)
                finally:
                    self.bring_back()  # a forward has left nothing: what was accumulated before it is still right

    def disarm(self) -> None:
        """Keep the gradients of the next backward on this rank."""
        self.close_what_broke_off()
        self.phase, self._is_local = Phase.LOCAL, False

    def begin_local(self, *_: object) -> None:
        """A backward has come to an output of a forward under no_sync; one that never does is of another forward."""
        if not self._is_local:
            self._is_local = True
            Variable._execution_engine.queue_callback(self._end_local)

    def _end_local(self) -> None:
        self._is_local = False

    def begin_at_output(self, forward: Forward, *_: object) -> None:
        """A backward has come to an output of that forward, the outermost one where backwards are nested.

        `torch.autograd.grad` comes there too, for a gradient penalty, but leaves nothing in `.grad` to be reduced.
        """
        self._window.unanswered.discard(forward)
        if self.phase is Phase.COLLECTING:
            self._window.answer(forward)
            return
        if self._hooks.backward_leaves_gradients(parameter for _, parameter in self.changes.new):
            self._window.answer(forward)
            self.begin()

    def begin(self, *_: object) -> None:
        """A backward has started; called inside it, so that `finish` runs when autograd has done all of it."""
        if self.phase is Phase.COLLECTING:
            return
        self._warn_of_no_sync()
        HERE.enter("backward")
        self.phase = Phase.COLLECTING  # also from LOCAL: a forward under no_sync came after the one whose backward this is
        self._backward = _current_backward()
        self._window.has_graph = torch.is_grad_enabled()
        self.buckets.leave_to_others()
        if self._times is not None:
            self._times.begin()
        Variable._execution_engine.queue_callback(self.finish)
        for index in self._window.unreached:
            if self.buckets.countdown.mark(index):
                self.buckets.send_full(self._window)

    def _warn_of_no_sync(self) -> None:
        if self.under_no_sync and self.phase is Phase.ARMED and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Rank {self._communicator.rank}: this backward runs under no_sync(), but its forward did not, so its "
                f"gradients are reduced all the same, as with torch. Put the forward inside `with model.no_sync():` too.",
                stacklevel=2,
            )

    # ---- what a training loop calls

    def weigh(self, weight: float, carried: float | torch.Tensor = 0.0) -> None:
        """Divide the next reduction by the sum over ranks of `weight` instead of by their number.

        Gradients must then be those of a *sum* with that weight. `carried` is one more number to sum over ranks; both sums
        are in `totals` afterwards.
        """
        self._window.weight = (weight, carried)

    def take_part(self, *, empty: bool = False) -> None:
        """Collective. Reduce now, without a backward, whatever gradients this rank holds: possibly none at all.

        With `empty` none: what it holds is set aside until `bring_back`, and the mean lies in the gradients.
        """
        if empty:
            self.raise_unread()
            if self.buckets.gradients.set_aside():
                self._touched_aside = self._window.touched
            self._window.touched = bytearray(len(self.parameters))
        self._rebuild_once()
        self._plan_once()
        self.phase = Phase.COLLECTING
        self._window.excused = True
        self.finish()

    def bring_back(self) -> None:
        """Give the parameters the gradients that they had before this rank took part empty."""
        if self.buckets.gradients.bring_back():
            self._window.touched = self._touched_aside

    def abandon(self, reason: str) -> None:
        """Collective. Close this rank's part of a reduction that it cannot bring to its end, and tell the others why.

        Where the others weigh theirs, `weigh` this one too, by zero.

        Raises:
            RankFailedError: some other rank did bring its gradients; where all abandoned alike, all may go on.
        """
        self._window.failure = reason
        self.take_part()

    def wait_for(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Also wait for `futures` at the end of the next backward that is reduced."""
        self._futures.extend(futures)

    # ---- inside a backward

    def _on_gradient(self, index: int) -> None:
        window = self._window
        window.touched[index] = 1
        if self.phase is not _COLLECTING:
            if self.phase is Phase.LOCAL and (self.under_no_sync or self._is_local):
                return
            self.begin()
        if self._came is not None and not self.reductions:
            self._came.append(index)
        if self._times is not None:
            self._times.note(index)
        countdown = self.buckets.countdown
        if countdown.is_ready[index]:
            if countdown.has_gone_out(index):
                raise self._too_late(index)
        elif _current_backward() == self._backward and countdown.mark(index):
            self.buckets.send_full(window)
        # else from a backward inside of this one (reentrant checkpointing): there may come more, until the end of all

    def _too_late(self, index: int) -> Exception:
        if index in self._window.unreached:
            return UnusedParametersError(unexpected_message(self._communicator.rank, self._names[index]))
        return RuntimeError(
            f"Rank {self._communicator.rank}: {self._names[index]!r} got a second gradient in one backward, after its bucket "
            f"had been sent. It is used both inside and outside of checkpointed blocks: use non-reentrant checkpointing "
            f"(use_reentrant=False). The optimizer has not moved."
        )

    def _write_riders(self, scale: float) -> None:
        window = self._window
        weight, carried = window.weight or (1.0, 0.0)
        strict = self.strict and (window.has_forward or not self.is_shared)
        word = window.word(self.parameters, self.changes, strict=strict, number=self._number)
        self.buckets.riders.write(window.touched, word, weight, carried, self.has_hand_up(), scale)

    # ---- at the end of a backward

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what is left, wait for all, and leave the mean in the parameters' gradients.

        Raises:
            UnusedParametersError: `strict`, and some rank had no gradient for some parameter.
            RankFailedError: another rank failed, and took part without its gradients, or skipped a backward.
            ReplicaError: the ranks do not train the same parameters.
            CollectiveError: a peer is gone, or the group's timeout ran out.
        """
        if self.phase is not Phase.COLLECTING:
            return
        if self._times is not None and not self._window.excused:
            self._times.end()
        try:
            self.buckets.send_rest(self._window)
            self._wait_for_futures()
            self.totals = self.buckets.riders.totals()
            self.buckets.divide(self._window, self.totals.weight)
            taken = [self._names[index] for index in self.buckets.gradients.taken]
            self._hand_out()
            self._raise_what_was_said()
            if taken:
                raise RuntimeError(taken_message(self._communicator.rank, taken))
            self._follow_changes()
            if self._window.failure is None:
                step_in_backward(self.stepped or ())
        except CollectiveError as error:
            raise told(error, f"It was in reduction {self.reductions}, counted from 0.") from error.__cause__
        finally:
            self.reductions += 1
            self._reset()
            HERE.enter("")

    def _wait_for_futures(self) -> None:
        for future in self._futures:
            future.wait()
        self._futures.clear()

    def _hand_out(self) -> None:
        window, gradients = self._window, self.buckets.gradients
        untouched = window.untouched()
        if window.failure is not None:
            gradients.drop(window.touched)
            return
        if not window.excused:
            self.untouched = untouched if self.untouched is None else self.untouched
            self.is_static &= untouched == self.untouched
        users = self.buckets.riders.used[untouched].tolist() if untouched else []
        gradients.hand_out(untouched, {index for index, count in zip(untouched, users, strict=True) if not count})
        if window.has_graph:
            gradients.refuse_derivatives()

    def _raise_what_was_said(self) -> None:
        window = self._window
        by_all = 0 not in window.touched and window.failure is None and not self.changes
        if not self.buckets.on_cpu and window.weight is None and by_all:
            # Reading now would make the host wait for the whole backward; a copy is read at the next forward.
            words = self.buckets.riders.words.clone()
            self._unread = words, torch.Event(words.device)
            self._unread[1].record()
        else:
            self._raise_for(self.buckets.riders.words, self.reductions)

    def raise_unread(self) -> None:
        """Collective where it raises. What the last reduction said, where nobody has read it yet."""
        if self._unread is not None:
            (words, written), self._unread = self._unread, None
            written.synchronize()
            self._raise_for(words, self.reductions - 1)

    def _raise_for(self, words: torch.Tensor, reduction: int) -> None:
        try:
            raise_what_was_said(words, reduction, self._communicator, self._evidence)
        except Exception as error:
            self.error = str(error)
            raise

    def _evidence(self) -> Evidence:
        training = partial(states_in_training, self._names, self.parameters, self.changes)
        lacking = partial(self._window.lacking_by_name, self._names, self.parameters)
        return Evidence(self._number, self._window.failure, training, lacking)

    def _reset(self) -> None:
        """Ready for the next window; after an error too, so that the next backward is not disturbed by this one."""
        self.phase = Phase.ARMED
        self.buckets.restart()
        self._window = Window(bytearray(len(self.parameters)))

    # ---- when the model has changed

    def _follow_changes(self) -> None:
        """Collective, where all ranks have changed their models alike: bring the gradients of new parameters together."""
        if not self.changes:
            return
        self.is_outdated = True
        if not self.changes.new:
            return
        names, parameters = zip(*self.changes.new, strict=True)
        caps, in_order = self.buckets.caps, self.buckets.in_order
        buckets = Buckets(self.changes.new, self._communicator, caps, as_views=False, in_order=in_order)
        late = Reducer(buckets, names, self._communicator, strict=self.strict)
        late._window.touched = bytearray(parameter.grad is not None for parameter in parameters)
        late._window.weight, late._window.excused = self._window.weight, self._window.excused
        late.phase = Phase.COLLECTING
        try:
            late.finish()
        finally:
            late.remove_hooks()

    def take_over(self, other: "Reducer") -> None:
        """Go on counting where `other` ends, which no longer fits the model."""
        self.reductions, self.totals = other.reductions, other.totals
        self.buckets.hook, self.buckets.bytes_reduced = other.buckets.hook, other.buckets.bytes_reduced
        self.is_shared, self.has_hand_up = other.is_shared, other.has_hand_up
        self.under_no_sync, self._has_warned = other.under_no_sync, other._has_warned
        self._came, self._times, self.has_started = None, None, other.has_started
        if [*map(id, self.parameters)] == [*map(id, other.parameters)]:
            self._window = other._window
            self.buckets.gradients.tree = other.buckets.gradients.tree
        other.remove_hooks()

    def remove_hooks(self) -> None:
        """Let go of the parameters."""
        self._hooks.remove()


def _no_hand() -> bool:
    return False


def _through(reducer: "weakref.ref[Reducer]", method: Callable[..., None], *arguments: Any) -> None:
    """Call a method of a reducer that is known weakly, if it still lives."""
    living = reducer()
    if living is not None:
        method(living, *arguments)
