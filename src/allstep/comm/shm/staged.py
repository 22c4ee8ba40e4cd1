"""Collectives on tensors of any memory: each rank copies pieces of its own where the others can read them.

Pieces take turns in a few places, so that ranks copy, sum and wait at the same time. A rank writes into a place again only when
a wait has shown that nobody reads it any more; the comment at each loop says which.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.shm.peers import STAGED, TURN, Peers
from allstep.comm.shm.reduction import COMBINE, combine

__all__ = ["Staged"]

PAIR_PIECE, PAIR_PLACES = 256 << 10, 4
"""Bytes and number of places of a sum over two ranks: one wait for each piece, hidden behind the copy of the next."""
SLICED_PIECE, SLICED_PLACES = 1 << 20, 3
"""The same with more ranks, each of which sums a slice of every piece."""
EXCHANGED = STAGED // 2
"""Bytes that a rank shows the others in one turn of an exchange; two places take turns."""

assert PAIR_PIECE * PAIR_PLACES <= STAGED
assert SLICED_PIECE * SLICED_PLACES <= STAGED


class Staged:
    """The staged collectives of some peers. All take contiguous tensors of one dimension, outside of autograd.

    Whoever calls them says afterwards that the collective is done.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._rank, self._size = peers.rank, peers.size
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._views: dict[Any, Any] = {}  # kept: to cut them anew for each call costs 0.4 ms for a large tensor

    def _places(self, dtype: torch.dtype, nbytes: int, count: int) -> list[tuple[torch.Tensor, ...]]:
        """By rank, `count` places of `nbytes`."""
        key = (dtype, nbytes, count)
        views = self._views.get(key)
        if views is None:
            self._make_room()
            numel = nbytes // dtype.itemsize
            views = [each[: numel * count * dtype.itemsize].view(dtype).split(numel) for each in self._peers.staging]
            self._views[key] = views
        return views

    def _make_room(self) -> None:
        if len(self._views) > 512:
            self._views.clear()

    # ---- sums over ranks, on all of them

    def all_reduce(self, flat: torch.Tensor, op: Any, number: int, call: int) -> None:
        """Piece by piece; of a collective that all have come to."""
        self._peers.all_done(number - 1, call)  # nobody reads the staging memory any more
        if self._size == 2:
            self._all_reduce_pair(flat, op, call)
        else:
            self._all_reduce_sliced(flat, op, call)

    def _all_reduce_pair(self, flat: torch.Tensor, op: Any, call: int) -> None:
        """Two ranks: copy a piece in, combine with the peer's piece of one turn before.

        A piece is written where that of four turns before was. The peer has read it three turns before, before it wrote the
        piece that this rank has waited for in the last turn.
        """
        peers, step = self._peers, PAIR_PIECE // flat.element_size()
        function = None if op == dist.ReduceOp.AVG else COMBINE[op]
        own, other = (self._places(flat.dtype, PAIR_PIECE, PAIR_PLACES)[rank] for rank in (self._rank, 1 - self._rank))
        pieces, base, tell = flat.split(step), peers.turn, peers.tell
        last, theirs, wait = len(pieces), peers.cells[1 - self._rank], peers.watch.wait
        for turn in range(last + 1):
            if turn < last:
                piece, place = pieces[turn], own[turn % PAIR_PLACES]
                (place if piece.numel() == step else place[: piece.numel()]).copy_(piece)
                tell(TURN, base + turn + 1)
            if turn:
                if theirs[TURN] < base + turn:
                    wait(TURN, base + turn, call)
                piece, place = pieces[turn - 1], other[(turn - 1) % PAIR_PLACES]
                place = place if piece.numel() == step else place[: piece.numel()]
                if function is not None:
                    function(piece, place, out=piece)
                else:
                    combine([piece, place], op, piece)
        peers.turn = base + last

    def _all_reduce_sliced(self, flat: torch.Tensor, op: Any, call: int) -> None:
        """More ranks, three things in each turn: copy a piece in, combine my slice of the piece before, take the others' slices
        of the one before that.

        The place of a piece is free when all have taken what they need of the piece three turns before, in the turn before.
        """
        peers, step = self._peers, SLICED_PIECE // flat.element_size()
        places, pieces, base = self._places(flat.dtype, SLICED_PIECE, SLICED_PLACES), flat.split(step), peers.turn
        last, rank, size = len(pieces), self._rank, self._size
        for turn in range(last + 2):
            if turn < last:
                piece, place = pieces[turn], places[rank][turn % SLICED_PLACES]
                low, high, end = piece.numel() * rank // size, piece.numel() * (rank + 1) // size, piece.numel()
                if low:
                    place[:low].copy_(piece[:low])
                if high < end:
                    place[high:end].copy_(piece[high:])
            if 0 <= turn - 1 < last:
                piece, at = pieces[turn - 1], (turn - 1) % SLICED_PLACES
                low, high = piece.numel() * rank // size, piece.numel() * (rank + 1) // size
                slices = [places[other][at][low:high] for other in range(size)]  # only this rank reads them
                own, slices[rank] = slices[rank], piece[low:high]
                combine(slices, op, piece[low:high], in_place=True)
                own.copy_(piece[low:high])
            if turn >= 2:
                piece, at = pieces[turn - 2], (turn - 2) % SLICED_PLACES
                for other in self._others:
                    low, high = piece.numel() * other // size, piece.numel() * (other + 1) // size
                    piece[low:high].copy_(places[other][at][low:high])
            peers.tell(TURN, base + turn + 1)
            peers.watch.wait(TURN, base + turn + 1, call)
        peers.turn = base + last + 2

    # ---- everything else

    def exchange(
        self,
        rounds: int,
        number: int,
        call: int,
        show: Callable[[int, torch.Tensor], None],
        take: Callable[[int, list[torch.Tensor]], None],
    ) -> None:
        """In each round every rank shows some bytes, and reads what it needs of those that the others show.

        A place is written again two rounds later; a rank has read it before it shows its bytes of the round between, which
        all have waited for.

        Args:
            rounds: how many; the same on all ranks.
            number: that of the collective.
            call: which it is.
            show: `show(round, place)` writes what others need into (EXCHANGED,) bytes.
            take: `take(round, places)` reads the places of all ranks.
        """
        peers = self._peers
        peers.all_done(number - 1, call)
        places = self._places(torch.uint8, EXCHANGED, 2)
        for turn in range(rounds):
            place = peers.turn & 1  # goes on over exchanges: a collective may have several
            show(turn, places[self._rank][place])
            peers.turn += 1
            peers.tell(TURN, peers.turn)
            peers.watch.wait(TURN, peers.turn, call)
            take(turn, [each[place] for each in places])

    def broadcast(self, flat: torch.Tensor, root: int, number: int, call: int) -> None:
        """`flat`, as bytes, of rank `root` to all."""
        pieces = flat.split(EXCHANGED)

        def show(turn: int, place: torch.Tensor) -> None:
            if self._rank == root:
                place[: pieces[turn].numel()].copy_(pieces[turn])

        def take(turn: int, places: list[torch.Tensor]) -> None:
            if self._rank != root:
                pieces[turn].copy_(places[root][: pieces[turn].numel()])

        self.exchange(len(pieces), number, call, show, take)

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, number: int, call: int, longest: int | None = None
    ) -> None:
        """`flat`, as bytes, of every rank into `outputs`, by rank, where those are wanted; `longest` where sizes differ."""

        def show(turn: int, place: torch.Tensor) -> None:
            piece = flat[turn * EXCHANGED : (turn + 1) * EXCHANGED]
            place[: piece.numel()].copy_(piece)

        def take(turn: int, places: list[torch.Tensor]) -> None:
            for output, place in zip(outputs or (), places, strict=False):
                piece = output[turn * EXCHANGED : (turn + 1) * EXCHANGED]
                piece.copy_(place[: piece.numel()])

        self.exchange(-(-(longest or flat.numel()) // EXCHANGED), number, call, show, take)

    def reduce(self, flat: torch.Tensor, op: Any, root: int, number: int, call: int) -> None:
        """All ranks' `flat` combined into that of rank `root`."""
        pieces = flat.split(EXCHANGED // flat.element_size())

        def show(turn: int, place: torch.Tensor) -> None:
            place.view(flat.dtype)[: pieces[turn].numel()].copy_(pieces[turn])

        def take(turn: int, places: list[torch.Tensor]) -> None:
            if self._rank == root:
                size = pieces[turn].numel()
                combine([place.view(flat.dtype)[:size] for place in places], op, pieces[turn])

        self.exchange(len(pieces), number, call, show, take)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        op: Any,
        root: int | None,
        number: int,
        call: int,
        longest: int | None = None,
    ) -> None:
        """The pieces for this rank of what all ranks bring, combined; of what rank `root` brings, where that is given.

        Args:
            output: this rank's.
            inputs: by rank, what this one brings for it; None where it brings nothing.
            op: how to combine; None with a root.
            root: the only rank that brings something.
            number: that of the collective.
            call: which it is.
            longest: elements of the longest output, where they differ.
        """
        step = EXCHANGED // (self._size * output.element_size() * 64) * 64

        def show(turn: int, place: torch.Tensor) -> None:
            typed = place.view(output.dtype)
            for rank, given in enumerate(inputs or ()):
                piece = given[turn * step : (turn + 1) * step]
                typed[rank * step : rank * step + piece.numel()].copy_(piece)

        def take(turn: int, places: list[torch.Tensor]) -> None:
            piece, start = output[turn * step : (turn + 1) * step], self._rank * step
            mine = [place.view(output.dtype)[start : start + piece.numel()] for place in places]
            if root is None:
                combine(mine, op, piece)
            else:
                piece.copy_(mine[root])

        self.exchange(-(-(longest or output.numel()) // step), number, call, show, take)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int, call: int) -> str:
        """`inputs[r]`, as bytes, to rank r, and `outputs[r]` from it; sizes may all differ. What does not fit, in words.

        The first round tells how much everyone sends to whom.
        """
        step = EXCHANGED // (self._size * 64) * 64
        sent = torch.tensor([each.numel() for each in inputs])
        sizes: list[torch.Tensor] = []

        def show_sizes(_: int, place: torch.Tensor) -> None:
            place.view(torch.int64)[: self._size].copy_(sent)

        def take_sizes(_: int, places: list[torch.Tensor]) -> None:
            sizes.extend(place.view(torch.int64)[: self._size].clone() for place in places)

        def show(turn: int, place: torch.Tensor) -> None:
            for rank, given in enumerate(inputs):
                piece = given[turn * step : (turn + 1) * step]
                place[rank * step : rank * step + piece.numel()].copy_(piece)

        def take(turn: int, places: list[torch.Tensor]) -> None:
            for rank, output in enumerate(outputs):
                piece = output[turn * step : (turn + 1) * step]
                piece.copy_(places[rank][self._rank * step : self._rank * step + piece.numel()])

        self.exchange(1, number, call, show_sizes, take_sizes)
        table = torch.stack(sizes)
        wrong = [
            f"rank {rank} sends {int(table[rank, to])} bytes to rank {to}"
            for to in range(self._size)
            for rank in range(self._size)
            if to == self._rank and int(table[rank, to]) != outputs[rank].numel()
        ]
        rounds = -(-int(table.max()) // step)
        if wrong:
            rounds_to_take: Callable[[int, list[torch.Tensor]], None] = lambda *_: None  # noqa: E731
            self.exchange(rounds, number, call, show, rounds_to_take)
            expected = ", ".join(f"{output.numel()} from rank {rank}" for rank, output in enumerate(outputs))
            return f"{'; '.join(wrong)}, but it expects {expected} bytes"
        self.exchange(rounds, number, call, show, take)
        return ""
