"""Layouts: which rows of a sequence each rank holds."""

import functools
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from .copies import join_rows

Kind = Literal["contiguous", "zigzag", "chunks", "balanced"]
NAMES = "contiguous", "zigzag", "chunks"  # names of layouts that follow from lengths
EXAMPLE = 'flashtile.distributed.shard(x, mesh, dim=2, layout="zigzag")'


class Piece(NamedTuple):
    """Rows of the whole sequence that follow each other: `[start, stop)`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(self.stop - self.start, 0)

    def cut(self, other: "Piece") -> "Piece":
        """The rows of both, counted as these are; none if `length` is 0."""
        return Piece(max(self.start, other.start), min(self.stop, other.stop))

    def since(self, start: int) -> "Piece":
        """The same rows, counted from another one."""
        return Piece(self.start - start, self.stop - start)


class Layout(NamedTuple):
    """The rows that each rank holds, in the order in which it holds them.

    "contiguous" cuts the sequence into one piece a rank. "zigzag" cuts it into twice as many; rank r holds piece r and
    piece `2 * ranks - 1 - r`, which gives all ranks about the same work under a causal mask. Lengths of pieces differ
    by at most one row, and pieces may be empty. "chunks" is "contiguous" with the pieces of `torch.chunk` and DTensor,
    which all have the first one's length up to the end of the sequence. "balanced" has the pieces of `by_rank`, which
    `flashtile.distributed.balanced` finds.

    Example:
        >>> flashtile.distributed.Layout("zigzag", 10, 2).pieces(0)
        (Piece(start=0, stop=3), Piece(start=8, stop=10))

    Attributes:
        kind: "contiguous", "zigzag", "chunks" or "balanced".
        length: rows of the whole sequence.
        ranks: ranks of the mesh.
        by_rank: of "balanced", the pieces of each rank in ascending order, that together are the whole sequence.
    """

    kind: Kind
    length: int
    ranks: int
    by_rank: tuple[tuple[Piece, ...], ...] = ()

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The rows of a rank, by their places in the whole sequence."""
        if self.kind == "contiguous":
            return (self.cut(rank, self.ranks),)
        if self.kind == "chunks":
            return (chunk(Piece(0, self.length), rank, self.ranks),)
        if self.kind == "balanced":
            return self.by_rank[rank]
        return self.cut(rank, 2 * self.ranks), self.cut(2 * self.ranks - 1 - rank, 2 * self.ranks)

    def rows(self, rank: int) -> int:
        """The number of rows of a rank."""
        return sum(piece.length for piece in self.pieces(rank))

    def cut(self, n: int, parts: int) -> Piece:
        """Part n of the sequence; the first `length % parts` are one row longer."""
        least, longer = divmod(self.length, parts)
        return Piece(n * least + min(n, longer), (n + 1) * least + min(n + 1, longer))

    @property
    def pieces_per_rank(self) -> int:
        return 2 if self.kind == "zigzag" else 1

    @property
    def even(self) -> bool:
        """Whether all pieces have one length, so that a rank's rows tell the length of the sequence."""
        return self.length % (self.ranks * self.pieces_per_rank) == 0


@functools.lru_cache(maxsize=256)
def rows_of_ranks(layout: Layout) -> list[int]:
    """The number of rows of each rank."""
    return [layout.rows(rank) for rank in range(layout.ranks)]


