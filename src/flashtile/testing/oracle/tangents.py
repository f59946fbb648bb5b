"""Tangents of one sequence in float64: docs/contract.md, section "Tangents", line by line, for all pairs at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .forward import Forward, is_finite, sink_column
from .sequence import Sequence
from .sums import Sums, visible_matmul


@dataclass(frozen=True)
class InputTangents:
    """Tangents in the shapes of a `Sequence`; `None` for what stands still."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_tensors: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RowTangents:
    """The tangents of a sequence's results."""

    out: Sums  # [Hq, Sq, Dv]
    lse: Tensor  # [Hq, Sq]
    size: Tensor  # [Hq, Sq] sum of the absolute values of the terms of `lse`


def tangents(x: Sequence, y: Forward, t: InputTangents) -> RowTangents:
    ds, size = score_tangents(x, y, t)
    p, kept, visible = y.p, y.kept.value, y.visible
    dlse, of_lse = (p * ds).sum(2), (p * size).sum(2)
    if t.sinks is not None:
        sink = sink_column(x)[:, :, 0]
        weight = (sink - y.lse).exp().where(~sink.isinf(), sink.isposinf().double())  # also where lse is infinite
        moved = weight * t.sinks[:, None]
        dlse, of_lse = dlse + moved, of_lse + moved.abs()
    out, v = y.out.total, y.v
    dv = torch.zeros_like(v) if t.v is None else t.v.repeat_interleave(x.group, 0)
    losses, of_row = y.kept.losses(visible), of_lse[:, :, None]
    total = visible_matmul(kept, dv, visible) + visible_matmul(kept * ds, v, visible) - dlse[:, :, None] * out
    squares = visible_matmul(kept.square(), dv.square(), visible) + of_row.square() * y.out.squares
    absolutes = visible_matmul(kept, dv.abs(), visible) + of_row * y.out.absolutes
    loss = visible_matmul(losses, dv.abs(), visible) + of_row * y.out.loss
    loss = loss + (losses * size).sum(2, keepdim=True) * y.out.absolutes
    sums = Sums(
        total,
        absolutes=absolutes + visible_matmul(kept * size, v.abs(), visible),
        squares=squares + visible_matmul((kept * size).square(), v.square(), visible),
        loss=loss + visible_matmul(losses * (1 + size), v.abs(), visible),
        A=(y.A + 1)[:, :, None].expand_as(total),
        loose=~(is_finite(v) & is_finite(dv))[:, None, None].expand_as(total),
    )
    return RowTangents(sums, dlse, of_lse)


def score_tangents(x: Sequence, y: Forward, t: InputTangents) -> tuple[Tensor, Tensor]:
    """Tangents of the final scores `[Hq, Sq, Sk]`, and the sums of the absolute values of their parts."""
    ds = size = torch.zeros(y.visible.shape, dtype=torch.float64)
    if t.q is not None:
        ds, size = ds + t.q @ y.k.mT, size + t.q.abs() @ y.k.abs().mT
    if t.k is not None:
        dk = t.k.repeat_interleave(x.group, 0)
        ds, size = ds + x.q @ dk.mT, size + x.q.abs() @ dk.abs().mT
    ds, size = x.scale * ds, abs(x.scale) * size
    if y.tanh is not None:
        ds = ds * (1 - y.tanh.square())
    if t.bias is not None:
        ds, size = ds + t.bias, size + t.bias.abs()
    if t.alibi_slopes is not None:
        of_pairs = t.alibi_slopes[:, None, None] * y.distance
        ds, size = ds - of_pairs, size + of_pairs.abs()
    if y.modification is not None:
        derivative = y.modification.derivative
        along = y.modification.along(t.score_tensors)
        ds, size = derivative * ds + along, derivative.abs() * size + along.abs()
    return ds.where(y.visible, 0.0), size.where(y.visible, 0.0)
