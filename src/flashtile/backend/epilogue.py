"""Gradients that follow from the statistics of rows: no kernel has to sum them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.call import Needs, Tensors


class RowStats(NamedTuple):
    """The statistics of rows after a backward pass, `[B, H, S]` or `[H, T]`. lse and delta may have padding, which
    contributes 0 to sums; `out_lse` is lse with the rows of dlse, `residual` its residual where it is kept.
    """

    sinks: Tensor | None  # [H]
    lse: Tensor
    delta: Tensor
    out_lse: Tensor
    dlse: Tensor | None
    residual: Tensor | None = None


def sink_gradient(rows: RowStats) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows to `[H]`."""
    assert rows.sinks is not None
    weight = sink_weight(rows.sinks.to(rows.lse.dtype)[:, None], rows.lse, rows.residual)
    return -sum_to_heads(weight * rows.delta)


FROM_ROW_STATS: dict[str, Callable[[RowStats], Tensor]] = {"sinks": sink_gradient}


def requested_from_rows(needs: Needs, t: Tensors) -> list[tuple[str, Callable[[RowStats], Tensor]]]:
    """The requested ones of these gradients, by name."""
    return [x for x in FROM_ROW_STATS.items() if getattr(needs, x[0]) and getattr(t, x[0]) is not None]


def sink_weight(sink: Tensor, lse: Tensor, residual: Tensor | None = None) -> Tensor:
    """The sink's probability in each row: 1 for a sink of +inf, 0 where lse is -inf."""
    difference = sink - lse if residual is None else sink - lse - residual
    share = torch.where(sink == torch.inf, 1, torch.exp(difference))
    return torch.where(lse == -torch.inf, 0, share)


def sink_tangents(sinks: Tensor, tsinks: Tensor, lse: Tensor, residual: Tensor | None) -> Tensor:
    """Each row's part of its lse's tangent that is the sink's."""
    sinks, tsinks = (x.to(lse.dtype)[:, None] for x in (sinks, tsinks))
    return (sink_weight(sinks, lse, residual) * tsinks).contiguous()


def second_sink_gradient(
    sinks: Tensor, tsinks: Tensor | None, lse: Tensor, residual: Tensor | None, delta: Tensor, tlse: Tensor,
    product: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of sinks in a second derivative, `[H]`: of a key without a value, whose score has the tangent
    `tsinks`. `product` is `<dout, tout>` of each row.
    """
    weight = sink_weight(sinks.to(lse.dtype)[:, None], lse, residual)
    moved = -tlse if tsinks is None else tsinks.to(lse.dtype)[:, None] - tlse
    return sum_to_heads(weight * (-delta * moved - product))


def sum_to_heads(rows: Tensor) -> Tensor:
    """Sum `[B, H, S]` or `[H, T]` to `[H]`."""
    per_head = rows.sum(dim=-1)
    return per_head if per_head.dim() == 1 else per_head.sum(dim=0)
