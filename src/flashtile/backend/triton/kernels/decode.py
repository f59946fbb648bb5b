"""Decoding whose sums depend on a sequence's own keys alone: equal parts of its keys from the first one on, merged in
their order (He et al., "Defeating Nondeterminism in LLM Inference", 2025).

The query heads of a group are the rows of a tile, as in `forward`. Its parts are dealt to any number of programs. A
single one merges them in registers, else the last one to finish loads and merges all of them: who computes a part
changes no bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import few_rows, softmax
from .combine import is_last_split
from .eight_bit import descales_of_head, row_scales, scaled_rows
from .forward import Partials, inner_loop
from .kernel import Pointer, Scalar, kernel
from .masking import BlockInfo, all_masked, key_blocks, key_bounds
from .parameters import KeyTensor, Params, QueryTensor, RowScaleTensor, RowTensor, ScaleTensor
from .products import scaled, zeros
from .prologue import batch_index, prologue
from .rng import block_origin
from .rows import Chunks, elements, head_pointer, load_rows, store_rows
from .sequences import query_tile
from .softmax import INFINITY, LN2, LOG2E

AT_ONCE = tl.constexpr(16)  # parts that are loaded at once


@kernel
def decode_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, partials: Partials,
    params: Params, q_descale: RowScaleTensor, k_descale: ScaleTensor, v_descale: ScaleTensor, num_programs: Scalar,
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
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
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
        of_rows = row_scales(q_descale, lengths, b, head, work.head, work.offset + position, exists)
        descales = descales_of_head(k_descale, v_descale, of_rows, lengths, b, work.head, kv.seqlen, CONFIG)
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
        alone = num_programs == 1
        sink = load_sinks(params, work, head, exists)
        run = Run(sink, tl.where(sink == -INFINITY, 0.0, 1.0))
        merged = few_rows.transposed(few_rows.zeros(BLOCK_M, DV), DV)
        for part in range(begin, end):
            of_part = blocks_of_part(blocks, origin + part * size, size)
            acc = few_rows.zeros(BLOCK_M, DV) if TRANSPOSED else zeros(BLOCK_M, DV, COMPENSATED)
            state = softmax.init(None, head, False, info.factor, acc, BLOCK_M, COMPENSATED, NATURAL)
            if TRANSPOSED:
                state = few_rows.inner_loop(state, of_part, q_i, rows, kv, descales, params, info, bounds, CONFIG)
            else:
                state = inner_loop(
                    state, all_masked(of_part), 0, q_i, rows, kv, descales, params, info, bounds, True, IN_RANGE,
                    CONFIG, of_part,
                )  # fmt: skip
            weight, part_lse, part_residual = softmax.finalize(state, info.factor, COMPENSATED, NATURAL)
            if params.dropout.threshold is not None:
                weight *= params.dropout.keep_scale
            weight = scaled_rows(weight, state.l.total, descales.v, V_SCALES)
            out_i = scaled(few_rows.transposed(state.acc, DV) if TRANSPOSED else state.acc, weight[:, None], DV)
            if alone:
                run, alpha, w = after_part(run, part_lse, part_residual)
                merged = merged_rows(merged, alpha, out_i, w, DV)
            else:
                partial_row = (slot + part) * lengths.num_heads_q + head
                store_rows(partials.partial_out + partial_row[:, None] * DV.WIDTH, out_i, exists, DV)
                tl.store(partials.partial_lse + partial_row, part_lse, mask=exists)
                if NATURAL:
                    tl.store(partials.partial_residual + partial_row, part_residual, mask=exists)
        if alone:
            out_rows = head_pointer(out, b, head, ALIGN) + (work.offset + position) * elements(out.stride_m, ALIGN)
            total = total_of(run)
            store_rows(out_rows[:, None], divided(merged, total[:, None], out.data.dtype.element_ty, DV), exists, DV)
            store_lse(lse, residual, run.m, total, b, head, work.offset + position, exists, NATURAL)
        elif is_last_split(partials.semaphores + tile, num_programs):
            merge_parts(partials, out, lse, residual, params, b, work, slot, first, stop, CONFIG)


class Run(NamedTuple):
    """The parts of a row so far: their maximum and their sum, of which a sink is the first."""

    m: tl.tensor
    total: tl.tensor


@triton.jit
def first_slot(lengths, sequence, first_key, parts_of_sequence, PART_KEYS: tl.constexpr):
    """The slot of a sequence's first part. Packed keys from `first_key` on begin one more part than those before it."""
    if lengths.cu_seqlens_k is not None:
        return (first_key // PART_KEYS + sequence).to(tl.int64)
    else:
        return sequence.to(tl.int64) * parts_of_sequence


@triton.jit
def blocks_of_part(blocks, start, size):
    """The blocks of the part that begins at key `start`."""
    lo = tl.minimum(tl.maximum(blocks.lo, start), blocks.hi)
    hi = tl.maximum(tl.minimum(blocks.hi, start + size), lo)
    return BlockInfo(
        lo, tl.minimum(tl.maximum(blocks.full_lo, lo), hi), tl.minimum(tl.maximum(blocks.full_hi, lo), hi), hi
    )


@triton.jit
def load_sinks(params, work, head, exists):
    """The sinks of rows, -inf where there are none."""
    sink = tl.where(exists, -float("inf"), -float("inf"))
    if params.scores.sinks is not None:
        of_head = tl.load(params.scores.sinks + head, mask=exists, other=0.0).to(tl.float32)
        sink = tl.where(work.sequence < params.lengths.batch, of_head, sink)
    return sink


@triton.jit
def after_part(run, x, residual):
    """The state after a part with the log-sum-exp `x`, the factor of earlier parts, and the part's weight. The program
    that computed a part and one that loads it do the same operations, so that they give the same bits: `fma` leaves the
    compiler no choice. A part without visible keys has the weight 0 as soon as another key is seen.
    """
    m = tl.maximum(run.m, x)
    alpha, weight = weight_of(run.m, m, 0.0), weight_of(x, m, residual)
    return Run(m, tl.fma(run.total, alpha, weight)), alpha, weight


@triton.jit
def weight_of(x, m, residual):
    """The weight of a part with the log-sum-exp `x`. Equal infinities have no difference."""
    return tl.exp2((tl.where(x == m, 0.0, x - m) + residual) * LOG2E)


@triton.jit
def merged_rows(merged, alpha, out, weight, D: tl.constexpr):
    """`merged * alpha + out * weight` of rows `[M, D]`."""
    shape: tl.constexpr = merged.a.shape
    a = tl.fma(out.a, tl.broadcast_to(weight[:, None], shape), merged.a * alpha[:, None])
    if D.CHUNK_1 == 0:
        return Chunks(a, merged.b)
    else:
        shape_b: tl.constexpr = merged.b.shape
        return Chunks(a, tl.fma(out.b, tl.broadcast_to(weight[:, None], shape_b), merged.b * alpha[:, None]))


@triton.jit
def total_of(run):
    """The sum of weights; 1 without a sink and without parts."""
    return tl.where(run.total == 0.0, 1.0, run.total)


@triton.jit
def divided(x, total, dtype: tl.constexpr, D: tl.constexpr):
    if D.CHUNK_1 == 0:
        return Chunks((x.a / total).to(dtype), x.b)
    else:
        return Chunks((x.a / total).to(dtype), (x.b / total).to(dtype))


@triton.jit
def store_lse(lse, residual, m, total, b, head, token, exists, NATURAL: tl.constexpr):
    lse_row = b * elements(lse.stride_b, 1) + head * elements(lse.stride_h, 1) + token
    row_lse = m + tl.log2(total) * LN2
    tl.store(lse.data + lse_row, row_lse, mask=exists)
    if NATURAL:
        tl.store(residual + lse_row, softmax.residual(m, total, row_lse), mask=exists)


@triton.jit
def merge_parts(partials, out, lse, residual, params, b, work, slot, first, stop, CONFIG: tl.constexpr):
    """Merge the parts `first..stop` of a tile's rows, after their sinks."""
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    NATURAL: tl.constexpr = CONFIG.NATURAL
    DV: tl.constexpr = CONFIG.HEAD_DIM_V.WIDTH
    WIDTH: tl.constexpr = triton.next_power_of_2(DV)
    ROWS: tl.constexpr = min(CONFIG.BLOCK_M, max(1, 32 * CONFIG.NUM_WARPS * 8 // WIDTH))
    out_b = out.data + b * elements(out.stride_b, CONFIG.ALIGN)
    stride_out_h, stride_out_m = elements(out.stride_h, CONFIG.ALIGN), elements(out.stride_m, CONFIG.ALIGN)
    d = tl.arange(0, WIDTH)[None, :]
    none = tl.zeros([ROWS, 1], tl.int32)
    for n in range(0, tl.minimum(work.seqlen * PACK_GQA - work.start, CONFIG.BLOCK_M), ROWS):
        row = work.start + n + tl.arange(0, ROWS)[:, None]
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [R, 1]
        exists = position < work.seqlen
        sink = load_sinks(params, work, head, exists)
        run, merged = Run(sink, tl.where(sink == -INFINITY, 0.0, 1.0)), tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(first, stop, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                # Loads from the L2 cache, which all cores share. After the last part it is loaded again: ptxas has too
                # few predicates to start sixteen loads of other conditions before the first one ends.
                counts = none + (start + part) < stop
                partial_row = (slot + tl.minimum(start + part, stop - 1)) * params.lengths.num_heads_q + head
                partial_out = partials.partial_out + partial_row * DV + d
                y = tl.load(partial_out, mask=exists & (d < DV), other=0.0, cache_modifier=".cg")
                x = tl.load(partials.partial_lse + partial_row, mask=exists, other=0.0, cache_modifier=".cg")
                r = 0.0
                if NATURAL:
                    r = tl.load(partials.partial_residual + partial_row, mask=exists, other=0.0, cache_modifier=".cg")
                new, alpha, weight = after_part(run, x, r)
                run = Run(tl.where(counts, new.m, run.m), tl.where(counts, new.total, run.total))
                grown = tl.fma(y, tl.broadcast_to(weight, [ROWS, WIDTH]), merged * alpha)
                merged = tl.where(counts, grown, merged)
        total = total_of(run)
        out_rows = out_b + head * stride_out_h + (work.offset + position) * stride_out_m
        tl.store(out_rows + d, (merged / total).to(out.data.dtype.element_ty), mask=exists & (d < DV))
        store_lse(lse, residual, run.m, total, b, head, work.offset + position, exists, NATURAL)
