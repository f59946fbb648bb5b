"""Parts of a sharded call: some rows against some keys, each one call of the operators with its place in the whole."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..call.call import Call, Settings, Tensors, differentiable_positions
from ..dispatch.operators import operators_of
from .layout import Placement
from .sums import RowResults, RowSum
from .visible import Document, overlapping


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
    return tuple(find_parts(whole, rank, owner))


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


@functools.lru_cache(maxsize=1024)
def steps_of(whole: Whole, ranks: int) -> int:
    """The number of ring steps after which no rank sees a key of the owners that would follow."""
    needed = [step for step in range(ranks) if any(parts(whole, rank, (rank - step) % ranks) for rank in range(ranks))]
    return 1 + max(needed, default=0)


def forward(whole: Whole, tensors: Tensors, ranks: tuple[int, int], results: RowResults) -> None:
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


class Sums:
    """The gradients of a rank's rows and an owner's keys, and of what all ranks have, as far as they are requested.

    Attributes:
        q, k, v: sums over parts.
        others: of the other tensors, zeros in the accumulation dtype that parts are added to.
    """

    def __init__(self, q: RowSum | None, k: RowSum | None, v: RowSum | None, others: Tensors):
        self.q, self.k, self.v, self.others = q, k, v, others


def backward(whole: Whole, tensors: Tensors, ranks: tuple[int, int], saved: Saved, sums: Sums) -> None:
    """Add the gradients of a rank's rows and an owner's keys to `sums`.

    `p = exp(s - lse)` and `ds = p * (dp - delta)` hold for any part of the keys, if lse and delta are those over all of
    them. So the backends' backward pass is right for a part as it stands.
    """
    for part in parts(whole, *ranks):
        call, totals = Call(part.of(tensors), part.settings), part.without_rows(sums.others).flat()
        others = [totals[n] for n in differentiable_positions(len(totals))[3:]]
        needs = [total is not None for total in (sums.q, sums.k, sums.v, *others)]
        gradients = operators_of(call).differentiate(needs, *saved.rows(part.rows), call)
        of_rows = (sums.q, part.rows), (sums.k, part.keys), (sums.v, part.keys)
        for (total, rows), gradient in zip(of_rows, gradients[:3], strict=True):
            if total is not None:
                assert gradient is not None
                total.add(rows, gradient)
        for other, gradient in zip(others, gradients[3:], strict=True):
            if other is not None:
                assert gradient is not None
                other.add_(gradient)
