"""Scores and their gradients, and the mask. Each feature is one line in `forward` and one in `backward`.

s = scale * <q, k>                      s is formed by the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s + bias                            dbias = ds
s = s - slope * |i + Sk - Sq - j|       dslope = -ds * |i + Sk - Sq - j|

Rows are `[M, 1]` and keys `[1, N]`, or rows `[1, M]` and keys `[N, 1]`. This backend declines a score_mod.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import elements
from .softmax import LOG2E


class Score(NamedTuple):
    t: tl.tensor  # the score, in units of `softmax_factor`
    tanh: tl.tensor  # of the capped score, for its derivative; without a softcap, the score


@triton.jit
def load_slope(slopes, sequence, head):
    return tl.load(slopes.data + sequence * slopes.stride_b + head).to(tl.float32)


@triton.jit
def load_pairs(tensor, params, info, rows, keys, exists, OTHER: tl.constexpr):
    """Load `[M, N]` of a mask or bias, or one row or column where it is broadcast. Rows past the last one repeat it.
    `exists` is `None` where every key does.
    """
    pointers = tensor.data + (info.sequence * elements(tensor.stride_b, 1) + info.head * elements(tensor.stride_h, 1))
    if tensor.stride_m is not None:
        pointers += tl.minimum(rows, params.lengths.pair_rows - 1) * elements(tensor.stride_m, 1)
    if tensor.stride_n is None:
        return tl.load(pointers)
    elif exists is None:
        return tl.load(pointers + keys * elements(tensor.stride_n, 1))
    else:
        return tl.load(pointers + keys * elements(tensor.stride_n, 1), mask=exists, other=OTHER)


@triton.jit
def softmax_factor(x):
    """The factor that makes base-2 logarithms of scores. It includes the softcap if no feature comes after it."""
    if x.softcap is not None and x.bias.data is None and x.slopes.data is None:
        return x.factor * x.softcap
    else:
        return x.factor


@triton.jit
def forward(product, params, info, rows, keys, exists, ACCURATE: tl.constexpr):
    """The final score of `product = <q, k>`, not yet masked. ACCURATE is for float32 inputs."""
    features = params.scores
    t, capped = product, product
    if features.softcap is not None:
        ratio = product * (features.multiplier / features.softcap)
        capped = tanh(ratio) if ACCURATE else fast_tanh(ratio)
        t = capped
        if features.bias.data is not None or features.slopes.data is not None:
            t = features.softcap * capped
    elif features.multiplier is not None:
        t = t * features.multiplier
    if features.bias.data is not None:
        t += load_pairs(features.bias, params, info, rows, keys, exists, 0.0).to(tl.float32)
    if features.slopes.data is not None:
        t -= info.slope * distance(info, rows, keys)
    return Score(t, capped)


@triton.jit
def backward(ds, score, params):
    """The gradient of `scale * <q, k>`, from that of the final score."""
    if params.scores.softcap is not None:
        ds = ds * (1 - score.tanh * score.tanh)
    return ds


@triton.jit
def distance(info, rows, keys):
    """`|i + shift - j|`, fp32."""
    return tl.abs((rows + info.shift).to(tl.float32) - keys.to(tl.float32))


@triton.jit
def tanh(x):
    """Within 3 units in the last place: a series where `1 - 2 / (e^2x + 1)` would cancel (Abramowitz and Stegun,
    4.5.64).
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    quotient = 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)
    return tl.where(square < 0.04, series, quotient)


@triton.jit
def fast_tanh(x):
    """Relative error 4e-6, a hundredth of the rounding of float16 inputs: a quotient of two polynomials, fitted to the
    least relative error up to 6.5, where tanh is 1. One special function instead of two.
    """
    x = tl.maximum(x, -6.5, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 6.5, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    above = 0.9999994181878639 + square * (
        0.12382975705472646 + square * (0.002349169468988402 + square * 4.2760037824266486e-06)
    )
    below = 1 + square * (0.45715849213461746 + square * (0.02140813340500195 + square * 0.00015023561741497716))
    root = tl.rsqrt(below)  # its square is the reciprocal, by one instruction: a division takes eight
    return (x * above) * (root * root)


@triton.jit
def load_mask(params, info, rows, keys, exists):
    """The mask of a tile: true where a pair is visible."""
    return load_pairs(params.scores.mask, params, info, rows, keys, exists, 0) != 0
