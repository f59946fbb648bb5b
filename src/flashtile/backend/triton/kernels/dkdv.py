"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2) without atomics, in three kernels.

`preprocess_kernel` prepares two numbers a row. `dkdv_kernel` owns a block of keys and walks over the rows that see
it, `dq_kernel` (`backward_rows`) owns a block of rows and walks over its keys. Each recomputes the probabilities of a
tile: seven products instead of five, but every result has one writer, and the same call gives the same bits.
"""

import triton
import triton.language as tl

from . import scores
from .masking import WindowSize, nth_block, num_blocks, row_blocks, row_bounds, within
from .products import add_product, inner_products, scaled, zeros
from .rng import Dropout, keep_mask, load_seed
from .scores import Features, PairTensor, load_slope
from .softmax import INFINITY, LOG2E
from .tiles import (
    Chunks,
    HeadRows,
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
    row_pointers,
    store_rows,
    work_tile,
)


@kernel
def preprocess_kernel(
    out, dout, lse, dlse, row_stats,
    stride_out_b, stride_out_h, stride_out_m, stride_dout_b, stride_dout_h, stride_dout_m,
    stride_lse_b, stride_lse_h, stride_dlse_b, stride_dlse_h, stride_dlse_m, stride_row_stats_b, stride_row_stats_h,
    num_tiles, num_heads_q, total_q,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The two numbers of each row: lse as a base-2 logarithm, and `delta = sum(dout * out) - dlse`. A row that saw
    nothing gets infinity, so that its probabilities come out as 0, and 0.
    """
    program = tl.program_id(0)
    tile, head = program % num_tiles, program // num_tiles % num_heads_q
    b = (program // num_tiles // num_heads_q).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < total_q
    x = out + b * elements(stride_out_b, ALIGN) + head * elements(stride_out_h, ALIGN)
    dx = dout + b * elements(stride_dout_b, ALIGN) + head * elements(stride_dout_h, ALIGN)
    out_i = load_rows(x + row[:, None] * elements(stride_out_m, ALIGN), exists, DV, DV0, DV1)
    dout_i = load_rows(dx + row[:, None] * elements(stride_dout_m, ALIGN), exists, DV, DV0, DV1)
    delta = tl.sum(out_i.a.to(tl.float32) * dout_i.a.to(tl.float32), 1)
    if DV1 > 0:
        delta += tl.sum(out_i.b.to(tl.float32) * dout_i.b.to(tl.float32), 1)
    lse_i = tl.load(
        lse + b * elements(stride_lse_b, 1) + head * elements(stride_lse_h, 1) + row, mask=exists, other=-INFINITY
    )
    if dlse is not None:
        given = (
            dlse + b * elements(stride_dlse_b, 1) + head * elements(stride_dlse_h, 1) + row * elements(stride_dlse_m, 1)
        )
        delta -= tl.load(given, mask=exists, other=0.0).to(tl.float32)
    empty = lse_i == -INFINITY
    at = b * elements(stride_row_stats_b, 2) + head * elements(stride_row_stats_h, 2) + row
    tl.store(row_stats + 2 * at, tl.where(empty, INFINITY, lse_i * LOG2E), mask=exists)
    tl.store(row_stats + 2 * at + 1, tl.where(empty, 0.0, delta), mask=exists)


@kernel
def dkdv_kernel(
    q, k, v, dout, row_stats, dk, dv, mask, bias, slopes, seed,
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, leftpad_k,
    stride_q_b, stride_q_h, stride_q_m, stride_k_b, stride_k_h, stride_k_n, stride_v_b, stride_v_h, stride_v_n,
    stride_dout_b, stride_dout_h, stride_dout_m, stride_dk_b, stride_dk_h, stride_dk_n,
    stride_dv_b, stride_dv_h, stride_dv_n, stride_row_stats_b, stride_row_stats_h,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slopes_b, stride_table_b,
    num_tiles, batch, num_heads_q, num_heads_k, total_q, total_k, max_seqlen_k, pair_rows, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap, scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    BLOCK_B: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys. Tiles are transposed, `[N, M]`: probabilities are the left operand of both sums."""
    factor = scores.score_unit(factor, softcap, bias, slopes)
    origin = 0 if threshold is None else -(j0 % 8)
    work = work_tile(
        tl.program_id(0), num_tiles, num_heads_k, cu_seqlens_k, batch, total_k, origin, 1, BLOCK_N, BLOCK_B
    )
    if work.start < work.seqlen:
        b = tl.where(work.sequence < batch, work.sequence, 0).to(tl.int64)
        first_q, length_q = query_seqlen(work.sequence, cu_seqlens_q, batch, total_q)
        seqlen_k = key_seqlen(
            work.sequence, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, max_seqlen_k, page_table is not None
        )
        kv = key_value_head(
            k + work.head * elements(stride_k_h, ALIGN), v + work.head * elements(stride_v_h, ALIGN), b, seqlen_k,
            page_table, num_pages, elements(stride_k_b, ALIGN), elements(stride_k_n, ALIGN),
            elements(stride_v_b, ALIGN), elements(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        tile = key_tile(kv, work.start, PAGE_SIZE, BLOCK_N)
        k_j = load_k(kv, tile, tile.exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        v_j = load_v(kv, tile, tile.exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]

        shift = seqlen_k.seqlen - length_q + diagonal
        window = WindowSize(window_left, window_right, top_left)
        last = tl.minimum(work.start + BLOCK_N, kv.range.end) - 1
        rows_seen = tl.where(last >= work.start, length_q, 0)  # a block without keys is seen by no row
        blocks = row_blocks(window, work.start, last, shift, rows_seen, BLOCK_M)
        keys = work.start + tl.arange(0, BLOCK_N)[:, None]  # [N, 1]
        bounds = row_bounds(window, keys, shift, tile.exists[:, None], length_q)
        q_stride, dout_stride = elements(stride_q_m, ALIGN), elements(stride_dout_m, ALIGN)

        COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
        dk_j, dv_j = zeros(BLOCK_N, D0, D1, COMPENSATED), zeros(BLOCK_N, DV0, DV1, COMPENSATED)
        group = num_heads_q // num_heads_k
        for g in tl.range(0, group):
            head = work.head * group + g
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
            q_head = q + b * elements(stride_q_b, ALIGN) + head * elements(stride_q_h, ALIGN)
            dout_head = dout + b * elements(stride_dout_b, ALIGN) + head * elements(stride_dout_h, ALIGN)
            q_rows = HeadRows(q_head + first_q * q_stride, q_stride)
            dout_rows = HeadRows(dout_head + first_q * dout_stride, dout_stride)
            row_stats_ptr = (
                row_stats + b * elements(stride_row_stats_b, 2) + head * elements(stride_row_stats_h, 2) + first_q
            )
            dk_j, dv_j = inner_loop(
                dk_j, dv_j, blocks, k_j, v_j, q_rows, dout_rows, row_stats_ptr, length_q, keys, tile.exists, features,
                bounds, dropout, factor, keep_scale, True, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
            dk_j, dv_j = inner_loop(
                dk_j, dv_j, blocks, k_j, v_j, q_rows, dout_rows, row_stats_ptr, length_q, keys, tile.exists, features,
                bounds, dropout, factor, keep_scale, False, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip

        # Positions of this sequence that hold no key get 0, whatever the loop made of them.
        position = work.start + tl.arange(0, BLOCK_N)
        stored = (position >= 0) & (position < work.seqlen)
        holds = tile.exists[:, None]
        dv_scale = 1.0 if threshold is None else keep_scale
        dk_j, dv_j = scaled(dk_j, scale, D1), scaled(dv_j, dv_scale, DV1)
        token = (work.offset + position)[:, None]
        dk_rows = dk + b * elements(stride_dk_b, ALIGN) + work.head * elements(stride_dk_h, ALIGN)
        dv_rows = dv + b * elements(stride_dv_b, ALIGN) + work.head * elements(stride_dv_h, ALIGN)
        store_rows(dk_rows + token * elements(stride_dk_n, ALIGN), where(holds, dk_j, D1), stored, D, D0, D1)
        store_rows(dv_rows + token * elements(stride_dv_n, ALIGN), where(holds, dv_j, DV1), stored, DV, DV0, DV1)


@triton.jit
def inner_loop(
    dk_j, dv_j, blocks, k_j, v_j, q_rows, dout_rows, row_stats_ptr, length_q, keys, holds, features, bounds, dropout,
    factor, keep_scale, MASKED: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the blocks of rows give that need masks, or those that do not."""
    for n in range(num_blocks(blocks, MASKED, BLOCK_M)):
        start_m = nth_block(blocks, n, MASKED, BLOCK_M)
        row = start_m + tl.arange(0, BLOCK_M)
        exists = row < length_q if MASKED else None
        q_i = load_rows(row_pointers(q_rows, start_m, BLOCK_M), exists, D, D0, D1)  # [M, D]
        lse_i, delta_i = load_row_stats(row_stats_ptr + row, exists)  # [M]
        s = scores.forward(inner_products(k_j, q_i, D1, PRECISION), features, row[None, :], keys, holds[:, None])
        p = tl.exp2(s.t * factor - lse_i[None, :])  # [N, M]
        visible = None
        if MASKED:  # a row past the last one sees nothing: it would read another's bias, and 0 * NaN is NaN
            visible = within(bounds, row[None, :])
        if features.mask.data is not None:
            in_mask = scores.load_mask(features, row[None, :], keys, holds[:, None])
            visible = in_mask if visible is None else visible & in_mask
        if visible is not None:
            p = tl.where(visible, p, 0.0)
        dout_i = load_rows(row_pointers(dout_rows, start_m, BLOCK_M), exists, DV, DV0, DV1)  # [M, Dv]
        dp = inner_products(v_j, dout_i, DV1, PRECISION)  # [N, M]
        p_kept = p
        if dropout is not None:
            first_key = tl.min(keys)
            keep = tl.trans(keep_mask(dropout, row[:, None], first_key, BLOCK_N))
            p_kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        dv_j = add_product(dv_j, None, p_kept, dout_i, DV1, PRECISION)
        ds = scores.backward(p * (dp - delta_i[None, :]), s, features)
        if visible is not None:
            ds = tl.where(visible, ds, 0.0)  # not 0 * NaN, where a row's delta is NaN
        dk_j = add_product(dk_j, None, ds, q_i, D1, PRECISION)
    return dk_j, dv_j


@triton.jit
def where(condition, x, D1: tl.constexpr):
    """`x [N, D]` where `condition [N, 1]` holds, else 0."""
    if D1 == 0:
        return Chunks(tl.where(condition, x.a, 0.0), x.b)
    else:
        return Chunks(tl.where(condition, x.a, 0.0), tl.where(condition, x.b, 0.0))
