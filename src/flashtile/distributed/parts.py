"""Parts of a sharded call: some rows against some keys, each one call of the operators with its place in the whole."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..call.call import Settings, Tensors
from ..call.window import Window, key_range
from .layout import Placement
from .visible import Document, overlapping

CAUSAL = Window(right=0)


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
    positions: bool = True  # whether a score depends on the places of its row and key beyond the window


class Part(NamedTuple):
    """One call of a sharded call: its rows and keys in the ranks' tensors, its keys among all keys, its settings."""

    rows: slice
    keys: slice
    of_all_keys: slice
    document: int | None  # document of a packed call
    settings: Settings

    def of(self, t: Tensors) -> Tensors:
        """Views of a rank's rows and an owner's keys; tensors of pairs have all keys."""
        keys = t.k[:, :, self.keys], t.v[:, :, self.keys]
        return self.without_rows(t)._replace(q=t.q[:, :, self.rows], k=keys[0], v=keys[1])

    def without_rows(self, t: Tensors) -> Tensors:
        """Views of the tensors that are not rows of q, k or v. Their gradients have the same views."""
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2 and self.document is not None:
            slopes = slopes[self.document : self.document + 1]
        sinks = None  # the merged result's
        return t._replace(mask=self.pairs(t.mask), bias=self.pairs(t.bias), alibi_slopes=slopes, sinks=sinks)

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
    found = list(find_parts(whole, rank, owner))
    return tuple(found if whole.positions else joined_parts(whole, rank, owner, found))


def find_parts(whole: Whole, rank: int, owner: int) -> Iterator[Part]:
    s = whole.settings
    for of_rows, first_row in whole.rows.local(rank):
        for of_keys, first_key in whole.keys.local(owner):
            for n in overlapping(whole.documents, of_rows, of_keys):
                document = whole.documents[n]
                seen = document.visible(s.window, of_rows, of_keys)
                if seen is None:
                    continue
                rows, keys = seen
                at_row, at_key = first_row + rows.start - of_rows.start, first_key + keys.start - of_keys.start
                yield Part(
                    slice(at_row, at_row + rows.length),
                    slice(at_key, at_key + keys.length),
                    slice(*keys),
                    n if whole.packed else None,
                    s._replace(
                        b0=s.b0 + n,
                        i0=rows.start - document.rows.start,
                        j0=keys.start - document.keys.start,
                        diagonal=document.diagonal - (keys.length - rows.length),
                    ),
                )


def joined_parts(whole: Whole, rank: int, owner: int, found: list[Part]) -> list[Part]:
    """Fewer parts with the same visible pairs, where only the window depends on positions.

    In the zigzag layout, a rank's rows see its own keys as in a causal call of these alone. Over the keys of another
    rank, two pieces see one, or one piece sees two.
    """
    own = rank == owner and whole.rows.by_rank[rank] == whole.keys.by_rank[owner]
    if own and whole.settings.window == CAUSAL and not whole.packed and len(found) > 1:
        rows = slice(0, whole.rows.rows(rank))
        return [Part(rows, rows, slice(0, 0), None, whole.settings)]
    joined: list[Part] = []
    for part in map(without_window, found):
        for n, other in enumerate(joined):
            if (both := join(other, part)) is not None:
                joined[n] = both
                break
        else:
            joined.append(part)
    return joined


def without_window(part: Part) -> Part:
    """The part without a window or a place, if each of its rows sees each of its keys."""
    rows, keys, s = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start, part.settings
    seen = key_range(s.window, s.i0, s.i0 + rows - 1, keys, s.diagonal + keys - rows, s.j0)
    if (seen.full_lo, seen.full_hi) != (0, keys):
        return part
    everywhere = {"window_left": None, "window_right": None, "top_left": False, "attention_chunk": None}
    return part._replace(settings=s._replace(**everywhere, b0=0, i0=0, j0=0, diagonal=0))


def join(a: Part, b: Part) -> Part | None:
    """One part in place of two that see all of their keys, if they follow each other in rows or in keys."""
    if a.settings != b.settings or a.settings.window != Window() or a.document != b.document:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return a._replace(keys=slice(a.keys.start, b.keys.stop))
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return a._replace(rows=slice(a.rows.start, b.rows.stop))
    return None


@functools.lru_cache(maxsize=1024)
def steps_of(whole: Whole, ranks: int) -> int:
    """The number of ring steps after which no rank sees a key of the owners that would follow."""
    needed = [step for step in range(ranks) if any(parts(whole, rank, (rank - step) % ranks) for rank in range(ranks))]
    return 1 + max(needed, default=0)
