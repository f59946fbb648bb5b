"""How rows are normalised: the online softmax and the sink that enters it first.

Scores arrive in units of which `factor > 0` makes base-2 logarithms: `p = exp2(t * factor - m * unit)` is one
multiply-add and one exponential (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

For float32 inputs sums are compensated (`products`), and `m` is the maximum as a base-2 logarithm, rounded up to a
whole number: old sums are then multiplied by powers of two, which is exact however often it happens. With 16-bit inputs
the matrix units round more than that, and both would cost 2 to 6% of the time.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .products import LARGEST, Sum, Sums, add_scaled

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


class RowState(NamedTuple):
    m: tl.tensor  # [M] running maximum, -inf before anything is seen
    l: Sum  # [M] sum of exp2(t * factor - m * unit)  # noqa: E741
    acc: Sums  # [M, Dv] sum of exp2(t * factor - m * unit) * v


@triton.jit
def row_max_unit(factor, COMPENSATED: tl.constexpr):
    """The unit that makes a base-2 logarithm of `m`: that of scores, unless it is one already."""
    return 1.0 if COMPENSATED else factor


@triton.jit
def init(sinks, heads, unit, with_sink, acc, M: tl.constexpr, COMPENSATED: tl.constexpr):
    """The state before the first key. A sink is a key without a value; `heads [M]` names each row's."""
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
def update(state, t, factor, unit, COMPENSATED: tl.constexpr):
    """The new `m`, the factor `[M]` that carries old sums over to it, and `p [M, N]`.

    A GPU's maximum drops NaN, sums do not. What is subtracted is finite, so that `p` of -inf is 0, that of +inf +inf
    and that of nothing but NaN is NaN: `l` then tells what a row has seen.
    """
    top = tl.max(t, 1)
    m = tl.maximum(state.m, tl.ceil(top * factor) if COMPENSATED else top)
    shift = tl.minimum(tl.maximum(m * unit, -LARGEST), LARGEST)
    p = tl.exp2(t * factor - shift[:, None])
    alpha = tl.where(state.m == m, 1.0, tl.exp2(state.m * unit - shift))
    return m, alpha, p


@triton.jit
def add_row_sums(state, alpha, p, COMPENSATED: tl.constexpr):
    """The row sums `l` with those of `p [M, N]`."""
    return add_scaled(state.l, alpha, tl.sum(p, 1), COMPENSATED)


@triton.jit
def finalize(state, unit):
    """The factor `[M]` that makes `acc` the output, and `lse [M]`; rows that saw nothing give 0 and -inf."""
    l = tl.where(state.l.total == 0, 1.0, state.l.total)  # noqa: E741
    weight = tl.where(
        l == INFINITY, float("nan"), 1.0 / l
    )  # a score of +inf has no share, also where dropout took its value
    return weight, (state.m * unit + tl.log2(l)) * LN2
