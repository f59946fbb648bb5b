"""Scores and their gradients, and masks. Each feature is one line in `forward` and one in `backward`.

s = scale * <q, k>                      s is formed by the caller's matrix product
s = softcap * tanh(s / softcap)         ds *= 1 - tanh(s / softcap) ** 2
s = s + bias                            dbias = ds
s = s - slope * |i + Sk - Sq - j|       dslope = -ds * |i + Sk - Sq - j|
s = score_mod(s, b, h, i, j)            ds *= its partial derivative by s

Rows are `[M, 1]` and keys `[1, N]`, or rows `[1, M]` and keys `[N, 1]`. A score_mod is a device function generated from
its formula (`backend.triton.formulas`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .functions import fast_tanh, tanh
from .rows import elements
from .softmax import INFINITY


class Score(NamedTuple):
    t: tl.tensor  # the score, in units of `softmax_factor`
    tanh: tl.tensor  # of the capped score, for its derivative; without a softcap, the score
    modified: tl.tuple  # results of score_mod: the score, then the derivatives that the kernel uses; 0 without one


@triton.jit
def load_slope(slopes, sequence, head, batch):
    exists = head < tl.minimum(batch, 1) * 2**30  # not of no sequences
    return tl.load(slopes.data + sequence * slopes.stride_b + head, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(tensor, params, sequence, head, rows, keys, exists, OTHER: tl.constexpr):
    """Load `[M, N]` of a mask or bias, or one row or column where it is broadcast. Rows past the last one repeat it.
    `exists` is `None` where every key does.
    """
    ALIGN: tl.constexpr = params.scores.pair_align
    pointers = tensor.data + sequence * elements(tensor.stride_b, ALIGN)
    pointers += head * elements(tensor.stride_h, ALIGN)
    if tensor.stride_m is not None:
        pointers += tl.minimum(rows, params.lengths.pair_rows - 1) * elements(tensor.stride_m, ALIGN)
    if tensor.stride_n is None:
        return tl.load(pointers)
    elif exists is None:
        return tl.load(pointers + keys)
    else:
        return tl.load(pointers + keys, mask=in_units(exists, params.lengths, rows, keys, ALIGN), other=OTHER)


@triton.jit
def in_units(exists, lengths, rows, keys, ALIGN: tl.constexpr):
    """Whether pairs exist, as the compiler should see it: of ALIGN keys of a dense sequence, all do or none."""
    dense: tl.constexpr = lengths.cu_seqlens_k is None and lengths.page_table.data is None
    whole: tl.constexpr = lengths.seqused_k is None and lengths.leftpad_k is None
    if ALIGN == 1 or not (dense and whole):
        return exists
    elif keys.shape[0] == 1:  # it forgets what it is told of a tensor that it broadcasts
        return tl.max_constancy(exists & (rows >= 0), [1, ALIGN])
    else:
        return tl.max_constancy(exists & (rows >= 0), [ALIGN, 1])


@triton.jit
def softmax_factor(x):
    """The factor that makes base-2 logarithms of scores. It includes the softcap if no feature comes after it."""
    if x.softcap is not None and x.bias.data is None and x.slopes.data is None and x.score_mod is None:
        return x.factor * x.softcap
    else:
        return x.factor


@triton.jit
def forward(product, params, info, rows, keys, exists, ACCURATE: tl.constexpr):
    """The final score of `product = <q, k>`, not yet masked. ACCURATE is for float32 inputs."""
    t, capped = unmodified_score(product, params.scores, params, info, rows, keys, exists, ACCURATE)
    if params.scores.score_mod is None:
        return Score(t, capped, 0)
    else:
        modified = modify(t, params, info, rows, keys)
        return Score(tl.broadcast_to(modified[0], product.shape), capped, modified)


@triton.jit
def unmodified_score(product, features, params, info, rows, keys, exists, ACCURATE: tl.constexpr):
    """The score before score_mod, and the tanh of its softcap."""
    t, capped = product, product
    if features.softcap is not None:
        ratio = product * (features.multiplier / features.softcap)
        capped = tanh(ratio) if ACCURATE else fast_tanh(ratio)
        t = capped
        if features.bias.data is not None or features.slopes.data is not None or features.score_mod is not None:
            t = features.softcap * capped
    elif features.multiplier is not None:
        t = t * features.multiplier
    if features.bias.data is not None:
        if len(info.bias) > 0:
            t += info.bias[0].to(tl.float32)
        else:
            bias = load_pairs(features.bias, params, info.sequence, info.head, rows, keys, exists, 0.0)
            t += bias.to(tl.float32)
    if features.slopes.data is not None:
        t -= info.slope * distance(info, rows, keys)
    return t, capped


@triton.jit
def modify(t, params, info, rows, keys):
    """The results of score_mod. Its indices count from the whole call's first sequence, head, row and key.

    `params.scores` must not be assigned to a variable: Triton 3.6 to 3.9 would make tensors of its fields.
    """
    part = params.dropout
    sequence, head = info.sequence.to(tl.int32) + part.b0, info.head + part.h0
    return params.scores.score_mod(t, sequence, head, rows + part.i0, keys + part.j0, params.scores.captured)


@triton.jit
def unmodified(ds, score, lse, params):
    """The gradient of the score before score_mod, from that of the final one. Of a hidden pair it may be NaN. Rows
    whose scores are all -inf have an infinite lse in backward: their gradient is 0, and not 0 times the derivative.
    """
    if params.scores.score_mod is not None:
        ds = tl.where(lse == INFINITY, 0.0, ds * score.modified[1])
    return ds


@triton.jit
def backward(ds, score, params):
    """The gradient of `scale * <q, k>`, from that of the score before score_mod."""
    if params.scores.softcap is not None:
        ds = ds * (1 - score.tanh * score.tanh)
    return ds


@triton.jit
def distance(info, rows, keys):
    """`|i + shift - j|`, fp32."""
    return tl.abs((rows + info.shift).to(tl.float32) - keys.to(tl.float32))


@triton.jit
def load_mask(params, info, rows, keys, exists):
    """The mask of a tile: true where a pair is visible."""
    return load_pairs(params.scores.mask, params, info.sequence, info.head, rows, keys, exists, 0) != 0


@triton.jit
def visible_by_function(params, info, rows, keys):
    """The pairs of a tile that the mask function shows, in a shape that broadcasts to it. Indices as in `modify`."""
    part = params.dropout
    sequence, head = info.sequence.to(tl.int32) + part.b0, info.head + part.h0
    return params.scores.mask_mod(sequence, head, rows + part.i0, keys + part.j0, params.scores.captured)[0]
