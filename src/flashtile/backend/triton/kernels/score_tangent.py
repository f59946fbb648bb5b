"""Tangents of the scores of one tile. Each feature is one line, as in `scores`.

ds = scale * (<dq, k> + <q, dk>)        the products are the caller's
ds *= 1 - tanh(s / softcap) ** 2
ds += dbias
ds -= dslope * |i + Sk - Sq - j|
ds = ds * (derivative of score_mod by s) + sum of (its derivatives by captured elements) * (their tangents)
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .kernel import Pointer
from .parameters import BatchTensor, PairTensor
from .scores import distance, load_pairs
from .softmax import LN2


class FeatureTangents(NamedTuple):
    """Tangents of the features that move. Those of captured tensors follow these among the captured tensors."""

    dbias: PairTensor
    dslopes: BatchTensor
    dsinks: Pointer


@triton.jit
def score_tangent(dproduct, s, moving, dslope, params, info, rows, keys, exists, CONFIG: tl.constexpr):
    """The tangent `[M, N]` of the final score `s`, natural; of a hidden pair it may be NaN. `dproduct` is the number 0
    if neither q nor k moves.
    """
    ds = dproduct  # `params.scores` must not be assigned to a variable: see `scores.modify`
    if CONFIG.PRODUCTS_MOVE:
        ds = ds * (params.scores.factor * LN2 if params.scores.multiplier is None else params.scores.multiplier)
        if params.scores.softcap is not None:
            ds = ds * (1 - s.tanh * s.tanh)
    if moving.dbias.data is not None:
        ds += load_pairs(moving.dbias, params, info.sequence, info.head, rows, keys, exists, 0.0).to(tl.float32)
    if moving.dslopes.data is not None:
        ds -= dslope * distance(info, rows, keys)
    if params.scores.score_mod is not None:
        ds = ds * s.modified[1]
        if CONFIG.CAPTURED_MOVE:
            ds += s.modified[2]
    return tl.broadcast_to(ds, s.t.shape)
