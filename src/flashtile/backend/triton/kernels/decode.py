"""Decoding whose sums depend on a sequence's own keys alone: equal parts of its keys from the first one on, merged in
their order (He et al., "Defeating Nondeterminism in LLM Inference", 2025).

The query heads of a group are the rows of a tile, as in `forward`. Its parts are dealt to any number of programs, and
the last one to finish merges all of them: who computes a part changes no bit.
"""

import triton
import triton.language as tl

from . import few_rows, scores, softmax
from .combine import is_last_split
from .eight_bit import (
    bf16_remainder,
    descales_of_head,
    number_rows,
    scaled_by_key,
    scaled_rows,
    scales_of_tile,
)  # fmt: skip
from .forward import Partials, inner_loop
from .kernel import Pointer, Scalar, kernel
from .keys import load_k, load_pages, load_v_columns, tile_in_pages
from .masking import BlockInfo, all_masked, key_blocks, key_bounds, mask_edges
from .parameters import KeyTensor, Params, QueryTensor, RowTensor, ScaleTensor
from .products import Sum, inner_products, scaled, zeros
from .prologue import batch_index, prologue
from .rng import block_origin
from .rows import elements, head_pointer, load_rows, store_rows
from .sequences import query_tile
from .softmax import INFINITY, LN2, LOG2E, RowState

AT_ONCE = tl.constexpr(16)  # parts that are loaded at once


