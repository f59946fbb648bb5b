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


class ScoreParams(NamedTuple):
    """What scores become; `None` where absent."""

    scale_log2: gl.tensor  # makes base-2 logarithms of scores
    scale: gl.tensor | None  # makes scores of products; `None` where the softmax takes the scale
    softcap: gl.tensor | None
    slopes: gl.tensor | None  # pointer, [H] or [B, H]
    stride_slopes_b: gl.tensor
    sinks: gl.tensor | None  # pointer, [H]; of backward, which knows them by lse, none
    batch: gl.tensor  # sequences


class Score(NamedTuple):
    t: gl.tensor  # the score in the softmax's units
    tanh: gl.tensor  # of the capped score, for its derivative; without a softcap, the score


@gluon.jit
def forward(qk, params, b, head, shift, rows, keys):
    """The final score of `product = <q, k>`, not yet masked. The diagonal is `key = row + shift`."""
    t, capped = qk, qk
    if params.softcap is not None:
        capped = tanh(qk * (params.scale / params.softcap))
        t = params.softcap * capped
    elif params.scale is not None:
        t = t * params.scale
    if params.slopes is not None:
        sequence = gl.minimum(b, params.batch - 1)  # what belongs to no sequence has no slope, and no pair is visible
        slope = gl.load(params.slopes + sequence * params.stride_slopes_b + head).to(gl.float32)
        t -= slope * gl.abs((rows + shift).to(gl.float32) - keys.to(gl.float32))
    return Score(t, capped)


@gluon.jit
def derivative(p, score, params):
    """`p` times the derivative of the final score by `scale * <q, k>`."""
    if params.softcap is not None:
        p = p * (1 - score.tanh * score.tanh)
    return p


@gluon.jit
def tanh(x):
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
