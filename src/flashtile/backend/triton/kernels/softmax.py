"""The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and the sink.

`factor > 0` makes base-2 logarithms of scores: `p = exp2(t * factor - m * unit)` is one multiply-add and one
exponential.

For float32 inputs sums are compensated (`products`), and `m` is a base-2 logarithm, rounded up to an integer: old sums
are then rescaled by powers of two, which is exact. For 16-bit inputs the matrix units round more than that, and both
would cost 2 to 6% of the time.

With `NATURAL` scores, of a bias or a score_mod, a large number may be in all scores of a row, so
`p = exp2((t - m) * factor)` takes the difference first. There `m` is natural in float32 too, and stale by up to 1, so
that slowly rising scores do not rescale old sums in every block.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .products import MAX_FLOAT, Sum, Sums, add_scaled

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


class RowState(NamedTuple):
    m: tl.tensor  # [M] running maximum, perhaps a stale one; -inf before the first key
    l: Sum  # [M] sum of exp2(t * factor - m * unit)  # noqa: E741
    acc: Sums  # [M, Dv] sum of exp2(t * factor - m * unit) * v


@triton.jit
def row_max_unit(factor, WHOLE: tl.constexpr):
    """The factor that makes a base-2 logarithm of `m`, which already is one if it is a whole number."""
    return 1.0 if WHOLE else factor


@triton.jit
def init(sinks, heads, with_sink, factor, acc, M: tl.constexpr, COMPENSATED: tl.constexpr, NATURAL: tl.constexpr):
    """The state before the first key. A sink is a key without a value; `heads [M]` are the rows' heads."""
    WHOLE: tl.constexpr = COMPENSATED and not NATURAL
    unit = row_max_unit(factor, WHOLE)
    m = tl.full([M], -float("inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32)
        sink = tl.where(with_sink, sink if NATURAL else sink * (LOG2E / unit), m)
        m = tl.ceil(sink) if WHOLE else sink
        l = tl.where(m == -INFINITY, 0.0, 1.0)  # noqa: E741
        if WHOLE:
            l = tl.where(sink == m, l, tl.exp2(sink - m))  # noqa: E741
    return RowState(m, Sum(l, tl.zeros([M], tl.float32) if COMPENSATED else 0.0), acc)


@triton.jit
def update(state, t, factor, COMPENSATED: tl.constexpr, NATURAL: tl.constexpr, AXIS: tl.constexpr = 1):
    """Online-softmax update for scores `t [M, N]`: the new `m`, the factor `alpha [M]` that rescales old sums, and `p`.
    AXIS is that of keys.

    A GPU's maximum drops NaN, sums do not. The subtrahend is finite, so that `p` of -inf is 0, of +inf is +inf, and NaN
    if all scores are NaN: `l` tells these cases apart.
    """
    top = tl.max(t, AXIS)
    if NATURAL:
        m = tl.where(top > state.m + 1.0, top, state.m) if COMPENSATED else tl.maximum(state.m, top)
        shift = tl.minimum(tl.maximum(m, -MAX_FLOAT), MAX_FLOAT)
        p = tl.exp2((t - tl.expand_dims(shift, AXIS)) * factor)
        alpha = tl.where(state.m == m, 1.0, tl.exp2((state.m - shift) * factor))
    else:
        unit = row_max_unit(factor, COMPENSATED)
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
def finalize(state, factor, COMPENSATED: tl.constexpr, NATURAL: tl.constexpr):
    """The factor `[M]` that makes `acc` the output, `lse [M]`, and its residual of `NATURAL` scores. Rows without keys
    give 0 and -inf.

    A score of +inf makes the row NaN, also where dropout has removed its value.
    """
    l = tl.where(state.l.total == 0, 1.0, state.l.total)  # noqa: E741
    weight = tl.where(l == INFINITY, float("nan"), 1.0 / l)
    if NATURAL:
        lse = state.m + tl.log2(l) * LN2
        return weight, lse, residual(state.m, l, lse)
    else:
        unit = row_max_unit(factor, COMPENSATED)
        return weight, (state.m * unit + tl.log2(l)) * LN2, 0.0


@triton.jit
def residual(m, l, lse):  # noqa: E741
    """What rounding has taken from `lse = m + log(l)`; 0 where that is infinite."""
    return tl.where(tl.abs(lse) == INFINITY, 0.0, (m - lse) + tl.log2(l) * LN2)
