"""The visible pairs of a call, by rows and by ranks: the work that a layout shares."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.window import Window
from .layout import Layout, Piece, Placement
from .visible import Document

SAMPLES, LEAST = 4096, 64  # rows of all pieces, and of each, whose visible keys are counted for a pair of ranks


class MaskBlocks:
    """The visible pairs of a sequence by blocks, of its window and mask."""

    def __init__(self, document: Document, sizes: tuple[int, int], pairs: Tensor):
        self.document, self.sizes = document, sizes  # sizes of rows and of keys
        self.pairs = pairs  # [blocks of rows, blocks of keys], float64

    def of_rows(self) -> Tensor:
        """The visible pairs of each row, which has an equal share of its block's."""
        lengths = lengths_of(self.document.rows, self.sizes[0])
        return (self.pairs.sum(dim=1) / lengths).repeat_interleave(lengths.long())

    def of_ranks(self, rows: Placement, keys: Placement) -> Tensor:
        """The visible pairs `[ranks, owners]`."""
        of_rows, of_keys = (shares(*x) for x in zip((rows, keys), self.document, self.sizes, strict=True))
        return of_rows @ self.pairs @ of_keys.T


def shares(placement: Placement, whole: Piece, size: int) -> Tensor:
    """The part of each block of a sequence that each rank has, `[ranks, blocks]`."""
    lengths = lengths_of(whole, size)
    starts = whole.start + torch.arange(len(lengths), dtype=torch.float64) * size
    found = lengths.new_zeros(len(placement.by_rank), len(lengths))
    for rank, pieces in enumerate(placement.by_rank):
        for piece in pieces:
            common = (starts + lengths).clamp(max=piece.stop) - starts.clamp(min=piece.start)
            found[rank] += common.clamp(min=0)
    return found / lengths


def lengths_of(piece: Piece, size: int) -> Tensor:
    """The lengths of a piece's blocks; the last one may be shorter."""
    starts = torch.arange(0, piece.length, size, dtype=torch.float64)
    return (piece.length - starts).clamp(max=size)


class Visible(NamedTuple):
    """The pairs that are visible in a whole call: by position in its sequences, or by the blocks of a mask as well."""

    window: Window
    documents: tuple[Document, ...]
    masks: tuple[MaskBlocks, ...] | None = None  # a sequence each

    @property
    def num_rows(self) -> int:
        return max((document.rows.stop for document in self.documents), default=0)

    def of_rows(self) -> Tensor:
        """The visible pairs of each row, `[rows]` in float64."""
        if self.masks is not None:
            return torch.cat([x.of_rows() for x in self.masks] or [torch.zeros(0, dtype=torch.float64)])
        lo, hi = self.keys_of(torch.arange(self.num_rows, dtype=torch.float64))
        return hi - lo

    def of_ranks(self, rows: Placement, keys: Placement, block: int = 1) -> Tensor:
        """The visible pairs of each rank's rows and each owner's keys, `[ranks, owners]` in float64.

        Of long pieces, they are estimated from rows in equal distances. With `block`, a row's first and last key
        bound whole blocks of the sequence, as tiles have them; masks count by blocks anyway.
        """
        pairs = torch.zeros(len(rows.by_rank), len(keys.by_rank), dtype=torch.float64)
        for x in self.masks or ():
            pairs += x.of_ranks(rows, keys)
        if self.masks is not None:
            return pairs
        pieces = [(owner, p) for owner, of_owner in enumerate(keys.by_rank) for p in of_owner]
        owners = torch.tensor([owner for owner, _ in pieces], dtype=torch.int64)
        starts, stops = (torch.tensor([p[n] for _, p in pieces], dtype=torch.float64) for n in (0, 1))
        most = max(SAMPLES // max(sum(map(len, rows.by_rank)), 1), LEAST)
        for rank, of_rank in enumerate(rows.by_rank):
            for piece in of_rank:
                count = min(piece.length, most)
                at = piece.start + ((torch.arange(count, dtype=torch.float64) + 0.5) * piece.length / count).floor()
                lo, hi = (x[:, None] for x in self.keys_of(at))
                if block > 1:  # but of rows that see no key
                    lo, hi = lo.div(block).floor() * block, hi.div(block).ceil().mul(block).where(hi > lo, lo)
                seen = (torch.minimum(hi, stops) - torch.maximum(lo, starts)).clamp(min=0)
                pairs[rank].index_add_(0, owners, seen.mean(dim=0) * piece.length)
        return pairs

    def keys_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys `[lo, hi)` that rows see by position, among all keys."""
        places = torch.tensor([(*rows, *keys) for rows, keys in self.documents], dtype=torch.float64).view(-1, 4)
        of_row = torch.searchsorted(places[:, 0].contiguous(), rows, right=True) - 1
        first, stop, first_key, stop_key = places[of_row].unbind(dim=1)
        num_keys = stop_key - first_key
        lo, hi = bounds(self.window, rows - first, num_keys - (stop - first), num_keys)
        lo = lo.clamp(min=0).minimum(num_keys)
        return first_key + lo, first_key + hi.minimum(num_keys).maximum(lo)


def bounds(window: Window, rows: Tensor, diagonal: Tensor, num_keys: Tensor) -> tuple[Tensor, Tensor]:
    """The keys `[lo, hi)` that rows of a sequence see; what is outside of the sequence is none."""
    lo, hi = torch.zeros_like(rows), num_keys
    if window.left is not None:
        lo = rows + diagonal - window.left
    if window.right is not None:
        hi = hi.minimum(rows + diagonal + window.right + 1)
    if window.top_left:
        hi = hi.minimum(rows + 1)
    if window.chunk is not None:
        start = ((rows + diagonal) / window.chunk).floor() * window.chunk
        lo, hi = lo.maximum(start), hi.minimum(start + window.chunk)
    return lo, hi


def work_of(work: Tensor, pieces: Sequence[Piece]) -> list[float]:
    """The work of each piece, from each row's."""
    before = torch.cat([work.new_zeros(1), work.cumsum(0)])
    starts, stops = torch.tensor([[p.start, max(p.start, p.stop)] for p in pieces], dtype=torch.int64).view(-1, 2).T
    return (before[stops] - before[starts]).tolist()  # type: ignore[no-any-return]


def imbalance(work: Tensor, layout: Layout) -> float:
    """The work of the busiest rank over the mean of all ranks. `work` is each row's."""
    pieces = [(rank, piece) for rank in range(layout.ranks) for piece in layout.pieces(rank)]
    of_ranks = [0.0] * layout.ranks
    for (rank, _), n in zip(pieces, work_of(work, [piece for _, piece in pieces]), strict=True):
        of_ranks[rank] += n
    return max(of_ranks) * layout.ranks / sum(of_ranks) if sum(of_ranks) > 0 else 1.0
