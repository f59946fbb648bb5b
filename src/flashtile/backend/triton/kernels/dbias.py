"""The gradient of a bias, in memory proportional to the bias: one program for each tile of the bias, which adds up the
score gradients of all sequences, heads, rows and keys that share it. No atomics: one writer, one order.
"""

import triton.language as tl

from . import scores
from .dq import score_gradient
from .masking import WindowSize, key_bounds
from .products import add, zero_sum
from .rng import Dropout, load_seed
from .scores import Features, PairTensor, load_slope
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
    query_seqlen,
)


@kernel
def dbias_kernel(
    q, k, v, dout, row_stats, dbias, mask, bias, slopes, seed,
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, leftpad_k,
    stride_q_b, stride_q_h, stride_q_m, stride_k_b, stride_k_h, stride_k_n, stride_v_b, stride_v_h, stride_v_n,
    stride_dout_b, stride_dout_h, stride_dout_m, stride_row_stats_b, stride_row_stats_h,
    stride_dbias_split, stride_dbias_b, stride_dbias_h, stride_dbias_m, stride_dbias_n,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slopes_b, stride_table_b,
    tiles_h, tiles_m, tiles_n, shared_b, shared_h, shared_m, shared_n, bias_rows, bias_keys, splits,
    batch, num_heads_q, num_heads_k, total_q, total_k, max_seqlen_k, pair_rows, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    BLOCK_B: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`tiles_*` count the bias's own tiles, `shared_*` the sequences, heads, row and key blocks that share one: one of
    the two is 1. Each of `splits` programs adds every `splits`-th of what is shared.
    """
    factor = scores.score_unit(factor, softcap, bias, slopes)
    program = tl.program_id(0)
    split, program = program % splits, program // splits
    own_n, program = program % tiles_n, program // tiles_n
    own_m, program = program % tiles_m, program // tiles_m
    own_h, own_b = program % tiles_h, program // tiles_h
    window = WindowSize(window_left, window_right, top_left)
    origin = 0 if threshold is None else -(j0 % 8)
    COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
    total = zero_sum(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), COMPENSATED)
    for turn in tl.range(split, shared_b * shared_h * shared_m * shared_n, splits):
        # One of each pair is 0: the bias's own index, or the turn's.
        tile_n, turn = own_n + turn % shared_n, turn // shared_n
        tile_m, turn = own_m + turn % shared_m, turn // shared_m
        head, b = own_h + turn % shared_h, (own_b + turn // shared_h).to(tl.int64)
        first_q, length_q = query_seqlen(b, cu_seqlens_q, batch, total_q)
        seqlen_k = key_seqlen(
            b, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, max_seqlen_k, page_table is not None
        )
        head_k = head // (num_heads_q // num_heads_k)
        kv = key_value_head(
            k + head_k * elements(stride_k_h, ALIGN), v + head_k * elements(stride_v_h, ALIGN), b, seqlen_k,
            page_table, num_pages, elements(stride_k_b, ALIGN), elements(stride_k_n, ALIGN),
            elements(stride_v_b, ALIGN), elements(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        first_key = origin + tile_n * BLOCK_N
        exists = row < length_q
        shift = seqlen_k.seqlen - length_q + diagonal
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
            shift,
            q.dtype.element_ty != tl.float32,
        )
        dropout = None
        if threshold is not None:
            key_0, key_1 = load_seed(seed)
            dropout = Dropout(threshold, key_0, key_1, (b + b0) * num_heads + h0 + head, i0, j0)

        token = (first_q + row)[:, None]
        q_rows = q + b * elements(stride_q_b, ALIGN) + head * elements(stride_q_h, ALIGN)
        dout_rows = dout + b * elements(stride_dout_b, ALIGN) + head * elements(stride_dout_h, ALIGN)
        row_stats_ptr = (
            row_stats + b * elements(stride_row_stats_b, 2) + head * elements(stride_row_stats_h, 2) + first_q
        )
        q_i = load_rows(q_rows + token * elements(stride_q_m, ALIGN), exists, D, D0, D1)  # [M, D]
        dout_i = load_rows(dout_rows + token * elements(stride_dout_m, ALIGN), exists, DV, DV0, DV1)  # [M, Dv]
        lse_i, delta_i = load_row_stats(row_stats_ptr + row, exists)  # [M]
        tile = key_tile(kv, first_key, PAGE_SIZE, BLOCK_N)
        keys = first_key + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(kv, tile, tile.exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        v_j = load_v(kv, tile, tile.exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]
        padded = leftpad_k is not None or threshold is not None
        bounds = key_bounds(window, row[:, None], shift, kv.range, padded)
        ds = score_gradient(
            q_i, k_j, dout_i, v_j, lse_i[:, None], delta_i[:, None], row[:, None], keys, first_key, tile.exists,
            features, bounds, dropout, factor, keep_scale, True, D1, DV1, PAGE_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        total = add(total, tl.where(exists[:, None], ds.t, 0.0), COMPENSATED)

    found = dbias + split * elements(stride_dbias_split, 1) + own_b * elements(stride_dbias_b, 1)
    found += own_h * elements(stride_dbias_h, 1)
    rows = own_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = origin + own_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if stride_dbias_m is None and stride_dbias_n is None:
        tl.store(found, tl.sum(total.total))
    elif stride_dbias_m is None:
        tl.store(
            found + keys * elements(stride_dbias_n, 1), tl.sum(total.total, 0), mask=(keys >= 0) & (keys < bias_keys)
        )
    elif stride_dbias_n is None:
        tl.store(found + rows * elements(stride_dbias_m, 1), tl.sum(total.total, 1), mask=rows < bias_rows)
    else:
        at = rows[:, None] * elements(stride_dbias_m, 1) + keys[None, :] * elements(stride_dbias_n, 1)
        inside = (rows[:, None] < bias_rows) & (keys[None, :] >= 0) & (keys[None, :] < bias_keys)
        tl.store(found + at, total.total, mask=inside)
