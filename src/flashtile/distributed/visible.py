"""Which rows and keys of a sharded call see each other by position, before masks are asked."""

import functools
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import NamedTuple

from ..call.window import Window, key_range, row_range
from .layout import Piece, Placement, joined

# Rows and keys of parts begin at multiples of this, or where pieces do: tiles are full, and rows of a bias aligned.
BLOCK = 128


class Document(NamedTuple):
    """The rows and keys of one sequence, by their places in the call."""

    rows: Piece
    keys: Piece

    @property
    def diagonal(self) -> int:
        """Keys minus rows: how far the last key is to the right of the last row."""
        return self.keys.length - self.rows.length

    def visible(self, window: Window, rows: Piece, keys: Piece) -> tuple[Piece, Piece] | None:
        """Cut rows and keys of the call to the first and the last visible pair of this sequence, if it has one."""
        own_rows, own_keys = rows.cut(self.rows), keys.cut(self.keys)
        if own_rows.length == 0 or own_keys.length == 0:
            return None
        rows, keys = own_rows.since(self.rows.start), own_keys.since(self.keys.start)
        rows = within(rows, *row_range(window, keys.start, keys.stop - 1, self.diagonal))
        if rows.length == 0:
            return None
        seen = key_range(window, rows.start, rows.stop - 1, keys.length, self.diagonal, keys.start)
        keys = within(keys, keys.start + seen.lo, keys.start + seen.hi - 1)
        if keys.length == 0:
            return None
        return rows.since(-self.rows.start), keys.since(-self.keys.start)


def overlapping(documents: tuple[Document, ...], rows: Piece, keys: Piece) -> range:
    """The sequences, which follow each other, that have some of these rows and some of these keys."""
    first, stop = 0, len(documents)
    for of, piece in enumerate((rows, keys)):
        first = max(first, bisect_right(documents, piece.start, key=lambda document, of=of: document[of].stop))
        stop = min(stop, bisect_left(documents, piece.stop, key=lambda document, of=of: document[of].start))
    return range(first, stop)


def within(piece: Piece, first: float, last: float) -> Piece:
    """Cut a piece to `first..last` (inclusive), and back to the start of a block."""
    start, stop = max(piece.start, first), min(piece.stop, last + 1)
    if start >= stop:
        return Piece(piece.start, piece.start)
    return Piece(int(start) - (int(start) - piece.start) % BLOCK, int(stop))


class Needed(NamedTuple):
    """The keys that each rank's rows see.

    Attributes:
        keys: of each rank.
        once: whether no key is seen by two pieces of a rank's rows. Then a rank has one gradient of it.
    """

    keys: Placement
    once: bool


@functools.lru_cache(maxsize=1024)
def needed_keys(window: Window, documents: tuple[Document, ...], rows: Placement, num_keys: int) -> Needed:
    """The keys that each rank's rows see by position."""
    everything, by_rank, once = Piece(0, num_keys), [], True
    for of_rank in rows.by_rank:
        seen = [
            documents[n].visible(window, piece, everything)
            for piece in of_rank
            for n in overlapping(documents, piece, everything)
        ]
        pieces = sorted(pair[1] for pair in seen if pair is not None)
        once = once and all(a.stop <= b.start for a, b in pairwise(pieces))
        by_rank.append(joined(pieces))
    return Needed(Placement(tuple(by_rank)), once)
