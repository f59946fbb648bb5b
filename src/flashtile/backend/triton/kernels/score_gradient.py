"""The gradient of the scores of one tile `[M, N]`, recomputed from rows and keys; dq and dbias are made of it."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .masking import mask_fill
from .products import inner_products
from .rng import keep_mask
from .rows import Chunks, elements, head_pointer, load_row_stats, load_rows
from .scores import Score


class RowTile(NamedTuple):
    """A block of query rows."""

    position: tl.tensor  # [M, 1]
    q: Chunks  # [M, D]
    dout: Chunks  # [M, Dv]
    lse: tl.tensor  # [M]
    delta: tl.tensor  # [M]


@triton.jit
def load_row_tile(q, dout, row_stats, b, head, offset, position, exists, CONFIG: tl.constexpr):
    """Load the rows at `position [M]` of a sequence and head that begin at token `offset`."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    token = (offset + position)[:, None]
    q_head, dout_head = head_pointer(q, b, head, ALIGN), head_pointer(dout, b, head, ALIGN)
    stats_head = head_pointer(row_stats, b, head, 2) + offset
    q_i = load_rows(q_head + token * elements(q.stride_m, ALIGN), exists, D)
    dout_i = load_rows(dout_head + token * elements(dout.stride_m, ALIGN), exists, DV)
    lse_i, delta_i = load_row_stats(stats_head + position, exists)
    return RowTile(position[:, None], q_i, dout_i, lse_i, delta_i)


@triton.jit
def score_gradient(
    row_tile, k_j, v_j, keys, first_key, exists, params, info, bounds, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """The gradient of the score before score_mod, `ds [M, N]`, as a score of which the rest is that of forward.
    `exists [N]` is `None` where every key does.
    """
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    rows, keys_exist = row_tile.position, None if exists is None else exists[None, :]
    lse_i, delta_i = row_tile.lse[:, None], row_tile.delta[:, None]
    qk = inner_products(row_tile.q, k_j, D, CONFIG)
    s = scores.forward(qk, params, info, rows, keys, keys_exist, CONFIG.COMPENSATED)  # [M, N]
    p = tl.exp2(s.t * info.factor - lse_i)
    dp = inner_products(row_tile.dout, v_j, DV, CONFIG)  # [M, N]
    if params.dropout.threshold is not None:
        keep = keep_mask(params.dropout, info.stream, rows, first_key, CONFIG.BLOCK_N)
        dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
    ds = scores.unmodified(p * (dp - delta_i), s, params)
    # Also where a row's delta is NaN.
    ds = mask_fill(ds, 0.0, bounds, params, info, rows, keys, keys_exist, MASKED, CONFIG.PAGE_SIZE == 0)
    return Score(ds, s.tanh, s.modified)
