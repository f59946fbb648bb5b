"""The gradient of the scores of one tile, recomputed from rows and keys: `[M, N]` for dq and dbias, transposed for dk
and dv, whose left operands it and the probabilities are.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .masking import Bounds, mask_fill, within
from .products import inner_products
from .rng import keep_mask
from .rows import Chunks, elements, head_pointer, load_row_stats, load_rows, probabilities
from .scores import Score


class RowTile(NamedTuple):
    """A block of query rows."""

    position: tl.tensor  # [M, 1]
    q: Chunks  # [M, D]
    dout: Chunks  # [M, Dv]
    lse: tl.tensor  # [M]
    delta: tl.tensor  # [M]
    residual: tl.tensor  # [M] of lse, for natural scores


class KeyValueTile(NamedTuple):
    """A block of keys and values."""

    position: tl.tensor  # [N, 1]
    k: Chunks  # [N, D]
    v: Chunks  # [N, Dv]
    exists: tl.tensor  # [N, 1]
    bounds: Bounds  # rows that see each key


class ScoreGradient(NamedTuple):
    """Probabilities and gradients of a tile, 0 where a pair is hidden."""

    p: tl.tensor  # of the pairs that dropout keeps, not scaled
    ds: tl.tensor  # by the score before score_mod
    score: Score


@triton.jit
def load_row_tile(q, dout, row_stats, b, head, offset, position, exists, CONFIG: tl.constexpr):
    """Load the rows at `position [M]` of a sequence and head that begin at token `offset`."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    token = (offset + position)[:, None]
    q_head, dout_head = head_pointer(q, b, head, ALIGN), head_pointer(dout, b, head, ALIGN)
    stats_head = head_pointer(row_stats, b, head, 2)
    q_i = load_rows(q_head + token * elements(q.stride_m, ALIGN), exists, D)
    dout_i = load_rows(dout_head + token * elements(dout.stride_m, ALIGN), exists, DV)
    lse_i, delta_i, residual_i = load_row_stats(stats_head, offset + position, exists, CONFIG.NATURAL)
    return RowTile(position[:, None], q_i, dout_i, lse_i, delta_i, residual_i)


@triton.jit
def score_gradient(
    row_tile, k_j, v_j, keys, first_key, exists, params, info, bounds, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """Probabilities and gradients `[M, N]`. `exists [N]` is `None` where every key does."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    rows, keys_exist = row_tile.position, None if exists is None else exists[None, :]
    lse_i, delta_i = row_tile.lse[:, None], row_tile.delta[:, None]
    residual_i = row_tile.residual[:, None] if CONFIG.NATURAL else 0.0
    qk = inner_products(row_tile.q, k_j, D, CONFIG)
    s = scores.forward(qk, params, info, rows, keys, keys_exist, CONFIG.COMPENSATED)  # [M, N]
    p = probabilities(s.t, info.factor, lse_i, residual_i, CONFIG.NATURAL)
    dp = inner_products(row_tile.dout, v_j, DV, CONFIG)  # [M, N]
    p_kept = p
    if params.dropout.threshold is not None:
        keep = keep_mask(params.dropout, info.stream, rows, first_key, CONFIG.BLOCK_N)
        p_kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
    ds = scores.unmodified(p * (dp - delta_i), s, lse_i, params)
    # Also where a row's delta is NaN.
    ds = mask_fill(ds, 0.0, bounds, params, info, rows, keys, keys_exist, MASKED, CONFIG.PAGE_SIZE == 0)
    p_kept = mask_fill(p_kept, 0.0, bounds, params, info, rows, keys, keys_exist, MASKED, CONFIG.PAGE_SIZE == 0)
    return ScoreGradient(p_kept, ds, s)


@triton.jit
def transposed_gradient(
    tile, q_i, dout_i, lse_i, delta_i, residual_i, row, params, info, MASKED: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    """As `score_gradient`, `[N, M]`, for the keys and values of a `KeyValueTile` and rows at `row [M]`."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    kq = inner_products(tile.k, q_i, D, CONFIG)
    s = scores.forward(kq, params, info, row[None, :], tile.position, tile.exists, CONFIG.COMPENSATED)
    of_rows = residual_i[None, :] if CONFIG.NATURAL else 0.0
    p = probabilities(s.t, info.factor, lse_i[None, :], of_rows, CONFIG.NATURAL)  # [N, M]
    visible = None
    if MASKED:  # also for rows past the last one: they repeat its bias, and 0 * NaN is NaN
        visible = within(tile.bounds, row[None, :])
    if params.scores.mask.data is not None and (MASKED or params.lists.data is None):
        in_mask = scores.load_mask(params, info, row[None, :], tile.position, tile.exists)
        visible = in_mask if visible is None else visible & in_mask
    if params.scores.mask_mod is not None and (MASKED or params.lists.data is None):
        shown = scores.visible_by_function(params, info, row[None, :], tile.position)
        visible = shown if visible is None else visible & shown
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    dp = inner_products(tile.v, dout_i, DV, CONFIG)  # [N, M]
    p_kept = p
    if params.dropout.threshold is not None:
        first_key = tl.min(tile.position)
        keep = tl.trans(keep_mask(params.dropout, info.stream, row[:, None], first_key, CONFIG.BLOCK_N))
        p_kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
    ds = scores.unmodified(p * (dp - delta_i[None, :]), s, lse_i[None, :], params)
    if visible is not None:
        ds = tl.where(visible, ds, 0.0)  # not 0 * NaN, where a row's delta is NaN
    return ScoreGradient(p_kept, ds, s)
