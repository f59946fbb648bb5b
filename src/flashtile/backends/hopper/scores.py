"""What a score becomes, one forward line for each feature and, beside it, its gradient.

s = scale * <q, k>                      s is formed by the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s - slope * |i + Sk - Sq - j|

Rows are `[M, 1]` and keys `[1, N]`, or rows `[1, M]` and keys `[N, 1]`: every line serves both orientations.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import LOG2E


class Features(NamedTuple):
    """What changes the scores of one sequence and head; `None` where absent."""

    multiplier: gl.tensor | None  # of the product; `None` where the softmax takes the scale
    softcap: gl.tensor | None
    slope: gl.tensor | None
    shift: gl.tensor  # seqlen_k - seqlen_q, in an unsharded call


class Score(NamedTuple):
    t: gl.tensor  # the score in the softmax's units
    tanh: gl.tensor  # of the capped score, for its derivative; without a softcap, the score


@gluon.jit
def forward(product, features, rows, keys):
    """The final score of `product = <q, k>`, not yet masked."""
    t, tanh = product, product
    if features.softcap is not None:
        tanh = hyperbolic_tangent(product * (features.multiplier / features.softcap))
        t = features.softcap * tanh
    elif features.multiplier is not None:
        t = t * features.multiplier
    if features.slope is not None:
        t -= features.slope * gl.abs((rows + features.shift).to(gl.float32) - keys.to(gl.float32))
    return Score(t, tanh)


@gluon.jit
def derivative(p, score, features):
    """`p` times the derivative of the final score by `scale * <q, k>`."""
    if features.softcap is not None:
        p = p * (1 - score.tanh * score.tanh)
    return p


@gluon.jit
def hyperbolic_tangent(x):
    """Within 4e-6 of itself, a hundredth of what float16 inputs are rounded to: a series where `1 - 2 / (e^2x + 1)`
    would cancel (Abramowitz and Stegun, 4.5.64).
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15))
    quotient = 1 - 2 * reciprocal(gl.exp2(x * (2 * LOG2E)) + 1)
    return gl.where(square < 0.04, series, quotient)


@gluon.jit
def reciprocal(x):
    """`1 / x` within one unit in the last place, by one instruction: a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
