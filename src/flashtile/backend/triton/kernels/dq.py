"""dq, and what each row gives to the gradient of its ALiBi slope: one program for each block of rows (`backward`)."""

import triton
import triton.language as tl

from . import scores
from .masking import Window, key_blocks, keys_seen, nth_block, num_blocks, visible_keys
from .products import add, add_product, inner_products, scaled, zero_sum, zeros
from .rng import Dropout, kept, words_of
from .scores import Features, Pairs, Score, slope_of
from .tiles import (
    block_of,
    kernel,
    key_side,
    key_tile,
    keys_of,
    load_k,
    load_numbers,
    load_rows,
    load_v,
    store_rows,
    wide,
)


@kernel
def dq_kernel(
    q, k, v, dout, row_stats, dq, dslopes, mask, bias, slopes, seed,
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, leftpad_k,
    stride_q_b, stride_q_h, stride_q_m, stride_k_b, stride_k_h, stride_k_n, stride_v_b, stride_v_h, stride_v_n,
    stride_dout_b, stride_dout_h, stride_dout_m, stride_dq_b, stride_dq_h, stride_dq_m,
    stride_row_stats_b, stride_row_stats_h, stride_lse_b, stride_lse_h,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slopes_b, stride_table_b,
    num_tiles, batch, num_heads_q, num_heads_k, total_q, total_k, longest_k, rows_of_pairs, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SEQUENCES: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dslopes` has the shape of lse; it is `None` where nobody wants it."""
    factor = scores.unit(factor, softcap, bias, slopes)
    span = block_of(tl.program_id(0), num_tiles, num_heads_q, cu_seqlens_q, batch, total_q, 0, 1, BLOCK_M, SEQUENCES)
    if span.start < span.length:
        position = span.start + tl.arange(0, BLOCK_M)  # [M]
        exists = position < span.length
        head, head_k = span.head, span.head // (num_heads_q // num_heads_k)
        b = tl.where(span.sequence < batch, span.sequence, 0).to(tl.int64)
        key_range = keys_of(
            span.sequence, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, longest_k, page_table is not None
        )
        side = key_side(
            k + head_k * wide(stride_k_h, ALIGN), v + head_k * wide(stride_v_h, ALIGN), b, key_range,
            page_table, num_pages, wide(stride_k_b, ALIGN), wide(stride_k_n, ALIGN),
            wide(stride_v_b, ALIGN), wide(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        slope = None
        if slopes is not None:
            slope = slope_of(slopes, b, head, stride_slopes_b)
        features = Features(
            multiplier,
            softcap,
            Pairs(mask, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, rows_of_pairs),
            Pairs(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, rows_of_pairs),
            slope,
            b,
            head,
            key_range.length - span.length + diagonal,
            q.dtype.element_ty != tl.float32,
        )
        window = Window(window_left, window_right, top_left)
        dropout = None
        if threshold is not None:
            key_0, key_1 = words_of(seed)
            dropout = Dropout(threshold, key_0, key_1, (b + b0) * num_heads + h0 + head, i0, j0)

        token = (span.first + position)[:, None]
        q_rows = q + b * wide(stride_q_b, ALIGN) + head * wide(stride_q_h, ALIGN)
        dout_rows = dout + b * wide(stride_dout_b, ALIGN) + head * wide(stride_dout_h, ALIGN)
        dq_rows = dq + b * wide(stride_dq_b, ALIGN) + head * wide(stride_dq_h, ALIGN)
        row_stats_ptr = row_stats + b * wide(stride_row_stats_b, 2) + head * wide(stride_row_stats_h, 2) + span.first
        q_i = load_rows(q_rows + token * wide(stride_q_m, ALIGN), exists, D, D0, D1)  # [M, D]
        dout_i = load_rows(dout_rows + token * wide(stride_dout_m, ALIGN), exists, DV, DV0, DV1)  # [M, Dv]
        lse_i, delta_i = load_numbers(row_stats_ptr + position, exists)  # [M]
        lse_i, delta_i = lse_i[:, None], delta_i[:, None]

        last = tl.minimum(span.start + BLOCK_M, span.length) - 1
        origin = 0 if threshold is None else -(j0 % 8)
        blocks = key_blocks(window, span.start, last, features.shift, side.range.begin, side.range.end, origin, BLOCK_N)
        rows = position[:, None]
        padded = leftpad_k is not None or threshold is not None
        bounds = keys_seen(window, rows, features.shift, side.range, padded)
        COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
        dq_i = zeros(BLOCK_M, D0, D1, COMPENSATED)
        dslope_i = zero_sum(tl.zeros([BLOCK_M], tl.float32), COMPENSATED)
        dq_i, dslope_i = dq_of_keys(
            dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, side, rows, features, bounds, dropout, factor,
            keep_scale, True, dslopes is not None, D, D0, D1, DV, DV0, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        dq_i, dslope_i = dq_of_keys(
            dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, side, rows, features, bounds, dropout, factor,
            keep_scale, False, dslopes is not None, D, D0, D1, DV, DV0, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        store_rows(dq_rows + token * wide(stride_dq_m, ALIGN), scaled(dq_i, scale, D1), exists, D, D0, D1)
        if dslopes is not None:
            given = dslopes + b * wide(stride_lse_b, 1) + head * wide(stride_lse_h, 1) + span.first
            tl.store(given + position, dslope_i.total, mask=exists)


@triton.jit
def dq_of_keys(
    dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, side, rows, features, bounds, dropout, factor, keep_scale,
    MASKED: tl.constexpr, SLOPES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the blocks give that need masks, or those that do not."""
    for n in range(num_blocks(blocks, MASKED, BLOCK_N)):
        start_n = nth_block(blocks, n, MASKED, BLOCK_N)
        tile = key_tile(side, start_n, PAGE_SIZE, BLOCK_N)
        exists = tile.exists if MASKED or PAGE_SIZE > 0 else None
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(side, tile, exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        v_j = load_v(side, tile, exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]
        ds = score_gradient(
            q_i, k_j, dout_i, v_j, lse_i, delta_i, rows, keys, start_n, exists, features, bounds, dropout, factor,
            keep_scale, MASKED, D1, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        if SLOPES:
            dslope = tl.sum(ds.t * scores.distance(features, rows, keys), 1)
            dslope_i = add(dslope_i, -dslope, k_j.a.dtype == tl.float32)
        dq_i = add_product(dq_i, None, scores.backward(ds.t, ds, features), k_j, D1, PRECISION)
    return dq_i, dslope_i


@triton.jit
def score_gradient(
    q_i, k_j, dout_i, v_j, lse_i, delta_i, rows, keys, first_key, exists, features, bounds, dropout, factor, keep_scale,
    MASKED: tl.constexpr, D1: tl.constexpr, DV1: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the final score, `ds [M, N]`, as a score of which `tanh` is that of forward."""
    inside = None if exists is None else exists[None, :]
    s = scores.forward(inner_products(q_i, k_j, D1, PRECISION), features, rows, keys, inside)  # [M, N]
    p = tl.exp2(s.t * factor - lse_i)
    dp = inner_products(dout_i, v_j, DV1, PRECISION)  # [M, N]
    if dropout is not None:
        dp = tl.where(kept(dropout, rows, first_key, BLOCK_N), dp * keep_scale, 0.0)
    ds = p * (dp - delta_i)
    visible = visible_keys(bounds, keys, inside, PAGE_SIZE == 0) if MASKED else inside
    if features.mask.data is not None:
        in_mask = scores.shown(features, rows, keys, inside)
        visible = in_mask if visible is None else visible & in_mask
    if visible is not None:
        ds = tl.where(visible, ds, 0.0)  # also where a row's delta is NaN
    return Score(ds, s.tanh)
