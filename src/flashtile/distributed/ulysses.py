"""Ulysses: ranks exchange rows for heads, so that each has all rows of some heads, and back.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Key heads that are fewer than ranks are repeated.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..call.call import Tensors
from .copies import join_rows
from .group import Group
from .layout import Placement
from .parts import heads_of


def to_heads(t: Tensors, group: Group, rows: Placement, keys: Placement) -> Tensors:
    """All rows of this rank's heads, from this rank's rows of all heads.

    Args:
        t: tensors of a call; tensors of pairs have this rank's rows, or one.
        group: the ranks among which heads are divided; their number divides the query heads.
        rows: the rows of each rank, among the group's.
        keys: the keys of each rank.
    """
    each = t.q.shape[1] // group.size
    heads = slice(group.rank * each, (group.rank + 1) * each)
    times = times_repeated(t.k.shape[1], group.size)
    k, v = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (t.k, t.v))
    of_heads, lengths = heads_of(t, heads), [rows.rows(rank) for rank in range(group.size)]

    def pairs(x: Tensor | None, of_head: Tensor | None) -> Tensor | None:
        if x is None or (x.shape[2] == 1 and 1 not in lengths):
            return of_head  # no rows to exchange
        x = x.expand(-1, -1, lengths[group.rank], -1)  # where ranks have one row, it may be theirs
        return exchange(x if x.shape[1] > 1 else x.expand(-1, group.size, -1, -1), group, rows)

    return of_heads._replace(
        q=exchange(t.q, group, rows),
        k=exchange(k, group, keys),
        v=exchange(v, group, keys),
        bias=pairs(t.bias, of_heads.bias),
        mask=pairs(t.mask, of_heads.mask),
    )


def times_repeated(kv_heads: int, ranks: int) -> int:
    """Copies of each key head, so that ranks have as many."""
    return ranks // math.gcd(ranks, kv_heads)


def exchange(x: Tensor, group: Group, rows: Placement) -> Tensor:
    """`[B, H / ranks, rows of all, D]` from `[B, H, own rows, D]`."""
    return RowsToHeads.apply(x, group, rows)  # type: ignore[no-any-return]


def to_rows(x: Tensor, group: Group, rows: Placement) -> Tensor:
    """`[B, H, own rows, D]` from `[B, H / ranks, rows of all, D]`."""
    return HeadsToRows.apply(x, group, rows)  # type: ignore[no-any-return]


class RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: Placement) -> Tensor:  # type: ignore[override]
        ctx.place = group, rows
        batch, heads, _, width = x.shape
        shapes = [(batch, heads // group.size, rows.rows(rank), width) for rank in range(group.size)]
        return rows.assemble(group.exchange(list(x.chunk(group.size, dim=1)), shapes).wait(), 2)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return HeadsToRows.apply(dx, *ctx.place), None, None


class HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: Placement) -> Tensor:  # type: ignore[override]
        ctx.place = group, rows
        batch, heads, _, width = x.shape
        sent = [rows.select(x, rank, 2) for rank in range(group.size)]
        shape = (batch, heads, rows.rows(group.rank), width)
        return join_rows(group.exchange(sent, [shape] * group.size).wait(), 1)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return RowsToHeads.apply(dx, *ctx.place), None, None
