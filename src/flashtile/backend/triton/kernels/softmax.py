"""The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and the sink.

`factor > 0` makes base-2 logarithms of scores: `p = exp2(t * factor - m * unit)` is one multiply-add and one
exponential.

For float32 inputs sums are compensated (`products`), and `m` is a base-2 logarithm, rounded up to an integer: old sums
are then rescaled by powers of two, which is exact. For 16-bit inputs the matrix units round more than that, and both
would cost 2 to 6% of the time.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .products import MAX_FLOAT, Sum, Sums, add_scaled

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


class RowState(NamedTuple):
    m: tl.tensor  # [M] running maximum, -inf before the first key
    l: Sum  # [M] sum of exp2(t * factor - m * unit)  # noqa: E741
    acc: Sums  # [M, Dv] sum of exp2(t * factor - m * unit) * v


@triton.jit
def row_max_unit(factor, COMPENSATED: tl.constexpr):
    """The factor that makes a base-2 logarithm of `m`, which already is one if sums are compensated."""
    return 1.0 if COMPENSATED else factor


@triton.jit
def init(sinks, heads, with_sink, factor, acc, M: tl.constexpr, COMPENSATED: tl.constexpr):
    """The state before the first key. A sink is a key without a value; `heads [M]` are the rows' heads."""
    unit = row_max_unit(factor, COMPENSATED)
    m = tl.full([M], -float("inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    if sinks is not None:
        sink = tl.where(with_sink, tl.load(sinks + heads).to(tl.float32) * (LOG2E / unit), m)
        m = tl.ceil(sink) if COMPENSATED else sink
        l = tl.where(m == -INFINITY, 0.0, 1.0)  # noqa: E741
        if COMPENSATED:
            l = tl.where(sink == m, l, tl.exp2(sink - m))  # noqa: E741
    return RowState(m, Sum(l, tl.zeros([M], tl.float32) if COMPENSATED else 0.0), acc)


@triton.jit
def update(state, t, factor, COMPENSATED: tl.constexpr, AXIS: tl.constexpr = 1):
    """Online-softmax update for scores `t [M, N]`: the new `m`, the factor `alpha [M]` that rescales old sums, and `p`.
    AXIS is that of keys.

    A GPU's maximum drops NaN, sums do not. The subtrahend is finite, so that `p` of -inf is 0, of +inf is +inf, and NaN
    if all scores are NaN: `l` tells these cases apart.
    """
    unit = row_max_unit(factor, COMPENSATED)
    top = tl.max(t, AXIS)
    m = tl.maximum(state.m, tl.ceil(top * factor) if COMPENSATED else top)
    shift = tl.minimum(tl.maximum(m * unit, -MAX_FLOAT), MAX_FLOAT)
    p = tl.exp2(t * factor - tl.expand_dims(shift, AXIS))
    alpha = tl.where(state.m == m, 1.0, tl.exp2(state.m * unit - shift))
    return m, alpha, p


@triton.jit
def add_row_sums(state, alpha, p, COMPENSATED: tl.constexpr):
    """Rescale the row sums `l`, then add those of `p [M, N]`."""
    return add_scaled(state.l, alpha, tl.sum(p, 1), COMPENSATED)


@triton.jit
def finalize(state, factor, COMPENSATED: tl.constexpr):
    """The factor `[M]` that makes `acc` the output, and `lse [M]`. Rows without keys give 0 and -inf.

    A score of +inf makes the row NaN, also where dropout has removed its value.
    """
    unit = row_max_unit(factor, COMPENSATED)
    l = tl.where(state.l.total == 0, 1.0, state.l.total)  # noqa: E741
    weight = tl.where(l == INFINITY, float("nan"), 1.0 / l)
    return weight, (state.m * unit + tl.log2(l)) * LN2
