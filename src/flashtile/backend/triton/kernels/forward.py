"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1): one program for each block of rows.

The same kernel decodes: the query heads that share a key head become rows of one tile (`PACK` of them), and a program
takes one of `SPLITS` parts of the keys; the last part that is done merges what they found (`combine`).
"""

import triton
import triton.language as tl

from . import combine, scores, softmax
from .masking import Blocks, Window, all_masked, key_blocks, keys_seen, nth_block, num_blocks, visible_keys
from .products import add_product, inner_products, scaled, zeros
from .rng import Dropout, kept, words_of
from .scores import Features, Pairs, slope_of
from .softmax import INFINITY, RowState
from .tiles import block_of, kernel, key_side, key_tile, keys_of, load_k, load_rows, load_v, store_rows, wide


@kernel
def forward_kernel(
    q, k, v, out, lse, partial_out, partial_lse, arrived, mask, bias, slopes, sinks, seed,
    cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, leftpad_k,
    stride_q_b, stride_q_h, stride_q_m, stride_k_b, stride_k_h, stride_k_n, stride_v_b, stride_v_h, stride_v_n,
    stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h, stride_part,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_slopes_b, stride_table_b,
    num_tiles, batch, num_heads_q, num_heads_k, total_q, total_k, longest_k, rows_of_pairs, num_pages,
    window_left, window_right, top_left, diagonal, i0, j0, b0, h0, num_heads, threshold, keep_scale,
    factor, multiplier, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PACK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, SEQUENCES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Strides of q, k, v and out come in units of ALIGN elements, so that the compiler knows how they are aligned.
    `total_q`, `total_k` are tokens, or positions of a dense sequence. `factor` makes base-2 logarithms of scores,
    `multiplier` makes scores of products.
    """
    factor = scores.unit(factor, softcap, bias, slopes)
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    # Heads in one tile are a group: there are as many tiles beside each other as key heads, and nothing to divide by.
    heads = num_heads_k if PACK > 1 else num_heads_q
    span = block_of(program, num_tiles, heads, cu_seqlens_q, batch, total_q, 0, PACK, BLOCK_M, SEQUENCES)
    if span.start < span.length * PACK:
        row = span.start + tl.arange(0, BLOCK_M)
        position, head = row // PACK, span.head * PACK + row % PACK  # [M]
        exists = position < span.length
        head_k = span.head if PACK > 1 else span.head // (num_heads_q // num_heads_k)
        b = tl.where(span.sequence < batch, span.sequence, 0).to(tl.int64)

        token = span.first + position
        q_rows = q + b * wide(stride_q_b, ALIGN) + head * wide(stride_q_h, ALIGN) + token * wide(stride_q_m, ALIGN)
        q_i = load_rows(q_rows[:, None], exists, D, D0, D1)  # [M, D]

        key_range = keys_of(
            span.sequence, cu_seqlens_k, seqused_k, leftpad_k, batch, total_k, longest_k, page_table is not None
        )
        side = key_side(
            k + head_k * wide(stride_k_h, ALIGN), v + head_k * wide(stride_v_h, ALIGN), b, key_range,
            page_table, num_pages, wide(stride_k_b, ALIGN), wide(stride_k_n, ALIGN),
            wide(stride_v_b, ALIGN), wide(stride_v_n, ALIGN), stride_table_b, PAGE_SIZE,
        )  # fmt: skip
        shift = key_range.length - span.length + diagonal
        column = head[:, None]  # [M, 1]
        slope = None
        if slopes is not None:
            slope = slope_of(slopes, b, column, stride_slopes_b)
        features = Features(
            multiplier,
            softcap,
            Pairs(mask, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, rows_of_pairs),
            Pairs(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, rows_of_pairs),
            slope,
            b,
            column,
            shift,
            q.dtype.element_ty != tl.float32,
        )
        window = Window(window_left, window_right, top_left)
        dropout = None
        if threshold is not None:
            key_0, key_1 = words_of(seed)
            dropout = Dropout(threshold, key_0, key_1, (b + b0) * num_heads + h0 + column, i0, j0)

        last = tl.minimum((span.start + BLOCK_M - 1) // PACK, span.length - 1)
        origin = 0 if threshold is None else -(j0 % 8)
        blocks = key_blocks(window, span.start // PACK, last, shift, side.range.begin, side.range.end, origin, BLOCK_N)
        if SPLITS > 1:
            blocks = part_of(blocks, split, SPLITS, BLOCK_N)

        rows = position[:, None]
        padded: tl.constexpr = leftpad_k is not None or threshold is not None
        bounds = keys_seen(window, rows, shift, side.range, padded)
        with_sink = (split == 0) & (span.sequence < batch)
        COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
        unit = softmax.unit_of_m(factor, COMPENSATED)
        acc = zeros(BLOCK_M, DV0, DV1, COMPENSATED)
        state = softmax.start(sinks, head, unit, with_sink, acc, BLOCK_M, COMPENSATED)
        if PACK > 1 or (SPLITS > 1 and BLOCK_M < 64):
            # Few blocks, and reading them is all the work: one loop has to wait for its first block once.
            state = attend(
                state, all_masked(blocks), q_i, side, features, bounds, dropout, rows, factor, unit, True,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, PAGE_SIZE == 0, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            # Bounds hold what exists. Where they are upper ones only, ptxas compares while it waits for scores, into
            # bits, with all keys in registers: 154 of a thread at head_dim 64, and three programs on a Hopper core.
            # Asked once more what exists, it compares afterwards: 126, and four.
            bounded: tl.constexpr = PAGE_SIZE == 0 and (padded or window_left is not None)
            # The masked blocks first: then the compiler keeps the matrix products of the long loop asynchronous.
            state = attend(
                state, blocks, q_i, side, features, bounds, dropout, rows, factor, unit, True,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, bounded, BLOCK_N, PRECISION,
            )  # fmt: skip
            state = attend(
                state, blocks, q_i, side, features, bounds, dropout, rows, factor, unit, False,
                D, D0, D1, DV, DV0, DV1, PAGE_SIZE, bounded, BLOCK_N, PRECISION,
            )  # fmt: skip

        weight, row_lse = softmax.finish(state, unit)
        if threshold is not None:
            weight *= keep_scale
        at = b * wide(stride_lse_b, 1) + head * wide(stride_lse_h, 1) + token  # [M]
        out_rows = out + b * wide(stride_out_b, ALIGN) + head * wide(stride_out_h, ALIGN)
        out_rows += token * wide(stride_out_m, ALIGN)
        found = scaled(state.acc, weight[:, None], DV1)
        if SPLITS == 1:
            store_rows(out_rows[:, None], found, exists, DV, DV0, DV1)
            tl.store(lse + at, row_lse, mask=exists)
        else:
            part = split * wide(stride_part, 1) + at
            store_rows(partial_out + part[:, None] * DV, found, exists, DV, DV0, DV1)
            tl.store(partial_lse + part, row_lse, mask=exists)
            if combine.is_last(arrived + program, SPLITS):
                out_b = out + b * wide(stride_out_b, ALIGN)
                lse_b = b * wide(stride_lse_b, 1) + span.first
                combine.merge(
                    partial_out, partial_lse, out_b, lse, span, lse_b, wide(stride_out_h, ALIGN),
                    wide(stride_out_m, ALIGN), wide(stride_lse_h, 1), wide(stride_part, 1),
                    PACK, DV, WIDTH, SPLITS, BLOCK_M,
                )  # fmt: skip


@triton.jit
def attend(
    state, blocks, q_i, side, features, bounds, dropout, rows, factor, unit, MASKED: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RANGE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows' state after the blocks that need masks, or after those that do not."""
    for n in range(num_blocks(blocks, MASKED, BLOCK_N)):
        start_n = nth_block(blocks, n, MASKED, BLOCK_N)
        tile = key_tile(side, start_n, PAGE_SIZE, BLOCK_N)
        exists = tile.exists if MASKED or PAGE_SIZE > 0 else None
        k_j = load_k(side, tile, exists, PAGE_SIZE, BLOCK_N, D, D0, D1)  # [N, D]
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        inside = None if exists is None else exists[None, :]
        s = scores.forward(inner_products(q_i, k_j, D1, PRECISION), features, rows, keys, inside)  # [M, N]
        visible = visible_keys(bounds, keys, inside, RANGE) if MASKED else inside
        if features.mask.data is not None:
            in_mask = scores.shown(features, rows, keys, inside)
            visible = in_mask if visible is None else visible & in_mask
        t = s.t if visible is None else tl.where(visible, s.t, -INFINITY)
        m, alpha, p = softmax.update(state, t, factor, unit, q_i.a.dtype == tl.float32)
        l = softmax.add_row_sums(state, alpha, p, q_i.a.dtype == tl.float32)  # noqa: E741
        if dropout is not None:
            p = tl.where(kept(dropout, rows, start_n, BLOCK_N), p, 0.0)
        v_j = load_v(side, tile, exists, PAGE_SIZE, BLOCK_N, DV, DV0, DV1)  # [N, Dv]
        acc = add_product(state.acc, alpha[:, None], p, v_j, DV1, PRECISION)
        state = RowState(m, l, acc)
    return state


@triton.jit
def part_of(blocks, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """One of `SPLITS` equal runs of blocks."""
    count = (blocks.hi - blocks.lo) // BLOCK_N
    each = tl.cdiv(count, SPLITS) * BLOCK_N
    lo = tl.minimum(blocks.lo + split * each, blocks.hi)
    hi = tl.minimum(lo + each, blocks.hi)
    return Blocks(
        lo, tl.minimum(tl.maximum(blocks.full_lo, lo), hi), tl.minimum(tl.maximum(blocks.full_hi, lo), hi), hi
    )