def chunk(whole: Piece, n: int, parts: int) -> Piece:
    """Part n of some rows, cut as by `torch.chunk` and DTensor; empty if the others have all rows."""
    length = -(-whole.length // parts)
    return Piece(min(whole.start + n * length, whole.stop), min(whole.start + (n + 1) * length, whole.stop))


class Placement(NamedTuple):
    """The rows that each rank of a group holds: pieces in ascending order that do not touch."""

    by_rank: tuple[tuple[Piece, ...], ...]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, layout: Layout, ranks_each: int = 1) -> "Placement":
        """A layout's rows by groups of ranks that hold their rows together."""
        ranks = range(layout.ranks)
        groups = [ranks[n : n + ranks_each] for n in range(0, layout.ranks, ranks_each)]
        return cls(tuple(joined([p for rank in group for p in layout.pieces(rank)]) for group in groups))

    @classmethod
    @functools.lru_cache(maxsize=256)
    def within(cls, layout: Layout, ranks: range) -> "Placement":
        """The rows of some ranks alone, by their places among the rows of these ranks."""
        pieces = sorted(p for rank in ranks for p in layout.pieces(rank) if p.length > 0)
        starts = dict(zip(pieces, accumulate((p.length for p in pieces), initial=0), strict=False))
        moved = [[Piece(starts[p], starts[p] + p.length) for p in layout.pieces(r) if p.length > 0] for r in ranks]
        return cls(tuple(joined(of_rank) for of_rank in moved))

    @property
    def length(self) -> int:
        return sum(map(self.rows, range(len(self.by_rank))))

    def rows(self, rank: int) -> int:
        return sum(piece.length for piece in self.by_rank[rank])

    @property
    def most(self) -> int:
        """The rows of the rank that has the most."""
        return max(map(self.rows, range(len(self.by_rank))))

    def local(self, rank: int) -> list[tuple[Piece, int]]:
        """A rank's pieces, each with its first row in the rank's tensor."""
        pieces = self.by_rank[rank]
        return list(zip(pieces, accumulate((p.length for p in pieces), initial=0), strict=False))

    def shared(self, rank: int, other: "Placement", other_rank: int) -> list[tuple[slice, slice]]:
        """The rows that a rank has here and another one has there: their places in both tensors, in ascending order."""
        found = []
        for piece, first in self.local(rank):
            for other_piece, other_first in other.local(other_rank):
                both = piece.cut(other_piece)
                if both.length > 0:
                    start, other_start = first + both.start - piece.start, other_first + both.start - other_piece.start
                    found.append((slice(start, start + both.length), slice(other_start, other_start + both.length)))
        return found

    def select(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's rows of a whole tensor."""
        pieces = [x.narrow(dim, p.start, p.length) for p in self.by_rank[rank]] or [x.narrow(dim, 0, 0)]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]

    def assemble(self, shards: list[Tensor], dim: int) -> Tensor:
        """The whole tensor from all ranks' rows. A shard may be longer than its rank's rows."""
        pieces = [
            (p, shard.narrow(dim, first, p.length))
            for rank, shard in enumerate(shards)
            for p, first in self.local(rank)
        ]
        pieces.sort(key=lambda pair: pair[0])
        return join_rows([x for _, x in pieces] or [shards[0].narrow(dim, 0, 0)], dim)


def joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces in ascending order, those that touch or overlap as one, without empty ones."""
    found: list[Piece] = []
    for piece in sorted(p for p in pieces if p.length > 0):
        if found and piece.start <= found[-1].stop:
            found[-1] = Piece(found[-1].start, max(found[-1].stop, piece.stop))
        else:
            found.append(piece)
    return tuple(found)


def accepted(layout: str | Layout) -> None:
    """Refuse what is neither the name of a layout nor a `Layout` whose pieces are the sequence."""
    if isinstance(layout, Layout):
        is_accepted = layout.kind in NAMES or (layout.kind == "balanced" and is_partition(layout))
    else:
        is_accepted = layout in NAMES
    if not is_accepted:
        names = " or ".join(map(repr, NAMES))
        raise ArgumentError("layout", layout, f"{names}, or a Layout of flashtile.distributed.balanced", EXAMPLE)


@functools.lru_cache(maxsize=256)
def is_partition(layout: Layout) -> bool:
    """Whether the pieces of all ranks ascend and are the sequence."""
    pieces = sorted(piece for rank in layout.by_rank for piece in rank if piece.length > 0)
    starts, stops = [piece.start for piece in pieces], [piece.stop for piece in pieces]
    ascend = all(list(rank) == sorted(rank) for rank in layout.by_rank)
    return len(layout.by_rank) == layout.ranks and ascend and [*starts, layout.length] == [0, *stops]


def layout_of_whole(layout: str | Layout, length: int, ranks: int) -> Layout:
    """The layout of a sequence of `length` rows."""
    accepted(layout)
    if not isinstance(layout, Layout):
        return Layout(layout, length, ranks)  # type: ignore[arg-type]
    if (layout.length, layout.ranks) != (length, ranks):
        given = f"one of {layout.length} rows over {layout.ranks} ranks"
        raise ArgumentError("layout", given, f"a layout of {length} rows over {ranks} ranks", EXAMPLE)
    return layout


def layout_of(argument: str, layout: str | Layout, rows: int, ranks: int, length: int | None) -> Layout:
    """The layout of a sequence of `length` rows; by default as a `Layout` has it, or of a sequence which all ranks
    share evenly.
    """
    if length is not None and (not isinstance(length, int) or length < 0):
        raise ArgumentError("length", length, "the rows of the whole sequence, or None", EXAMPLE)
    if length is None:
        length = layout.length if isinstance(layout, Layout) else rows * ranks
        found = layout_of_whole(layout, length, ranks)
        if not isinstance(layout, Layout) and not found.even:
            even = f"with layout={layout!r} an even number of rows, or the argument `length`"
            raise ArgumentError(argument, f"{rows} rows", even, EXAMPLE)
        return found
    return layout_of_whole(layout, length, ranks)
