"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1): one program for each block of rows.

The same kernel decodes: the query heads of a group become rows of one tile (`PACK_GQA` of them), and a program
takes one of `SPLITS` parts of the keys; the last part that is done merges what they found (`combine`).
"""

import triton
import triton.language as tl

from . import combine, scores, softmax
from .masking import BlockInfo, WindowSize, all_masked, key_blocks, key_bounds, nth_block, num_blocks, visible_keys
from .products import add_product, inner_products, scaled, zeros
from .rng import Dropout, keep_mask, load_seed
from .scores import Features, PairTensor, load_slope
from .softmax import INFINITY, RowState
from .tiles import (
    elements,
    kernel,
    key_seqlen,
    key_tile,
    key_value_head,
    load_k,
    load_rows,
    load_v,
    store_rows,
    work_tile,
)


@kernel
def forward_kernel(
    q, k, v, out, lse, partial_out, partial_lse, semaphores, mask, bias, slopes, sinks, seed,
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, leftpad_k,
    stride_q_b, stride_q_h, stride_q_m, stride_k_b, stride_k_h, stride_k_n, stride_v_b, stride_v_h, stride_v_n,
    stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h, stride_split,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slopes_b, stride_table_b,
    num_tiles, batch, num_heads_q, num_heads_k, total_q, total_k, max_seqlen_k, pair_rows, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PACK_GQA: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_B: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Strides of q, k, v and out come in units of ALIGN elements, so that the compiler knows how they are aligned.
    `total_q`, `total_k` are tokens, or positions of a dense sequence. `factor` makes base-2 logarithms of scores,
    `multiplier` makes scores of products.
    """
    factor = scores.score_unit(factor, softcap, bias, slopes)
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    # Heads in one tile are a group: there are as many tiles beside each other as key heads, and nothing to divide by.
    heads = num_heads_k if PACK_GQA > 1 else num_heads_q
    work = work_tile(program, num_tiles, heads, cu_seqlens_q, batch, total_q, 0, PACK_GQA, BLOCK_M, BLOCK_B)
    if work.start < work.seqlen * PACK_GQA:
        row = work.start + tl.arange(0, BLOCK_M)
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [M]
        exists = position < work.seqlen
        head_k = work.head if PACK_GQA > 1 else work.head // (num_heads_q // num_heads_k)
        b = tl.where(work.sequence < batch, work.sequence, 0).to(tl.int64)

        token = work.offset + position
        q_rows = (
            q
            + b * elements(stride_q_b, ALIGN)
            + head * elements(stride_q_h, ALIGN)
            + token * elements(stride_q_m, ALIGN)
        )
        q_i = load_rows(q_rows[:, None], exists, D, D0, D1)  # [M, D]

        seqlen_k = key_seqlen(
            work.sequence, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, max_seqlen_k, page_table is not None
        )
        kv = key_value_head(
            k + head_k * elements(stride_k_h, ALIGN), v + head_k * elements(stride_v_h, ALIGN), b, seqlen_k,
            page_table, num_pages, elements(stride_k_b, ALIGN), elements(stride_k_n, ALIGN),
            elements(stride_v_b, ALIGN), elements(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        shift = seqlen_k.seqlen - work.seqlen + diagonal
        column = head[:, None]  # [M, 1]
        slope = None
        if slopes is not None:
            slope = load_slope(slopes, b, column, stride_slopes_b)
        features = Features(
            multiplier,
            softcap,
            PairTensor(mask, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, pair_rows),
            PairTensor(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, pair_rows),
            slope,
            b,
            column,
            shift,
            q.dtype.element_ty != tl.float32,
        )
        window = WindowSize(window_left, window_right, top_left)
        dropout = None
        if threshold is not None:
            key_0, key_1 = load_seed(seed)
            dropout = Dropout(threshold, key_0, key_1, (b + b0) * num_heads + h0 + column, i0, j0)

        last = tl.minimum((work.start + BLOCK_M - 1) // PACK_GQA, work.seqlen - 1)
        origin = 0 if threshold is None else -(j0 % 8)
        blocks = key_blocks(window, work.start // PACK_GQA, last, shift, kv.range.begin, kv.range.end, origin, BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, BLOCK_N)

        rows = position[:, None]
        padded: tl.constexpr = leftpad_k is not None or threshold is not None
        bounds = key_bounds(window, rows, shift, kv.range, padded)
        with_sink = (split == 0) & (work.sequence < batch)
        COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
        unit = softmax.row_max_unit(factor, COMPENSATED)
        acc = zeros(BLOCK_M, DV0, DV1, COMPENSATED)
        state = softmax.init(sinks, head, unit, with_sink, acc, BLOCK_M, COMPENSATED)
        if PACK_GQA > 1 or (SPLITS > 1 and BLOCK_M < 64):
            # Few blocks, and reading them is all the work: one loop has to wait for its first block once.
            state = inner_loop(
                state, all_masked(blocks), q_i, kv, features, bounds, dropout, rows, factor, unit, True,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, PAGE_SIZE == 0, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            # Bounds hold what exists. Where they are upper ones only, ptxas compares while it waits for scores, into
            # bits, with all keys in registers: 154 of a thread at head_dim 64, and three programs on a Hopper core.
            # Asked once more what exists, it compares afterwards: 126, and four.
            bounded: tl.constexpr = PAGE_SIZE == 0 and (padded or window_left is not None)
            # The masked blocks first: then the compiler keeps the matrix products of the long loop asynchronous.
            state = inner_loop(
                state, blocks, q_i, kv, features, bounds, dropout, rows, factor, unit, True,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, bounded, BLOCK_N, PRECISION,
            )  # fmt: skip
            state = inner_loop(
                state, blocks, q_i, kv, features, bounds, dropout, rows, factor, unit, False,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, bounded, BLOCK_N, PRECISION,
            )  # fmt: skip

        weight, row_lse = softmax.finalize(state, unit)
        if threshold is not None:
            weight *= keep_scale
        at = b * elements(stride_lse_b, 1) + head * elements(stride_lse_h, 1) + token  # [M]
        out_rows = out + b * elements(stride_out_b, ALIGN) + head * elements(stride_out_h, ALIGN)
        out_rows += token * elements(stride_out_m, ALIGN)
        found = scaled(state.acc, weight[:, None], DV1)
        if SPLITS == 1:
            store_rows(out_rows[:, None], found, exists, DV, DV0, DV1)
            tl.store(lse + at, row_lse, mask=exists)
        else:
            part = split * elements(stride_split, 1) + at
            store_rows(partial_out + part[:, None] * DV, found, exists, DV, DV0, DV1)
            tl.store(partial_lse + part, row_lse, mask=exists)
            if combine.is_last_split(semaphores + program, SPLITS):
                out_b = out + b * elements(stride_out_b, ALIGN)
                lse_b = b * elements(stride_lse_b, 1) + work.offset
                combine.combine_splits(
                    partial_out, partial_lse, out_b, lse, work, lse_b, elements(stride_out_h, ALIGN),
                    elements(stride_out_m, ALIGN), elements(stride_lse_h, 1), elements(stride_split, 1),
                    PACK_GQA, DV, WIDTH, SPLITS, BLOCK_M,
                )  # fmt: skip


@triton.jit
def inner_loop(
    state, blocks, q_i, kv, features, bounds, dropout, rows, factor, unit, MASKED: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RANGE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows' state after the blocks that need masks, or after those that do not."""
    for n in range(num_blocks(blocks, MASKED, BLOCK_N)):
        start_n = nth_block(blocks, n, MASKED, BLOCK_N)
        tile = key_tile(kv, start_n, PAGE_SIZE, BLOCK_N)
        exists = tile.exists if MASKED or PAGE_SIZE > 0 else None
        k_j = load_k(kv, tile, exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        inside = None if exists is None else exists[None, :]
        s = scores.forward(inner_products(q_i, k_j, D1, PRECISION), features, rows, keys, inside)  # [M, N]
        visible = visible_keys(bounds, keys, inside, RANGE) if MASKED else inside
        if features.mask.data is not None:
            in_mask = scores.load_mask(features, rows, keys, inside)
            visible = in_mask if visible is None else visible & in_mask
        t = s.t if visible is None else tl.where(visible, s.t, -INFINITY)
        m, alpha, p = softmax.update(state, t, factor, unit, q_i.a.dtype == tl.float32)
        l = softmax.add_row_sums(state, alpha, p, q_i.a.dtype == tl.float32)  # noqa: E741
        if dropout is not None:
            p = tl.where(keep_mask(dropout, rows, start_n, BLOCK_N), p, 0.0)
        v_j = load_v(kv, tile, exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]
        acc = add_product(state.acc, alpha[:, None], p, v_j, DV1, PRECISION)
        state = RowState(m, l, acc)
    return state


@triton.jit
def split_of(blocks, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """One of `SPLITS` equal runs of blocks."""
    count = (blocks.hi - blocks.lo) // BLOCK_N
    each = tl.cdiv(count, SPLITS) * BLOCK_N
    lo = tl.minimum(blocks.lo + split * each, blocks.hi)
    hi = tl.minimum(lo + each, blocks.hi)
    return BlockInfo(
        lo, tl.minimum(tl.maximum(blocks.full_lo, lo), hi), tl.minimum(tl.maximum(blocks.full_hi, lo), hi), hi
    )