@kernel
def decode_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, partials: Partials,
    params: Params, k_descale: ScaleTensor, v_descale: ScaleTensor, num_programs: Scalar,
    most_parts: Scalar, parts_of_sequence: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """As `forward_kernel`, for one query of each sequence, with a group of query heads in each tile.

    Parts have results `[slots, H, Dv]` and `[slots, H]`. Sequences have slots one after another: `parts_of_sequence` of
    them, or packed ones as their keys need.
    """
    ALIGN: tl.constexpr = CONFIG.ALIGN
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    TRANSPOSED: tl.constexpr = CONFIG.TRANSPOSED
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    NATURAL: tl.constexpr = CONFIG.NATURAL
    PART_KEYS: tl.constexpr = CONFIG.PART_KEYS
    IN_RANGE: tl.constexpr = CONFIG.PAGE_SIZE == 0
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    lengths = params.lengths
    program, tile = tl.program_id(0) % num_programs, tl.program_id(0) // num_programs
    work = query_tile(
        lengths, tile, lengths.num_heads_k, PACK_GQA, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B), SHORT=True
    )  # fmt: skip
    if work.start < work.seqlen * PACK_GQA:
        row = work.start + tl.arange(0, BLOCK_M)
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [M]
        exists = position < work.seqlen
        b = batch_index(params, work)
        q_rows = head_pointer(q, b, head, ALIGN) + (work.offset + position) * elements(q.stride_m, ALIGN)
        q_i = load_rows(q_rows[:, None], exists, D)  # [M, D]
        head_rows = head[None, :] if TRANSPOSED else head[:, None]
        rows = position[None, :] if TRANSPOSED else position[:, None]
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head_rows, work.head, CONFIG)
        descales = descales_of_head(k_descale, v_descale, lengths, b, work.head, kv.seqlen, CONFIG)
        last = tl.minimum((work.start + BLOCK_M - 1) // PACK_GQA, work.seqlen - 1)
        blocks = key_blocks(params, work.start // PACK_GQA, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        bounds = key_bounds(params, rows, info.shift, kv.seqlen)
        origin = block_origin(params.dropout)
        size = PART_KEYS * tl.maximum(tl.cdiv(blocks.hi - blocks.lo, PART_KEYS * most_parts), 1)
        first = (blocks.lo - origin) // size
        stop = tl.where(blocks.hi > blocks.lo, tl.cdiv(blocks.hi - origin, size), first)
        slot = first_slot(lengths, work.sequence, kv.seqlen.offset, parts_of_sequence, PART_KEYS) - first
        share = tl.cdiv(stop - first, num_programs)
        begin = tl.minimum(first + program * share, stop)
        end = tl.minimum(begin + share, stop)
        if TRANSPOSED:
            own = blocks_of_parts(blocks, origin, begin, end, size)
            transposed_parts(
                partials, slot, begin, own, origin, size, q_i, rows, head, exists, kv, descales, params, info, bounds,
                CONFIG,
            )  # fmt: skip
        else:
            for part in range(begin, end):
                of_part = blocks_of_parts(blocks, origin, part, part + 1, size)
                acc = zeros(BLOCK_M, DV, COMPENSATED)
                state = softmax.init(None, head, False, info.factor, acc, BLOCK_M, COMPENSATED, NATURAL)
                state = inner_loop(
                    state, all_masked(of_part), 0, q_i, rows, kv, descales, params, info, bounds, True, IN_RANGE,
                    CONFIG, of_part,
                )  # fmt: skip
                store_part(partials, slot + part, state, head, exists, descales, params, info, CONFIG)
        if is_last_split(partials.semaphores + tile, num_programs):
            merge_parts(partials, out, lse, residual, params, b, work, slot, first, stop, CONFIG)


@triton.jit
def transposed_parts(
    partials, slot, part, blocks, origin, size, q_i, rows, head, exists, kv, descales, params, info, bounds,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """As `few_rows.inner_loop`, of parts from `part` on: loads of the next part begin before this one ends."""
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    IN_RANGE: tl.constexpr = CONFIG.PAGE_SIZE == 0
    KEYS: tl.constexpr = q_i.a.dtype
    VALUES: tl.constexpr = KEYS if CONFIG.VALUES == "" else tl.float32 if CONFIG.VALUES == "fp32" else tl.bfloat16
    n = tl.arange(0, BLOCK_N)
    m, acc = tl.full([BLOCK_M], -float("inf"), tl.float32), few_rows.zeros(BLOCK_M, DV)
    l = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # noqa: E741
    none = Sum(tl.zeros([BLOCK_M], tl.float32), 0.0)
    pages = 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, blocks.lo, CONFIG)
    for start_n in range(blocks.lo, blocks.hi, BLOCK_N):
        tile = tile_in_pages(kv, start_n, pages, CONFIG)
        if CONFIG.PAGE_SIZE > 0:
            pages = load_pages(kv, start_n + BLOCK_N, CONFIG)
        in_sequence = tile.exists
        if IN_RANGE and params.lengths.leftpad_k is None:
            in_sequence = n < kv.seqlen.end - start_n
        keys, keys_exist = (start_n + n)[:, None], in_sequence[:, None]
        k_j = number_rows(load_k(kv, tile, in_sequence, CONFIG), KEYS, D, CONFIG)  # [N, D]
        k_scale = scales_of_tile(descales.k, kv, tile, start_n, K_SCALES, CONFIG)
        kq = scaled_by_key(inner_products(k_j, q_i, D, CONFIG), k_scale, K_SCALES, 1)  # [N, M]
        t = scores.forward(kq, params, info, rows, keys, keys_exist, False).t
        t = mask_edges(t, -INFINITY, bounds, blocks, start_n, params, info, rows, keys, keys_exist, IN_RANGE)
        m, alpha, p = softmax.update(RowState(m, none, acc), t, info.factor, False, CONFIG.NATURAL, AXIS=0)
        l = l * alpha[None, :] + p  # noqa: E741
        if CONFIG.V_SCALES == "key":
            v_scale = scales_of_tile(descales.v, kv, tile, start_n, "key", CONFIG)
            p = scaled_by_key(p, v_scale, "key", 1)
        v_j = number_rows(load_v_columns(kv, tile, in_sequence, CONFIG), VALUES, DV, CONFIG)  # [Dv, N]
        acc = few_rows.add_columns(acc, alpha[None, :], p, v_j, DV)
        if CONFIG.VALUES == "bf16x2":
            acc = few_rows.add_columns(acc, 1.0, bf16_remainder(p), v_j, DV)
        if start_n + BLOCK_N >= tl.minimum(origin + (part + 1) * size, blocks.hi):
            state = RowState(m, Sum(tl.sum(l, 0), 0.0), acc)
            store_part(partials, slot + part, state, head, exists, descales, params, info, CONFIG)
            part += 1
            m, acc = tl.full([BLOCK_M], -float("inf"), tl.float32), few_rows.zeros(BLOCK_M, DV)
            l = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # noqa: E741


@triton.jit
def store_part(partials, slot, state, head, exists, descales, params, info, CONFIG: tl.constexpr):
    """Store the results of one part of keys."""
    NATURAL: tl.constexpr = CONFIG.NATURAL
    COMPENSATED: tl.constexpr = CONFIG.COMPENSATED
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
    weight, part_lse, part_residual = softmax.finalize(state, info.factor, COMPENSATED, NATURAL)
    if params.dropout.threshold is not None:
        weight *= params.dropout.keep_scale
    weight = scaled_rows(weight, state.l.total, descales.v, V_SCALES)
    out_i = scaled(few_rows.transposed(state.acc, DV) if CONFIG.TRANSPOSED else state.acc, weight[:, None], DV)
    partial_row = slot * params.lengths.num_heads_q + head
    store_rows(partials.partial_out + partial_row[:, None] * DV.WIDTH, out_i, exists, DV)
    tl.store(partials.partial_lse + partial_row, part_lse, mask=exists)
    if NATURAL:
        tl.store(partials.partial_residual + partial_row, part_residual, mask=exists)


@triton.jit
def first_slot(lengths, sequence, first_key, parts_of_sequence, PART_KEYS: tl.constexpr):
    """The slot of a sequence's first part. Packed keys from `first_key` on begin one more part than those before it."""
    if lengths.cu_seqlens_k is not None:
        return (first_key // PART_KEYS + sequence).to(tl.int64)
    else:
        return sequence.to(tl.int64) * parts_of_sequence


@triton.jit
def blocks_of_parts(blocks, origin, begin, end, size):
    """The blocks of the parts `begin..end`."""
    lo = tl.minimum(tl.maximum(blocks.lo, origin + begin * size), blocks.hi)
    hi = tl.maximum(tl.minimum(blocks.hi, origin + end * size), lo)
    return BlockInfo(
        lo, tl.minimum(tl.maximum(blocks.full_lo, lo), hi), tl.minimum(tl.maximum(blocks.full_hi, lo), hi), hi
    )


@triton.jit
def merge_parts(partials, out, lse, residual, params, b, work, slot, first, stop, CONFIG: tl.constexpr):
    """Merge the parts `first..stop` of a tile's rows, after their sinks. A part without visible keys changes nothing:
    its log-sum-exp is -inf, and its weight 0.
    """
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    NATURAL: tl.constexpr = CONFIG.NATURAL
    DV: tl.constexpr = CONFIG.HEAD_DIM_V.WIDTH
    WIDTH: tl.constexpr = triton.next_power_of_2(DV)
    ROWS: tl.constexpr = min(CONFIG.BLOCK_M, max(1, 32 * CONFIG.NUM_WARPS * 4 // WIDTH))
    out_b = out.data + b * elements(out.stride_b, CONFIG.ALIGN)
    lse_b = b * elements(lse.stride_b, 1) + work.offset
    stride_out_h, stride_out_m = elements(out.stride_h, CONFIG.ALIGN), elements(out.stride_m, CONFIG.ALIGN)
    d = tl.arange(0, WIDTH)[None, :]
    for n in range(0, tl.minimum(work.seqlen * PACK_GQA - work.start, CONFIG.BLOCK_M), ROWS):
        row = work.start + n + tl.arange(0, ROWS)[:, None]
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [R, 1]
        exists = position < work.seqlen
        lse_row = lse_b + head * elements(lse.stride_h, 1) + position
        sink = tl.full([ROWS, 1], -float("inf"), tl.float32)
        if params.scores.sinks is not None:
            of_head = tl.load(params.scores.sinks + head, mask=exists, other=0.0).to(tl.float32)
            sink = tl.where(work.sequence < params.lengths.batch, of_head, sink)
        m, zero = sink, tl.zeros([ROWS, 1], tl.int32)
        for start in range(first, stop, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                partial_row = (slot + start + part) * params.lengths.num_heads_q + head
                m = tl.maximum(m, load_lse(partials, partial_row, exists & (zero + (start + part) < stop)))
        total = tl.where(sink == -INFINITY, 0.0, weight_of(sink, m, 0.0))
        merged = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(first, stop, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                counts = exists & (zero + (start + part) < stop)
                partial_row = (slot + start + part) * params.lengths.num_heads_q + head
                partial_out = partials.partial_out + partial_row * DV + d
                y = tl.load(partial_out, mask=counts & (d < DV), other=0.0, cache_modifier=".cg")
                r = 0.0
                if NATURAL:
                    r = tl.load(partials.partial_residual + partial_row, mask=counts, other=0.0, cache_modifier=".cg")
                weight = tl.where(counts, weight_of(load_lse(partials, partial_row, counts), m, r), 0.0)
                total += weight
                merged += weight * y
        total = tl.where(total == 0.0, 1.0, total)  # without a sink and without parts
        out_rows = out_b + head * stride_out_h + (work.offset + position) * stride_out_m
        tl.store(out_rows + d, (merged / total).to(out.data.dtype.element_ty), mask=exists & (d < DV))
        row_lse = m + tl.log2(total) * LN2
        tl.store(lse.data + lse_row, row_lse, mask=exists)
        if NATURAL:
            tl.store(residual + lse_row, softmax.residual(m, total, row_lse), mask=exists)


@triton.jit
def load_lse(partials, partial_row, counts):
    """Load a part's log-sum-exp from the L2 cache, which all cores share; -inf of one that does not exist."""
    return tl.load(partials.partial_lse + partial_row, mask=counts, other=-float("inf"), cache_modifier=".cg")


@triton.jit
def weight_of(x, m, residual):
    """The weight of a part with the log-sum-exp `x`. Equal infinities have no difference."""
    return tl.exp2((tl.where(x == m, 0.0, x - m) + residual) * LOG2E)
