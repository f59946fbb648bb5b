"""Online softmax: the state of a row, its initial value with a sink, and the merge by log-sum-exp.

A row's state is its running maximum `m`, its denominator `l` relative to `m`, and its accumulator `acc` (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). A row that has seen no key has `m = -inf`, `l = 0`.

Results do not depend on the maximum, so it is always detached.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .sums import tree_sum


class RowState(NamedTuple):
    m: Tensor  # [..., M, 1] running maximum of the scores
    l: Tensor  # [..., M, 1] sum of exp(s - m)  # noqa: E741
    acc: Tensor  # [..., M, Dv] sum of exp(s - m) * v


def initial_state(sink: Tensor | None, shape: tuple[int, ...], head_dim_v: int, like: Tensor) -> RowState:
    """The state before the first key. A sink `[H, 1, 1]` is a key without a value: `m = sink, l = 1`."""
    acc = like.new_zeros((*shape, head_dim_v))
    if sink is None:
        return RowState(like.new_full((*shape, 1), -torch.inf), like.new_zeros((*shape, 1)), acc)
    sink = sink.expand(*shape, 1)
    m = sink.detach()
    shifted = torch.where(torch.isinf(m), 0.0, sink - m)  # inf - inf would be NaN in every derivative
    return RowState(m, torch.where(m == -torch.inf, 0.0, torch.exp(shifted)), acc)


def join(a: RowState, b: RowState) -> RowState:
    """The state after the union of two disjoint sets of keys, from the states after each."""
    m = torch.maximum(a.m, b.m)
    alpha, beta = rescale(a.m, m), rescale(b.m, m)
    return RowState(m, a.l * alpha + b.l * beta, a.acc * alpha + b.acc * beta)


def rescale(m_old: Tensor, m_new: Tensor) -> Tensor:
    """The factor `exp(m_old - m_new)` that rescales sums to a new maximum; 1 also for `inf - inf`."""
    return torch.where(m_old == m_new, 1.0, torch.exp(m_old - finite_or_zero(m_new)))


def finite_or_zero(m: Tensor) -> Tensor:
    """Replace a maximum of `-inf` by 0, so that `exp(-inf - m)` is 0 and not NaN."""
    return torch.where(m == -torch.inf, 0.0, m)


def finalize(state: RowState) -> tuple[Tensor, Tensor]:
    """`out [..., M, Dv]` and `lse [..., M, 1]`: 0 and `-inf` for rows that have seen no key."""
    l = torch.where(state.l == 0, 1.0, state.l)  # noqa: E741
    return state.acc / l, torch.where(torch.isinf(state.m), state.m, state.m + torch.log(l))


def lse_residual(m: Tensor, l: Tensor, lse: Tensor) -> Tensor:  # noqa: E741
    """What rounding has taken from `lse = m + log(l)`; 0 where that is not finite."""
    error = (m - lse) + torch.log(l)
    return torch.where(torch.isinf(lse) | torch.isnan(lse), 0.0, error)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from each set's `out [..., Dv]` and `lse [..., 1]`.

    Derivatives are finite also where every part is empty: `log` is not applied to the 0 of a row without keys.
    """
    stacked = torch.stack(tuple(lses))  # [parts, ..., 1]
    m = finite_or_zero(stacked.detach().amax(dim=0))  # [..., 1]
    weights = torch.exp(stacked - m)  # [parts, ..., 1]
    total = weights.sum(dim=0)  # [..., 1]
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = tree_sum(lambda n: weights[n] * outs[n].to(weights.dtype), 0, len(outs)) / total
    lse = torch.where(empty, -torch.inf, torch.where(m == torch.inf, m, m + torch.log(total)))
    return out, lse
