"""The forward pass with tangents: one program for each block of rows computes `out`, `lse` and their tangents.

A row's tangents are `dlse = sum p ds` and `dout = sum p (dv + ds v) - dlse out`, with weights `p` that add up to 1. The
online softmax keeps `sum p ds` next to `l`, and a second accumulator next to that of `out`; all are rescaled alike.
Products of tensors that stand still are compiled away. As in `forward`, `SPLITS` programs can share the keys of a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores, softmax
from .combine import is_last_split
from .combine_tangents import TangentPartials, combine_splits
from .forward import split_of
from .kernel import Pointer, kernel
from .keys import key_value_head, load_k, load_pages, load_v, tile_in_pages
from .masking import block_list, first_visit, key_blocks, key_bounds, mask_fill, nth_visit, num_visits
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import Sum, Sums, add_product, add_scaled, inner_products, scaled, zeros
from .prologue import batch_index, prologue
from .rng import keep_mask
from .rows import Chunks, elements, head_pointer, load_rows, store_rows
from .score_tangent import FeatureTangents, score_tangent
from .sequences import query_tile
from .softmax import INFINITY, RowState


class TangentState(NamedTuple):
    rows: RowState
    u: Sum  # [M] sum of exp2(t * factor - m * unit) * ds
    acc: Sums  # [M, Dv] sum of exp2(t * factor - m * unit) * (dv + ds * v)


@kernel
def tangents_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, dq: QueryTensor, dk: KeyTensor, dv: KeyTensor,
    dout: QueryTensor, lse: RowTensor, residual: Pointer, dlse: Pointer, partials: TangentPartials,
    moving: FeatureTangents, params: Params, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]`, `lse [B, H, Sq]` with its residual of natural scores, and their tangents, or packed."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    NATURAL: tl.constexpr = CONFIG.NATURAL
    SPLITS: tl.constexpr = CONFIG.SPLITS
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    lengths = params.lengths
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    work = query_tile(lengths, program, lengths.num_heads_q, 1, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B))
    if work.start < work.seqlen:
        row = work.start + tl.arange(0, BLOCK_M)
        exists = row < work.seqlen
        head_k = work.head // (lengths.num_heads_q // lengths.num_heads_k)
        b = batch_index(params, work)
        token = work.offset + row
        q_rows = head_pointer(q, b, work.head, ALIGN) + token * elements(q.stride_m, ALIGN)
        q_i = load_rows(q_rows[:, None], exists, D)  # [M, D]
        dq_i = q_i
        if dq.data is not None:
            dq_rows = head_pointer(dq, b, work.head, ALIGN) + token * elements(dq.stride_m, ALIGN)
            dq_i = load_rows(dq_rows[:, None], exists, D)
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, work.head, head_k, CONFIG)
        dkv = key_value_head(
            dk if dk.data is not None else k, dv if dv.data is not None else v, lengths, b, head_k, kv.seqlen, CONFIG
        )
        dslope = 0.0
        if moving.dslopes.data is not None:
            dslope = scores.load_slope(moving.dslopes, b, work.head, lengths.batch)

        last = tl.minimum(work.start + BLOCK_M - 1, work.seqlen - 1)
        blocks = key_blocks(params, work.start, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, CONFIG.BLOCK_N)
        listed = block_list(params, b, work.head, work.start // BLOCK_M)
        rows = row[:, None]
        bounds = key_bounds(params, rows, info.shift, kv.seqlen)
        with_sink = (split == 0) & (work.sequence < lengths.batch)
        state = init(params.scores.sinks, moving.dsinks, work.head, with_sink, info.factor, CONFIG)
        LOWER: tl.constexpr = (
            lengths.leftpad_k is not None
            or params.dropout.threshold is not None
            or params.window.window_left is not None
            or params.window.attention_chunk is not None
        )
        BOUNDED: tl.constexpr = CONFIG.PAGE_SIZE == 0 and LOWER
        # The masked blocks first, as in `forward`.
        state = inner_loop(
            state, blocks, listed, q_i, dq_i, rows, kv, dkv, dq, dk, dv, moving, dslope, params, info, bounds, True,
            BOUNDED, CONFIG,
        )  # fmt: skip
        state = inner_loop(
            state, blocks, listed, q_i, dq_i, rows, kv, dkv, dq, dk, dv, moving, dslope, params, info, bounds, False,
            BOUNDED, CONFIG,
        )  # fmt: skip

        weight, row_lse, row_residual = softmax.finalize(state.rows, info.factor, COMPENSATED, NATURAL)
        row_dlse = state.u.total * weight
        if params.dropout.threshold is not None:
            weight *= params.dropout.keep_scale
        out_i = scaled(state.rows.acc, weight[:, None], DV)
        lse_row = b * elements(lse.stride_b, 1) + work.head * elements(lse.stride_h, 1) + token  # [M]
        if SPLITS == 1:
            out_rows = head_pointer(out, b, work.head, ALIGN) + token * elements(out.stride_m, ALIGN)
            dout_rows = head_pointer(dout, b, work.head, ALIGN) + token * elements(dout.stride_m, ALIGN)
            store_rows(out_rows[:, None], out_i, exists, DV)
            store_rows(dout_rows[:, None], along_row(state.acc, weight, row_dlse, out_i, DV), exists, DV)
            tl.store(lse.data + lse_row, row_lse, mask=exists)
            tl.store(dlse + lse_row, row_dlse, mask=exists)
            if NATURAL:
                tl.store(residual + lse_row, row_residual, mask=exists)
        else:
            partial_row = split * elements(partials.stride_split, 1) + lse_row
            width_row = partial_row[:, None] * DV.WIDTH
            store_rows(partials.partial_out + width_row, out_i, exists, DV)
            store_rows(partials.partial_dout + width_row, scaled(state.acc, weight[:, None], DV), exists, DV)
            tl.store(partials.partial_lse + partial_row, row_lse, mask=exists)
            tl.store(partials.partial_dlse + partial_row, row_dlse, mask=exists)
            if NATURAL:
                tl.store(partials.partial_residual + partial_row, row_residual, mask=exists)
            if is_last_split(partials.semaphores + program, SPLITS):
                combine_splits(partials, out, dout, lse, dlse, residual, b, work, CONFIG)


@triton.jit
def init(sinks, dsinks, head, with_sink, factor, CONFIG: tl.constexpr):
    """The state before the first key. A sink is a key without a value, whose score may move."""
    M: tl.constexpr = CONFIG.BLOCK_M
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    acc = zeros(M, DV, COMPENSATED)
    heads = head + tl.zeros([M], tl.int32)
    rows = softmax.init(sinks, heads, with_sink, factor, acc, M, COMPENSATED, CONFIG.NATURAL)
    u = tl.zeros([M], tl.float32)
    if dsinks is not None:
        dsink = tl.load(dsinks + head).to(tl.float32)
        u = tl.where(rows.l.total == 0, 0.0, rows.l.total * dsink)
    return TangentState(rows, Sum(u, tl.zeros([M], tl.float32) if COMPENSATED else 0.0), zeros(M, DV, COMPENSATED))


@triton.jit
def along_row(acc, weight, dlse, out, D: tl.constexpr):
    """The tangent of `out`, from the sum over keys."""
    a = acc.a * weight[:, None] - dlse[:, None] * out.a
    if D.CHUNK_1 == 0:
        return Chunks(a, out.b)
    else:
        return Chunks(a, acc.b * weight[:, None] - dlse[:, None] * out.b)


@triton.jit
def inner_loop(
    state, blocks, listed, q_i, dq_i, rows, kv, dkv, dq, dk, dv, moving, dslope, params, info, bounds,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Update the rows' state with the blocks that need masks, or with those that do not."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    # A pair that has no weight adds nothing, whatever its tangent is: not 0 * NaN of a key that is hidden.
    SELECT: tl.constexpr = (
        MASKED
        or CONFIG.NATURAL
        or CONFIG.PAGE_SIZE > 0
        or params.scores.mask.data is not None
        or params.scores.mask_mod is not None
    )
    first = first_visit(listed, params, MASKED)
    pages = 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, nth_visit(blocks, first, 0, params, MASKED, BLOCK_N), CONFIG)
    for n in range(num_visits(blocks, listed, params, MASKED, BLOCK_N)):
        start_n = nth_visit(blocks, first, n, params, MASKED, BLOCK_N)
        tile = tile_in_pages(kv, start_n, pages, CONFIG)
        if CONFIG.PAGE_SIZE > 0:
            pages = load_pages(kv, nth_visit(blocks, first, n + 1, params, MASKED, BLOCK_N), CONFIG)
        exists = tile.exists if MASKED or CONFIG.PAGE_SIZE > 0 else None
        k_j = load_k(kv, tile, exists, CONFIG)  # [N, D]
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        keys_exist = None if exists is None else exists[None, :]
        qk = inner_products(q_i, k_j, D, CONFIG)
        dqk = 0.0
        if dq.data is not None:
            dqk = inner_products(dq_i, k_j, D, CONFIG)
        if dk.data is not None:
            dqk += inner_products(q_i, load_k(dkv, tile, exists, CONFIG), D, CONFIG)
        s = scores.forward(qk, params, info, rows, keys, keys_exist, COMPENSATED)  # [M, N]
        t = mask_fill(s.t, -INFINITY, bounds, params, info, rows, keys, keys_exist, MASKED, BOUNDED)
        m, alpha, p = softmax.update(state.rows, t, info.factor, COMPENSATED, CONFIG.NATURAL)
        l = softmax.add_row_sums(state.rows, alpha, p, COMPENSATED)  # noqa: E741
        u, pds = state.u, p
        if CONFIG.SCORES_MOVE:
            pds = p * score_tangent(dqk, s, moving, dslope, params, info, rows, keys, keys_exist, CONFIG)
            if SELECT:
                pds = tl.where(p == 0.0, 0.0, pds)
            u = add_scaled(u, alpha, tl.sum(pds, 1), COMPENSATED)
        elif moving.dsinks is not None:
            u = add_scaled(u, alpha, tl.zeros_like(alpha), COMPENSATED)
        if params.dropout.threshold is not None:
            keep = keep_mask(params.dropout, info.stream, rows, start_n, BLOCK_N)
            p = tl.where(keep, p, 0.0)
            pds = tl.where(keep, pds, 0.0)
        v_j = load_v(kv, tile, exists, CONFIG)  # [N, Dv]
        acc = add_product(state.rows.acc, alpha[:, None], p, v_j, DV, CONFIG)
        moved = state.acc
        if dv.data is not None:
            moved = add_product(moved, alpha[:, None], p, load_v(dkv, tile, exists, CONFIG), DV, CONFIG)
            if CONFIG.SCORES_MOVE:
                moved = add_product(moved, None, pds, v_j, DV, CONFIG)
        elif CONFIG.SCORES_MOVE:
            moved = add_product(moved, alpha[:, None], pds, v_j, DV, CONFIG)
        state = TangentState(RowState(m, l, acc), u, moved)
    return state
