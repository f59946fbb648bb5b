"""What a score becomes, one line for each feature; their gradients will stand beside them.

s = scale * <q, k>                      s is formed by the caller's matrix product
s = softcap * tanh(s / softcap)
s = s - slope * |i + Sk - Sq - j|
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


@gluon.jit
def forward(product, features, rows, keys):
    """The final score of `product = <q, k>`, not yet masked, for rows `[M]` and keys `[N]`."""
    t = product
    if features.multiplier is not None:
        t = t * features.multiplier
    if features.softcap is not None:
        t = features.softcap * hyperbolic_tangent(t / features.softcap)
    if features.slope is not None:
        i, j = gl.expand_dims(rows + features.shift, 1), gl.expand_dims(keys, 0)
        t -= features.slope * gl.abs(i.to(gl.float32) - j.to(gl.float32))
    return t


@gluon.jit
def hyperbolic_tangent(x):
    """Within 3 units in the last place: a series where `1 - 2 / (e^2x + 1)` would cancel (Abramowitz and Stegun,
    4.5.64).
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    quotient = 1 - 2 / (gl.exp2(x * (2 * LOG2E)) + 1)
    return gl.where(square < 0.04, series, quotient)
