"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1): one program for each block of rows.

The same kernel decodes: the `PACK_GQA` query heads of a group are rows of one tile, and `SPLITS` programs share its
keys. The last one to finish combines their results (`combine`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import combine, few_rows, scores, softmax
from .eight_bit import (
    bf16_remainder,
    descales_of_head,
    number_rows,
    row_scales,
    scaled_by_key,
    scaled_rows,
    scaled_scores,
    scales_of_tile,
)
from .kernel import Pointer, Scalar, kernel
from .keys import load_k, load_pages, load_v, tile_in_pages
from .masking import (
    BlockInfo,
    all_masked,
    block_list,
    first_visit,
    key_blocks,
    key_bounds,
    mask_edges,
    mask_fill,
    nth_visit,
    num_visits,
)
from .parameters import KeyTensor, Params, QueryTensor, RowScaleTensor, RowTensor, ScaleTensor
from .products import Sum, Sums, add_product, inner_products, scaled, zeros
from .prologue import batch_index, prologue
from .rng import keep_mask
from .rows import Chunks, chunked, elements, head_pointer, interleaved, load_rows, store_rows
from .sequences import query_tile
from .softmax import INFINITY, RowState


class Partials(NamedTuple):
    """Results of the splits, with the rows of lse: `[SPLITS, B, H, Sq]`, or `[SPLITS, H, T]` if packed."""

    partial_out: Pointer  # and Dv in each row
    partial_lse: Pointer
    partial_residual: Pointer
    semaphores: Pointer  # one a tile, 0 before and after
    stride_split: Scalar


@kernel
def forward_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, partials: Partials,
    params: Params, q_descale: RowScaleTensor, k_descale: ScaleTensor, v_descale: ScaleTensor, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]`, `lse [B, H, Sq]` and its residual of natural scores, or packed."""
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
    ALIGN: tl.constexpr = CONFIG.ALIGN
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    SPLITS: tl.constexpr = CONFIG.SPLITS
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    NATURAL: tl.constexpr = CONFIG.NATURAL
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    lengths = params.lengths
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    # With packed heads, tiles count key heads: no division by the group size.
    heads = lengths.num_heads_k if PACK_GQA > 1 else lengths.num_heads_q
    TRANSPOSED: tl.constexpr = CONFIG.TRANSPOSED
    decodes: tl.constexpr = lengths.page_table.data is not None
    work = query_tile(lengths, program, heads, PACK_GQA, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B), SHORT=decodes)
    if work.start < work.seqlen * PACK_GQA:
        row = work.start + tl.arange(0, BLOCK_M)
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [M]
        exists = position < work.seqlen
        head_k = work.head
        if PACK_GQA == 1 and not TRANSPOSED and (not decodes or lengths.num_heads_q != lengths.num_heads_k):
            head_k = work.head // (lengths.num_heads_q // lengths.num_heads_k)
        b = batch_index(params, work)
        token = work.offset + position
        q_rows = head_pointer(q, b, head, ALIGN) + token * elements(q.stride_m, ALIGN)
        q_i = chunked(load_rows(q_rows[:, None], exists, D), D)  # [M, D]
        head_rows = head[None, :] if TRANSPOSED else head[:, None]
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head_rows, head_k, CONFIG)

        of_rows = row_scales(q_descale, lengths, b, head, head_k, token, exists)
        descales = descales_of_head(k_descale, v_descale, of_rows, lengths, b, head_k, kv.seqlen, CONFIG)
        last = tl.minimum((work.start + BLOCK_M - 1) // PACK_GQA, work.seqlen - 1)
        blocks = key_blocks(params, work.start // PACK_GQA, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, CONFIG.BLOCK_N)
        listed = block_list(params, b, work.head, work.start // BLOCK_M)
        rows = position[None, :] if TRANSPOSED else position[:, None]
        bounds = key_bounds(params, rows, info.shift, kv.seqlen)
        with_sink = (split == 0) & (work.sequence < lengths.batch)
        acc = few_rows.zeros(BLOCK_M, DV) if TRANSPOSED else zeros(BLOCK_M, DV, COMPENSATED)
        state = softmax.init(params.scores.sinks, head, with_sink, info.factor, acc, BLOCK_M, COMPENSATED, NATURAL)
        # Few blocks, and loading them is all the work: one loop waits for its first block once. Batch-invariant calls
        # visit blocks in order: which of them need masks depends on the tile's other rows.
        if TRANSPOSED:
            state = few_rows.inner_loop(state, blocks, q_i, rows, kv, descales, params, info, bounds, CONFIG)
        elif PACK_GQA > 1 or (SPLITS > 1 and BLOCK_M < 64) or CONFIG.BATCH_INVARIANT:
            IN_RANGE: tl.constexpr = CONFIG.PAGE_SIZE == 0
            state = inner_loop(
                state, all_masked(blocks), listed, q_i, rows, kv, descales, params, info, bounds, True, IN_RANGE,
                CONFIG, blocks,
            )  # fmt: skip
        else:
            # Bounds hold which keys exist. With upper bounds only, ptxas compares while it waits for scores, into bits,
            # with all keys in registers: 154 a thread at head_dim 64, three programs on a Hopper core. A second test of
            # existence makes it compare afterwards: 126 registers, four programs.
            LOWER: tl.constexpr = (
                lengths.leftpad_k is not None
                or params.dropout.threshold is not None
                or params.window.window_left is not None
                or params.window.attention_chunk is not None
            )
            BOUNDED: tl.constexpr = CONFIG.PAGE_SIZE == 0 and LOWER
            # The masked blocks first: then the compiler keeps the matrix products of the long loop asynchronous.
            if not CONFIG.EVEN:
                state = inner_loop(
                    state, blocks, listed, q_i, rows, kv, descales, params, info, bounds, True, BOUNDED, CONFIG
                )
            state = inner_loop(
                state, blocks, listed, q_i, rows, kv, descales, params, info, bounds, False, BOUNDED, CONFIG
            )

        weight, row_lse, row_residual = softmax.finalize(state, info.factor, COMPENSATED, NATURAL)
        if params.dropout.threshold is not None:
            weight *= params.dropout.keep_scale
        weight = scaled_rows(weight, state.l.total, descales.v, V_SCALES)
        lse_row = b * elements(lse.stride_b, 1) + head * elements(lse.stride_h, 1) + token  # [M]
        out_rows = head_pointer(out, b, head, ALIGN) + token * elements(out.stride_m, ALIGN)
        out_i = scaled(few_rows.transposed(state.acc, DV) if TRANSPOSED else state.acc, weight[:, None], DV)
        out_i = interleaved(out_i, DV)
        if SPLITS == 1:
            store_rows(out_rows[:, None], out_i, exists, DV)
            tl.store(lse.data + lse_row, row_lse, mask=exists)
            if NATURAL:
                tl.store(residual + lse_row, row_residual, mask=exists)
        else:
            partial_row = split * elements(partials.stride_split, 1) + lse_row
            store_rows(partials.partial_out + partial_row[:, None] * DV.WIDTH, out_i, exists, DV)
            tl.store(partials.partial_lse + partial_row, row_lse, mask=exists)
            if NATURAL:
                tl.store(partials.partial_residual + partial_row, row_residual, mask=exists)
            if combine.is_last_split(partials.semaphores + program, SPLITS):
                combine.combine_splits(partials, out, lse, residual, b, work, CONFIG)


@triton.jit
def inner_loop(
    state,
    blocks,
    listed,
    q_i,
    rows,
    kv,
    descales,
    params,
    info,
    bounds,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    CONFIG: tl.constexpr,
    edges=None,
):
    """Update the rows' state with the blocks that need masks, or with those that do not; with `edges`, with all blocks,
    which are given as masked ones.
    """
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    KEYS: tl.constexpr = q_i.a.dtype
    VALUES: tl.constexpr = KEYS if CONFIG.VALUES == "" else tl.float32 if CONFIG.VALUES == "fp32" else tl.bfloat16
    first = first_visit(listed, params, MASKED)
    # Pages are looked up a block ahead: loads of keys that depend on a load in the same step would have fewer stages.
    pages = 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, nth_visit(blocks, first, 0, params, MASKED, BLOCK_N), CONFIG)
    for n in range(num_visits(blocks, listed, params, MASKED, BLOCK_N)):
        start_n = nth_visit(blocks, first, n, params, MASKED, BLOCK_N)
        tile = tile_in_pages(kv, start_n, pages, CONFIG)
        if CONFIG.PAGE_SIZE > 0:
            pages = load_pages(kv, nth_visit(blocks, first, n + 1, params, MASKED, BLOCK_N), CONFIG)
        exists = tile.exists if MASKED or CONFIG.PAGE_SIZE > 0 else None
        k_j = number_rows(load_k(kv, tile, exists, CONFIG), KEYS, D, CONFIG)  # [N, D]
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        keys_exist = None if exists is None else exists[None, :]
        k_scale = scales_of_tile(descales.k, kv, tile, start_n, K_SCALES, CONFIG)
        qk = scaled_scores(inner_products(q_i, k_j, D, CONFIG), descales, k_scale, 0, CONFIG)
        s = scores.forward(qk, params, info, rows, keys, keys_exist, CONFIG.COMPENSATED)  # [M, N]
        if edges is None:
            t = mask_fill(s.t, -INFINITY, bounds, params, info, rows, keys, keys_exist, MASKED, BOUNDED)
        else:
            t = mask_edges(s.t, -INFINITY, bounds, edges, start_n, params, info, rows, keys, keys_exist, BOUNDED)
        m, alpha, p = softmax.update(state, t, info.factor, CONFIG.COMPENSATED, CONFIG.NATURAL)
        l = softmax.add_row_sums(state, alpha, p, CONFIG.COMPENSATED)  # noqa: E741
        if CONFIG.BATCH_INVARIANT and CONFIG.COMPENSATED:
            empty = tl.sum(p, 1) == 0.0
        if params.dropout.threshold is not None:
            p = tl.where(keep_mask(params.dropout, info.stream, rows, start_n, BLOCK_N), p, 0.0)
        if CONFIG.V_SCALES == "key":
            v_scale = scales_of_tile(descales.v, kv, tile, start_n, "key", CONFIG)
            p = scaled_by_key(p, v_scale, "key", 0)
        if CONFIG.LATENT:
            v_j = values_of(k_j, VALUES, DV)
        else:
            v_j = number_rows(load_v(kv, tile, exists, CONFIG), VALUES, DV, CONFIG)  # [N, Dv]
        acc = add_product(state.acc, alpha[:, None], p, v_j, DV, CONFIG)
        if CONFIG.VALUES == "bf16x2":
            acc = add_product(acc, None, bf16_remainder(p), v_j, DV, CONFIG)
        if CONFIG.BATCH_INVARIANT and CONFIG.COMPENSATED:
            l, acc = without_empty_rows(state, l, acc, empty, DV)  # noqa: E741
        state = RowState(m, l, acc)
    return state


@triton.jit
def values_of(k, dtype: tl.constexpr, DV: tl.constexpr):
    """Values `[N, Dv]` that are columns of the keys."""
    if DV.CHUNK_1 == 0:
        return Chunks(k.a.to(dtype), 0.0)
    else:
        return Chunks(k.a.to(dtype), k.b.to(dtype))


@triton.jit
def without_empty_rows(state, l, acc, empty, D: tl.constexpr):  # noqa: E741
    """Compensated sums after a block that is empty for some rows of the tile and not for others: adding 0 may still
    move a compensation to its sum.
    """
    old = state.l
    l = Sum(tl.where(empty, old.total, l.total), tl.where(empty, old.compensation, l.compensation))  # noqa: E741
    empty = empty[:, None]
    a = tl.where(empty, state.acc.a, acc.a)
    compensation_a = tl.where(empty, state.acc.compensation_a, acc.compensation_a)
    if D.CHUNK_1 == 0:
        return l, Sums(a, acc.b, compensation_a, acc.compensation_b)
    else:
        b = tl.where(empty, state.acc.b, acc.b)
        return l, Sums(a, b, compensation_a, tl.where(empty, state.acc.compensation_b, acc.compensation_b))


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
