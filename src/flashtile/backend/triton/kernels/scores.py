"""What a score becomes, and which pairs count: one forward line for each feature and, beside it, its gradient.

s = scale * <q, k>                      s is formed by the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s + bias                            dbias = ds
s = s - slope * |i + Sk - Sq - j|       dslope = -ds * |i + Sk - Sq - j|

Rows are `[M, 1]` and keys `[1, N]`, or rows `[1, M]` and keys `[N, 1]`: every line serves both orientations.
A score_mod would come last; this backend declines it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .softmax import LOG2E
from .tiles import elements


class PairTensor(NamedTuple):
    """A mask or bias `[B, H, Sq, Sk]`; `data` is `None` where there is none, the stride of a broadcast row or column is
    `None`, that of a broadcast sequence or head 0.
    """

    data: tl.tensor | None
    stride_b: tl.tensor | None
    stride_h: tl.tensor | None
    stride_m: tl.tensor | None
    stride_n: tl.tensor | None
    num_rows: tl.tensor


class Features(NamedTuple):
    """What changes the scores of one sequence and head; `None` where absent."""

    multiplier: tl.tensor | None  # of the product; `None` where the softmax takes the scale
    softcap: tl.tensor | None
    mask: PairTensor
    bias: PairTensor
    slope: tl.tensor | None  # a number, or [M, 1]
    sequence: tl.tensor  # int64
    head: tl.tensor  # a number, or [M, 1]
    shift: tl.tensor  # seqlen_k - seqlen_q, in an unsharded call
    half: tl.constexpr  # whether inputs are float16 or bfloat16


class Score(NamedTuple):
    t: tl.tensor  # the score in the softmax's units (`score_unit`)
    tanh: tl.tensor  # of the capped score, for its derivative; without a softcap, the score


@triton.jit
def load_slope(slopes, sequence, head, stride_b):
    return tl.load(slopes + sequence * stride_b + head).to(tl.float32)


@triton.jit
def load_pair_tensor(x, features, rows, keys, inside, OTHER: tl.constexpr):
    """`[M, N]`, or one row or column where the tensor is broadcast; `inside` is `None` where every key exists. Rows
    past the last one repeat it.
    """
    pointers = x.data + (features.sequence * elements(x.stride_b, 1) + features.head * elements(x.stride_h, 1))
    if x.stride_m is not None:
        pointers += tl.minimum(rows, x.num_rows - 1) * elements(x.stride_m, 1)
    if x.stride_n is None:
        return tl.load(pointers)
    elif inside is None:
        return tl.load(pointers + keys * elements(x.stride_n, 1))
    else:
        return tl.load(pointers + keys * elements(x.stride_n, 1), mask=inside, other=OTHER)


@triton.jit
def score_unit(factor, softcap, bias, slopes):
    """What makes base-2 logarithms of scores: the softmax takes the softcap where nothing comes after it."""
    if softcap is not None and bias is None and slopes is None:
        return factor * softcap
    else:
        return factor


@triton.jit
def forward(product, features, rows, keys, inside):
    """The final score of `product = <q, k>`, not yet masked."""
    t, capped = product, product
    if features.softcap is not None:
        x = product * (features.multiplier / features.softcap)
        capped = fast_tanh(x) if features.half else tanh(x)
        t = capped
        if features.bias.data is not None or features.slope is not None:
            t = features.softcap * capped
    elif features.multiplier is not None:
        t = t * features.multiplier
    if features.bias.data is not None:
        t += load_pair_tensor(features.bias, features, rows, keys, inside, 0.0).to(tl.float32)
    if features.slope is not None:
        t -= features.slope * distance(features, rows, keys)
    return Score(t, capped)


@triton.jit
def backward(ds, score, features):
    """From the gradient of the final score to that of `scale * <q, k>`."""
    if features.softcap is not None:
        ds = ds * (1 - score.tanh * score.tanh)
    return ds


@triton.jit
def distance(features, rows, keys):
    """`|i + shift - j|`, fp32."""
    return tl.abs((rows + features.shift).to(tl.float32) - keys.to(tl.float32))


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
    """Within 4e-6 of itself, a hundredth of what float16 inputs are rounded to: a quotient of two polynomials, fitted
    to have the least relative error up to 6.5, where the tangent is 1. One special function instead of two.
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
def load_mask(features, rows, keys, inside):
    """Which pairs the mask shows."""
    return load_pair_tensor(features.mask, features, rows, keys, inside, 0) != 0
