"""Transformations of scores: one forward line for each feature, and its derivative.

s = scale * <q, k>                      s comes from the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s + bias                            (derivative 1)
s = s - slope * |i + Sk - Sq - j|       (constant derivative)
s = score_mod(s, b, h, i, j)            ds *= its partial derivative by s
s = -inf where the mask hides the pair  p is 0

Rows are `[M, 1]` and keys `[1, N]`, or rows `[1, M]` and keys `[N, 1]`: the code serves both orientations.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.grouped import without
from .compat import Pointer, Scalar
from .functions import reciprocal
from .pairs import PairTensors, add_bias, hide
from .score_mod import PairInputs, modify
from .softmax import LOG2E


class Slopes(NamedTuple):
    """ALiBi slopes `[H]` or `[B, H]`."""

    data: Pointer
    stride_b: Scalar


class ScoreParams(NamedTuple):
    """Parameters of the score transformations; absent ones are `None`."""

    factor: Scalar  # converts scores to base-2 logarithms
    multiplier: Scalar  # converts <q, k> to scores; `None` where the factor includes it
    softcap: Scalar
    slopes: Slopes
    sinks: Pointer  # [H]; `None` in backward, where lse includes them
    batch: Scalar  # number of sequences
    inputs: PairInputs  # of a score_mod
    pairs: PairTensors  # bias and mask


BackwardScores = without(ScoreParams, "sinks")  # lse includes them


class Score(NamedTuple):
    """A final score and what its derivative needs."""

    t: gl.tensor  # in the softmax's units
    tanh: gl.tensor  # tanh(s / softcap); without a softcap, unused
    modified: tuple  # results of a score_mod: the score, then in backward its derivative; without one, unused


@gluon.jit
def forward(qk, params, b, head, shift, rows, keys, first_distance, loaded, CONFIG: gl.constexpr):
    """Final score of `qk = <q, k>`, -inf where the mask hides the pair; a window is left to the caller. The diagonal is
    `key = row + shift`. `first_distance`, row minus key of the first pair, is for the score_mod.
    """
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    pairs, block = params.pairs, loaded.pairs
    if SCORE_MOD is None:
        t, capped = unmodified_score(qk, params, b, head, shift, rows, keys, loaded, CONFIG)
        return Score(hide(t, pairs, block, loaded.partial, CONFIG.pair_align), capped, ())
    elif (params.softcap is None) & (params.slopes.data is None) & (pairs.bias.data is None):
        t, modified = modify(qk, params.multiplier, params, b, head, rows, keys, first_distance, loaded, SCORE_MOD)
        return Score(hide(t, pairs, block, loaded.partial, CONFIG.pair_align), qk, modified)
    else:
        t, capped = unmodified_score(qk, params, b, head, shift, rows, keys, loaded, CONFIG)
        t, modified = modify(t, None, params, b, head, rows, keys, first_distance, loaded, SCORE_MOD)
        return Score(hide(t, pairs, block, loaded.partial, CONFIG.pair_align), capped, modified)


@gluon.jit
def unmodified_score(qk, params, b, head, shift, rows, keys, loaded, CONFIG: gl.constexpr):
    """The score before a score_mod, and the tanh of its softcap."""
    t, capped = qk, qk
    if params.softcap is not None:
        capped = tanh(qk * (params.multiplier / params.softcap))
        t = params.softcap * capped
    elif params.multiplier is not None:
        t = t * params.multiplier
    t = add_bias(t, params.pairs, loaded.pairs, CONFIG.pair_align)
    if params.slopes.data is not None:
        # Tokens outside all sequences have b = batch, which has no slope; none of their pairs is visible.
        sequence = gl.minimum(b, params.batch - 1)
        slope = gl.load(params.slopes.data + sequence * params.slopes.stride_b + head).to(gl.float32)
        t -= slope * gl.abs((rows + shift).to(gl.float32) - keys.to(gl.float32))
    return t, capped


@gluon.jit
def log2_probabilities(t, neg_lse, neg_residual, params):
    """Base-2 logarithms of p. Natural scores have the residual of lse, in a tuple: their difference to lse is taken
    before any factor.
    """
    if len(neg_residual) > 0:
        return (t + neg_lse) * params.factor + neg_residual[0]
    else:
        return t * params.factor + neg_lse


@gluon.jit
def derivative(p, score, params, SCORE_MOD: gl.constexpr):
    """`p` times the derivative of the final score with respect to `scale * <q, k>`. Of a pair that the window hides, it
    may be NaN.
    """
    if SCORE_MOD is not None:
        modified = p * score.modified[1]
        # 0 * the derivative is NaN where that is NaN or, at a score of -inf, infinite.
        is_finite: gl.constexpr = SCORE_MOD.linear or params.pairs.bias.data is None
        p = modified if is_finite and params.pairs.mask.data is None else gl.where(p == 0, 0.0, modified)
    if params.softcap is not None:
        p = p * (1 - score.tanh * score.tanh)
    return p


@gluon.jit
def tanh(x):
    """tanh within 4e-6, a hundredth of the rounding error of float16 inputs.

    Near 0, where `1 - 2 / (e^2x + 1)` cancels, it is the series of Abramowitz and Stegun, 4.5.64.
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15))
    quotient = 1 - 2 * reciprocal(gl.exp2(x * (2 * LOG2E)) + 1)
    return gl.where(square < 0.04, series, quotient)
