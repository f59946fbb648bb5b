"""Parts of a sharded call: some rows against some keys, each one call of the operators with its place in the whole."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend.blockwise.softmax import merge
from ..call.call import DIFFERENTIABLE, Call, Settings, Tensors
from ..call.problem import accumulation_dtype
from ..call.window import key_range
from ..dispatch.operators import operators_of
from .layout import Layout, Piece


class Whole(NamedTuple):
    """The whole of a sharded call: settings, and the layouts of rows and keys."""

    settings: Settings
    rows: Layout
    keys: Layout


class Results(NamedTuple):
    """Merged results of a rank's rows, in the accumulation dtype: out `[B, H, S, Dv]`, lse `[B, H, S]`."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, v: Tensor) -> "Results":
        """Results of rows that have seen no key."""
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        return cls(out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype))


def local(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, slice]]:
    """Each piece with its place in a rank's tensor. Empty ones are left out."""
    first = 0
    for piece in pieces:
        length = piece.stop - piece.start
        if length > 0:
            yield piece, slice(first, first + length)
        first += length


def parts(whole: Whole, rank: int, owner: int) -> Iterator[tuple[slice, slice, Settings]]:
    """The parts of `rank`'s rows and `owner`'s keys with anything visible by position, in a fixed order."""
    s, diagonal = whole.settings, whole.keys.length - whole.rows.length
    for rows, row_slice in local(whole.rows.pieces(rank)):
        for keys, key_slice in local(whole.keys.pieces(owner)):
            num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
            seen = key_range(s.window, rows.start, rows.stop - 1, num_keys, diagonal, keys.start)
            if seen.lo < seen.hi:
                place = s._replace(i0=rows.start, j0=keys.start, diagonal=diagonal - (num_keys - num_rows))
                yield row_slice, key_slice, place


def part_of(tensors: Tensors, k: Tensor, v: Tensor, rows: slice, keys: slice, settings: Settings) -> Call:
    """One part as a call of its own."""
    return Call(tensors._replace(q=tensors.q[:, :, rows], k=k[:, :, keys], v=v[:, :, keys]), settings)


def forward(whole: Whole, tensors: Tensors, k: Tensor, v: Tensor, ranks: tuple[int, int], results: Results) -> None:
    """Merge the attention of a rank's rows over an owner's keys into `results`."""
    for rows, keys, settings in parts(whole, *ranks):
        call = part_of(tensors, k, v, rows, keys, settings)
        operators = operators_of(call)
        out, lse = operators.forward(*operators.arguments(call))
        before = results.out[:, :, rows], results.lse[:, :, rows]
        merged, merged_lse = merge([before[0], out.to(before[0].dtype)], [before[1][..., None], lse[..., None]])
        before[0].copy_(merged)
        before[1].copy_(merged_lse[..., 0])


class Backward(NamedTuple):
    """Inputs of backward for a rank's rows; out and lse are those over all keys, from which delta follows."""

    out: Tensor
    lse: Tensor
    dout: Tensor | None
    dlse: Tensor | None

    def of(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        of_rows = [None if x is None else x[:, :, rows] for x in self]
        return tuple(of_rows)  # type: ignore[return-value]


def backward(
    whole: Whole,
    tensors: Tensors,
    kv: tuple[Tensor, Tensor],
    ranks: tuple[int, int],
    saved: Backward,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of a rank's rows and an owner's keys to `sums` (dq, dk, dv).

    `p = exp(s - lse)` and `ds = p * (dp - delta)` hold for any part of the keys, if lse and delta are those over all of
    them. So the backends' backward pass is right for a part as it stands.
    """
    for rows, keys, settings in parts(whole, *ranks):
        call = part_of(tensors, *kv, rows, keys, settings)
        num_differentiable = len(DIFFERENTIABLE) + len(tensors.score_mod_tensors)
        needs = [True] * 3 + [False] * (num_differentiable - 3)
        dq, dk, dv, *_ = operators_of(call).differentiate(needs, *saved.of(rows), call)
        for total, part, where in zip(sums, (dq, dk, dv), (rows, keys, keys), strict=True):
            assert part is not None
            total[:, :, where] += part
