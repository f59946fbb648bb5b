"""dq, and what each row gives to the gradient of its ALiBi slope: one program for each block of rows (`backward`)."""

import triton
import triton.language as tl

from . import scores
from .masking import WindowSize, key_blocks, key_bounds, nth_block, num_blocks, visible_keys
from .products import add, add_product, inner_products, scaled, zero_sum, zeros
from .rng import Dropout, keep_mask, load_seed
from .scores import Features, PairTensor, Score, load_slope
from .tiles import (
    elements,
    kernel,
    key_seqlen,
    key_tile,
    key_value_head,
    load_k,
    load_row_stats,
    load_rows,
    load_v,
    store_rows,
    work_tile,
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
    num_tiles, batch, num_heads_q, num_heads_k, total_q, total_k, max_seqlen_k, pair_rows, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    BLOCK_B: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dslopes` has the shape of lse; it is `None` where nobody wants it."""
    factor = scores.score_unit(factor, softcap, bias, slopes)
    work = work_tile(tl.program_id(0), num_tiles, num_heads_q, cu_seqlens_q, batch, total_q, 0, 1, BLOCK_M, BLOCK_B)
    if work.start < work.seqlen:
        position = work.start + tl.arange(0, BLOCK_M)  # [M]
        exists = position < work.seqlen
        head, head_k = work.head, work.head // (num_heads_q // num_heads_k)
        b = tl.where(work.sequence < batch, work.sequence, 0).to(tl.int64)
        seqlen_k = key_seqlen(
            work.sequence, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, max_seqlen_k, page_table is not None
        )
        kv = key_value_head(
            k + head_k * elements(stride_k_h, ALIGN), v + head_k * elements(stride_v_h, ALIGN), b, seqlen_k,
            page_table, num_pages, elements(stride_k_b, ALIGN), elements(stride_k_n, ALIGN),
            elements(stride_v_b, ALIGN), elements(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        slope = None
        if slopes is not None:
            slope = load_slope(slopes, b, head, stride_slopes_b)
        features = Features(
            multiplier,
            softcap,
            PairTensor(mask, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, pair_rows),
            PairTensor(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, pair_rows),
            slope,
            b,
            head,
            seqlen_k.seqlen - work.seqlen + diagonal,
            q.dtype.element_ty != tl.float32,
        )
        window = WindowSize(window_left, window_right, top_left)
        dropout = None
        if threshold is not None:
            key_0, key_1 = load_seed(seed)
            dropout = Dropout(threshold, key_0, key_1, (b + b0) * num_heads + h0 + head, i0, j0)

        token = (work.offset + position)[:, None]
        q_rows = q + b * elements(stride_q_b, ALIGN) + head * elements(stride_q_h, ALIGN)
        dout_rows = dout + b * elements(stride_dout_b, ALIGN) + head * elements(stride_dout_h, ALIGN)
        dq_rows = dq + b * elements(stride_dq_b, ALIGN) + head * elements(stride_dq_h, ALIGN)
        row_stats_ptr = (
            row_stats + b * elements(stride_row_stats_b, 2) + head * elements(stride_row_stats_h, 2) + work.offset
        )
        q_i = load_rows(q_rows + token * elements(stride_q_m, ALIGN), exists, D, D0, D1)  # [M, D]
        dout_i = load_rows(dout_rows + token * elements(stride_dout_m, ALIGN), exists, DV, DV0, DV1)  # [M, Dv]
        lse_i, delta_i = load_row_stats(row_stats_ptr + position, exists)  # [M]
        lse_i, delta_i = lse_i[:, None], delta_i[:, None]

        last = tl.minimum(work.start + BLOCK_M, work.seqlen) - 1
        origin = 0 if threshold is None else -(j0 % 8)
        blocks = key_blocks(window, work.start, last, features.shift, kv.range.begin, kv.range.end, origin, BLOCK_N)
        rows = position[:, None]
        padded = leftpad_k is not None or threshold is not None
        bounds = key_bounds(window, rows, features.shift, kv.range, padded)
        COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
        dq_i = zeros(BLOCK_M, D0, D1, COMPENSATED)
        dslope_i = zero_sum(tl.zeros([BLOCK_M], tl.float32), COMPENSATED)
        dq_i, dslope_i = inner_loop(
            dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, kv, rows, features, bounds, dropout, factor,
            keep_scale, True, dslopes is not None, D, D0, D1, DV, DV0, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        dq_i, dslope_i = inner_loop(
            dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, kv, rows, features, bounds, dropout, factor,
            keep_scale, False, dslopes is not None, D, D0, D1, DV, DV0, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        store_rows(dq_rows + token * elements(stride_dq_m, ALIGN), scaled(dq_i, scale, D1), exists, D, D0, D1)
        if dslopes is not None:
            given = dslopes + b * elements(stride_lse_b, 1) + head * elements(stride_lse_h, 1) + work.offset
            tl.store(given + position, dslope_i.total, mask=exists)


@triton.jit
def inner_loop(
    dq_i, dslope_i, blocks, q_i, dout_i, lse_i, delta_i, kv, rows, features, bounds, dropout, factor, keep_scale,
    MASKED: tl.constexpr, SLOPES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the blocks give that need masks, or those that do not."""
    for n in range(num_blocks(blocks, MASKED, BLOCK_N)):
        start_n = nth_block(blocks, n, MASKED, BLOCK_N)
        tile = key_tile(kv, start_n, PAGE_SIZE, BLOCK_N)
        exists = tile.exists if MASKED or PAGE_SIZE > 0 else None
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(kv, tile, exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        v_j = load_v(kv, tile, exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]
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
        dp = tl.where(keep_mask(dropout, rows, first_key, BLOCK_N), dp * keep_scale, 0.0)
    ds = p * (dp - delta_i)
    visible = visible_keys(bounds, keys, inside, PAGE_SIZE == 0) if MASKED else inside
    if features.mask.data is not None:
        in_mask = scores.load_mask(features, rows, keys, inside)
        visible = in_mask if visible is None else visible & in_mask
    if visible is not None:
        ds = tl.where(visible, ds, 0.0)  # also where a row's delta is NaN
    return Score(ds, s.tanh)
