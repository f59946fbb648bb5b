"""Parts of a sharded call: some rows against some keys, each one call of the operators with its place in the whole."""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.call import Call, Settings, Tensors, differentiable_positions
from ..call.problem import accumulation_dtype
from ..call.window import Window, key_range, row_range
from ..dispatch.operators import operators_of
from .layout import Piece, Placement

# Parts begin and end at multiples of this, or where pieces do: tiles are full, and rows of a bias aligned.
BLOCK = 128


class Document(NamedTuple):
    """The rows and keys of one sequence, by their places among those of the call."""

    rows: Piece
    keys: Piece


class Whole(NamedTuple):
    """The whole of a sharded call: its settings, which rows and keys each rank of a group holds, and its sequences.

    A dense call has one document, and its tensors keep their batch. A packed call has a batch of 1, in which its
    sequences follow each other.
    """

    settings: Settings
    rows: Placement
    keys: Placement
    documents: tuple[Document, ...]
    packed: bool = False


class Part(NamedTuple):
    """One call of a sharded call: its rows and keys in the ranks' tensors, its keys among all keys, its settings."""

    rows: slice
    keys: slice
    of_all_keys: slice
    document: int | None  # of a packed call
    settings: Settings

    def of(self, t: Tensors) -> Tensors:
        """Views of a rank's rows and an owner's keys; tensors of pairs have all keys. Gradients have the same views."""
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2 and self.document is not None:
            slopes = slopes[self.document : self.document + 1]
        return t._replace(
            q=t.q[:, :, self.rows],
            k=t.k[:, :, self.keys],
            v=t.v[:, :, self.keys],
            mask=self.pairs(t.mask),
            bias=self.pairs(t.bias),
            alibi_slopes=slopes,
            sinks=None,  # the merged result's
        )

    def pairs(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        rows = self.rows if x.shape[2] != 1 else slice(None)
        return x[:, :, rows, self.of_all_keys if x.shape[3] != 1 else slice(None)]


def heads_of(t: Tensors, heads: slice) -> Tensors:
    """The rows of some query heads, with all that belongs to them, short of keys and values."""

    def select(x: Tensor | None, dim: int) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.movedim(dim, 0)[heads].movedim(0, dim)

    return t._replace(
        q=t.q[:, heads], mask=select(t.mask, 1), bias=select(t.bias, 1), alibi_slopes=select(t.alibi_slopes, -1),
        sinks=select(t.sinks, 0),
    )  # fmt: skip


def settings_of_heads(settings: Settings, first: int, num_heads: int) -> Settings:
    """The settings of a call of the heads from `first` on, out of `num_heads` of the call that it is part of."""
    return settings._replace(h0=settings.h0 + first, num_heads=settings.num_heads or num_heads)


@functools.lru_cache(maxsize=4096)
def parts(whole: Whole, rank: int, owner: int) -> tuple[Part, ...]:
    """The parts of `rank`'s rows and `owner`'s keys with anything visible by position, in a fixed order."""
    return tuple(find_parts(whole, rank, owner))


def find_parts(whole: Whole, rank: int, owner: int) -> Iterator[Part]:
    s = whole.settings
    for of_rows, first_row in whole.rows.local(rank):
        for of_keys, first_key in whole.keys.local(owner):
            for n in documents_in(whole, of_rows, of_keys):
                document = whole.documents[n]
                diagonal = document.keys.length - document.rows.length
                rows, keys = of_rows.cut(document.rows), of_keys.cut(document.keys)
                seen = visible(s.window, rows.since(document.rows.start), keys.since(document.keys.start), diagonal)
                if seen is None:
                    continue
                i0, j0 = seen[0].start, seen[1].start
                rows, keys = seen[0].since(-document.rows.start), seen[1].since(-document.keys.start)
                at_row, at_key = first_row + rows.start - of_rows.start, first_key + keys.start - of_keys.start
                yield Part(
                    slice(at_row, at_row + rows.length),
                    slice(at_key, at_key + keys.length),
                    slice(*keys),
                    n if whole.packed else None,
                    s._replace(b0=s.b0 + n, i0=i0, j0=j0, diagonal=diagonal - (keys.length - rows.length)),
                )


def documents_in(whole: Whole, rows: Piece, keys: Piece) -> range:
    """The sequences, which follow each other, that may have some of these rows and some of these keys."""
    if not whole.packed:
        return range(len(whole.documents))
    ends = [
        (
            bisect_right(whole.documents, piece.start, key=lambda document, of=of: document[of].stop),
            bisect_left(whole.documents, piece.stop, key=lambda document, of=of: document[of].start),
        )
        for of, piece in enumerate((rows, keys))
    ]
    return range(max(first for first, _ in ends), min(stop for _, stop in ends))


def visible(window: Window, rows: Piece, keys: Piece, diagonal: int) -> tuple[Piece, Piece] | None:
    """Of some rows and keys, those between the first and the last pair that the window leaves visible."""
    if rows.length == 0 or keys.length == 0:
        return None
    first, last = row_range(window, keys.start, keys.stop - 1, diagonal)
    rows = blocks(rows, first, last + 1)
    if rows.length == 0:
        return None
    seen = key_range(window, rows.start, rows.stop - 1, keys.length, diagonal, keys.start)
    keys = blocks(keys, keys.start + seen.lo, keys.start + seen.hi)
    return (rows, keys) if keys.length > 0 else None


def blocks(piece: Piece, start: float, stop: float) -> Piece:
    """What a piece has of `[start, stop)`, in whole blocks of the piece."""
    if max(start, piece.start) >= min(stop, piece.stop):
        return Piece(piece.start, piece.start)
    if start > piece.start:
        piece = Piece(int(start) - (int(start) - piece.start) % BLOCK, piece.stop)
    if stop < piece.stop:
        piece = Piece(piece.start, min(int(stop) + (piece.start - int(stop)) % BLOCK, piece.stop))
    return piece


@functools.lru_cache(maxsize=1024)
def steps_of(whole: Whole, ranks: int) -> int:
    """The number of ring steps after which no rank sees a key of the owners that would follow."""
    needed = [step for step in range(ranks) if any(parts(whole, rank, (rank - step) % ranks) for rank in range(ranks))]
    return 1 + max(needed, default=0)


class Results:
    """Merged results of a rank's rows, in the accumulation dtype: out `[B, H, S, Dv]`, lse `[B, H, S]`."""

    def __init__(self, out: Tensor, lse: Tensor):
        self.out, self.lse = out, lse
        self.merged: list[slice] = []  # the rows of each part so far

    @classmethod
    def empty(cls, q: Tensor, v: Tensor) -> "Results":
        """Results of rows that have seen no key."""
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        return cls(out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype))

    def heads(self, heads: slice) -> "Results":
        """Views of some heads, for which no part has been merged."""
        return Results(self.out[:, heads], self.lse[:, heads])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the attention of some rows over keys that they have not seen."""
        total, total_lse = self.out[:, :, rows], self.lse[:, :, rows]
        if all(rows.stop <= other.start or other.stop <= rows.start for other in self.merged):
            total.copy_(out)
            total_lse.copy_(lse)
        else:
            merged_lse = torch.logaddexp(total_lse, lse)
            total.mul_(share(total_lse, merged_lse)[..., None])
            total.addcmul_(out, share(lse, merged_lse)[..., None])
            total_lse.copy_(merged_lse)
        self.merged.append(rows)


def share(lse: Tensor, total: Tensor) -> Tensor:
    """The share of a part in a result; of one without keys, 0."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))


