"""How rows are normalised: the online softmax and the sink that enters it first.

Scores arrive in units of which `factor > 0` makes base-2 logarithms: `p = exp2(t * factor - m * factor)` is one
multiply-add and one exponential (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import Chunks

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)


class RowState(NamedTuple):
    m: tl.tensor  # [M] running maximum, -inf before anything is seen
    l: tl.tensor  # [M] sum of exp2((t - m) * factor)  # noqa: E741
    acc: Chunks  # [M, Dv] sum of exp2((t - m) * factor) * v


@triton.jit
def start(sinks, heads, factor, with_sink, acc, M: tl.constexpr):
    """The state before the first key. A sink is a key without a value; `heads [M]` names each row's."""
    m = tl.full([M], -float("inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    if sinks is not None:
        m = tl.where(with_sink, tl.load(sinks + heads).to(tl.float32) * (LOG2E / factor), m)
        l = tl.where(m == -INFINITY, 0.0, 1.0)  # noqa: E741
    return RowState(m, l, acc)


@triton.jit
def update(state, t, factor):
    """The new `m`, the factor `[M]` that carries old sums over to it, and `p [M, N]`.

    A GPU's maximum drops NaN, sums do not. What is subtracted is finite, so that `p` of -inf is 0, that of +inf +inf
    and that of nothing but NaN is NaN: `l` then tells what a row has seen.
    """
    m = tl.maximum(state.m, tl.max(t, 1))
    shift = tl.minimum(tl.maximum(m * factor, -LARGEST), LARGEST)
    p = tl.exp2(t * factor - shift[:, None])
    alpha = tl.where(state.m == m, 1.0, tl.exp2(state.m * factor - shift))
    return m, alpha, p


@triton.jit
def finish(state, factor):
    """The factor `[M]` that makes `acc` the output, and `lse [M]`; rows that saw nothing give 0 and -inf."""
    l = tl.where(state.l == 0, 1.0, state.l)  # noqa: E741
    weight = tl.where(
        l == INFINITY, float("nan"), 1.0 / l
    )  # a score of +inf has no share, also where dropout took its value
    return weight, (state.m * factor + tl.log2(l)) * LN2
