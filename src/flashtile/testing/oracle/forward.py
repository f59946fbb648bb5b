"""Forward of one sequence in float64: docs/contract.md, section "The function", line by line, for all pairs at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .modification import ScoreModification
from .sequence import Sequence, relative_position, visible_pairs
from .sums import Sums, pair_products, visible_matmul
from .weights import Weights

INF = float("inf")
FEATURES = 16  # whose products are summed plainly


@dataclass(frozen=True)
class Forward:
    """Results, and inputs of backward; keys and values are repeated to the query heads that read them."""

    k: Tensor  # [Hq, Sk, D]
    v: Tensor  # [Hq, Sk, Dv]
    tanh: Tensor | None  # tanh of s / softcap, [Hq, Sq, Sk]
    distance: Tensor  # |i + Sk - Sq - j|, [Sq, Sk]
    modification: ScoreModification | None
    visible: Tensor  # bool [Hq, Sq, Sk]: visible and with a score above -inf
    p: Tensor  # [Hq, Sq, Sk], 0 where not visible
    kept: Weights  # p after dropout
    lse: Tensor  # [Hq, Sq]
    A: Tensor  # [Hq, Sq]
    out: Sums  # [Hq, Sq, Dv]
    slack: tuple[Tensor, Tensor] | None  # out [Hq, Sq, Dv], lse [Hq, Sq]; from elements that round either way


def forward(x: Sequence) -> Forward:
    k, v = x.k.repeat_interleave(x.group, 0), x.v.repeat_interleave(x.group, 0)
    visible = visible_pairs(x)

    s = x.scale * inner_products(x.q, k)  # [Hq, Sq, Sk]
    magnitude = abs(x.scale) * (x.q.abs() @ k.abs().mT)  # sum of the absolute values of a score's terms
    # Alike terms, whose sum is as large, have roundings of one sign: a quarter of a unit for each of them.
    magnitude = torch.maximum(magnitude, s.abs() * (x.q.shape[-1] / 4 / score_error(x.q.shape[-1])))
    tanh = None
    if x.softcap:
        tanh = torch.tanh(s / x.softcap)
        s = x.softcap * tanh
    if x.bias is not None:
        s = s + x.bias
        magnitude = magnitude + x.bias.abs()
    distance = relative_position(x).abs().double()
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes[:, None, None]
        s = s - slopes * distance
        magnitude = magnitude + slopes.abs() * distance
    modification = None
    if x.score_fn is not None:
        s = s.where(visible, 0.0)  # NaN in a hidden key must not get into derivatives
        modification = ScoreModification(x.score_fn, x.score_tensors, s, x.batch)
        score = modification.score
        some = (visible & (score != -INF)).any(2, keepdim=True)
        if not some.all():  # no gradient passes through a row of -inf alone, nor 0 * inf
            modification = ScoreModification(x.score_fn, x.score_tensors, s.where(some, 0.0), x.batch)
        magnitude = magnitude + (score - s).abs()
        s = score
    s = s.where(visible, -INF)

    lse = log_sum_exp(torch.cat([s, sink_column(x)], dim=2))
    visible = visible & (s != -INF)  # a row with nothing but -inf sees nothing
    p = (s - lse[:, :, None]).exp().where(visible, 0.0)
    A = torch.cat([magnitude.where(visible, 0.0), torch.zeros_like(sink_column(x))], dim=2).amax(2)

    kept, loss = p, None
    if x.keep is not None:  # P may be cast before its factor is applied, which can be outside of the product
        kept, loss = p * x.keep, (x.keep - 1).clamp(min=0).where(visible, 0.0)
    kept = Weights(value=kept, absolute=kept, root=kept, loss=loss)
    out = pair_products(kept, v, visible, A, loose=~is_finite(v))
    slack = either_rounding(x, k, v, modification, visible, p, kept.value)
    return Forward(k, v, tanh, distance, modification, visible, p, kept, lse, A, out, slack)


def either_rounding(
    x: Sequence, k: Tensor, v: Tensor, modification: ScoreModification | None, visible: Tensor, p: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Largest change of out and lse by elements of q and k that may be rounded in two ways."""
    if x.q_either is None or x.k_either is None:
        return None
    k_either = x.k_either.repeat_interleave(x.group, 0)
    change = abs(x.scale) * (x.q_either @ (k.abs() + k_either).mT + x.q.abs() @ k_either.mT)  # a score's, at most
    if modification is not None:
        change = change * modification.derivative.abs()
    change = change.where(visible, 0.0).expm1()  # change of exp(s), relative
    of_lse = (p * change).sum(2)
    of_out = visible_matmul(kept * (change + of_lse[:, :, None]), v.abs(), visible)
    return of_out, of_lse


def sink_column(x: Sequence) -> Tensor:
    """The sink as one more key's score, [Hq, Sq, 1]: -inf is no sink."""
    num_heads_q, seqlen_q, _ = x.q.shape
    sinks = x.q.new_full((num_heads_q,), -INF) if x.sinks is None else x.sinks
    return sinks[:, None, None].expand(num_heads_q, seqlen_q, 1)


def score_error(head_dim: int) -> float:
    """The error of a sum of as many terms, in roundings that are independent of each other."""
    return max(4.0, head_dim**0.5)


def inner_products(q: Tensor, k: Tensor) -> Tensor:
    """`q @ k^T` with an error of a few units in the last place, however many features there are: where all terms are
    alike, roundings of a plain sum point one way, and float64 backends are held to this result (Knuth's two-sum).
    """
    total = rest = torch.zeros((), dtype=torch.float64)
    for part in (a @ b.mT for a, b in zip(q.split(FEATURES, -1), k.split(FEATURES, -1), strict=True)):
        new = total + part
        of_part = new - total
        rest = rest + (total - (new - of_part)) + (part - of_part)
        total = new
    return torch.where(total.isfinite(), total + rest, total)


def log_sum_exp(s: Tensor) -> Tensor:
    """log(sum(exp(s))) over the last dimension: -inf for nothing but -inf, +inf if one score is, NaN if one is."""
    shift = s.amax(-1)
    shift = shift.where(shift.abs() != INF, 0.0)
    return (s - shift[..., None]).exp().sum(-1).log() + shift


def is_finite(x: Tensor) -> Tensor:
    """Whether all elements of a head are: [H, ...] -> [H]."""
    return x.isfinite().flatten(1).all(1)
