"""Online softmax of float32, with compensated sums.

Scores t are in units that `factor` converts to base-2 logarithms. Row maxima are rounded up to whole ones, so that sums
are rescaled by powers of two, exactly.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.softmax import FLOAT_MAX, INFINITY, LN2, log2


class RowState(NamedTuple):
    """State of rows `[M]` between two blocks of keys."""

    row_max: gl.tensor
    l: gl.tensor  # sum of p  # noqa: E741
    compensation: gl.tensor  # what rounding has taken from it


@gluon.jit
def initial_state(M: gl.constexpr, layout: gl.constexpr):
    """The state before the first key."""
    row_max = gl.full([M], -INFINITY, gl.float32, layout)
    return RowState(row_max, gl.zeros([M], gl.float32, layout), gl.zeros([M], gl.float32, layout))


@gluon.jit
def update(state, t, factor):
    """Online-softmax update for scores `t [M, N]`: the new state, the factor alpha `[M]` for acc, and `p [M, N]`.

    A GPU's maximum drops NaN, sums do not. The subtrahend is finite, so that p of -inf is 0, of +inf is +inf.
    """
    row_max = gl.maximum(state.row_max, gl.ceil(gl.max(t, 1) * factor))
    subtrahend = gl.minimum(gl.maximum(row_max, -FLOAT_MAX), FLOAT_MAX)
    p = gl.exp2(t * factor - gl.expand_dims(subtrahend, 1))
    alpha = gl.where(state.row_max == row_max, 1.0, gl.exp2(state.row_max - subtrahend))
    part = state.compensation * alpha + gl.sum(p, 1)
    l = state.l * alpha + part  # noqa: E741
    compensation = gl.maximum(part - (l - state.l * alpha), -FLOAT_MAX)
    return RowState(row_max, l, compensation), alpha, p


@gluon.jit
def finalize(state):
    """`1 / l [M]`, which normalizes acc, and `lse [M]`; of rows without keys 1 and -inf, with a score of +inf NaN."""
    l = gl.where(state.l == 0, 1.0, state.l)  # noqa: E741
    return gl.where(state.l == INFINITY, float("nan"), 1.0 / l), (state.row_max + log2(l)) * LN2