def forward(whole: Whole, tensors: Tensors, ranks: tuple[int, int], results: Results) -> None:
    """Merge the attention of a rank's rows over an owner's keys, which `tensors` has, into `results`."""
    for part in parts(whole, *ranks):
        call = Call(part.of(tensors), part.settings)
        operators = operators_of(call)
        results.merge(part.rows, *operators.forward(*operators.arguments(call)))


class Saved(NamedTuple):
    """Inputs of backward for a rank's rows; out and lse are those over all keys, from which delta follows."""

    out: Tensor
    lse: Tensor
    dout: Tensor | None
    dlse: Tensor | None

    def heads(self, heads: slice) -> "Saved":
        return Saved._make(None if x is None else x[:, heads] for x in self)  # type: ignore[arg-type]

    def rows(self, rows: slice) -> "Saved":
        return Saved._make(None if x is None else x[:, :, rows] for x in self)  # type: ignore[arg-type]


def backward(whole: Whole, tensors: Tensors, ranks: tuple[int, int], saved: Saved, sums: Tensors) -> None:
    """Add the gradients of a rank's rows and an owner's keys to `sums`, in which `None` is not requested.

    `p = exp(s - lse)` and `ds = p * (dp - delta)` hold for any part of the keys, if lse and delta are those over all of
    them. So the backends' backward pass is right for a part as it stands.
    """
    for part in parts(whole, *ranks):
        call, totals = Call(part.of(tensors), part.settings), part.of(sums).flat()
        wanted = [totals[n] for n in differentiable_positions(len(totals))]
        needs = [total is not None for total in wanted]
        gradients = operators_of(call).differentiate(needs, *saved.rows(part.rows), call)
        for total, gradient in zip(wanted, gradients, strict=True):
            if total is not None:
                assert gradient is not None
                total.add_(gradient)
