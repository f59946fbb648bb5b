"""Layouts: which rows of a sequence each rank holds."""

from typing import Literal, NamedTuple, get_args

from ..errors import ArgumentError

Kind = Literal["contiguous", "zigzag"]
EXAMPLE = 'flashtile.distributed.shard(x, mesh, dim=2, layout="zigzag")'


class Piece(NamedTuple):
    """Rows of the whole sequence that follow each other: `[start, stop)`."""

    start: int
    stop: int


class Layout(NamedTuple):
    """The rows that each rank holds, in the order in which it holds them.

    "contiguous" cuts the sequence into one piece a rank. "zigzag" cuts it into twice as many; rank r holds piece r and
    piece `2 * ranks - 1 - r`, which gives all ranks about the same work under a causal mask. Lengths of pieces differ
    by at most one row, and pieces may be empty.

    Example:
        >>> flashtile.distributed.Layout("zigzag", 10, 2).pieces(0)
        (Piece(start=0, stop=3), Piece(start=8, stop=10))

    Attributes:
        kind: "contiguous" or "zigzag".
        length: rows of the whole sequence.
        ranks: ranks of the mesh.
    """

    kind: Kind
    length: int
    ranks: int

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The rows of a rank, by their places in the whole sequence."""
        if self.kind == "contiguous":
            return (self.cut(rank, self.ranks),)
        return self.cut(rank, 2 * self.ranks), self.cut(2 * self.ranks - 1 - rank, 2 * self.ranks)

    def rows(self, rank: int) -> int:
        """The number of rows of a rank."""
        return sum(piece.stop - piece.start for piece in self.pieces(rank))

    def cut(self, n: int, parts: int) -> Piece:
        """Part n of the sequence; the first `length % parts` are one row longer."""
        least, longer = divmod(self.length, parts)
        return Piece(n * least + min(n, longer), (n + 1) * least + min(n + 1, longer))


def kind_of(layout: str) -> Kind:
    """The accepted names of layouts, or an error."""
    if layout not in get_args(Kind):
        raise ArgumentError("layout", layout, " or ".join(repr(kind) for kind in get_args(Kind)), EXAMPLE)
    return layout  # type: ignore[return-value]
