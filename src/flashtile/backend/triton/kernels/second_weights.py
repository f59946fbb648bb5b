"""Second derivatives of wide heads, whose sums fit no program's registers: weights of pairs go to memory, and products
of weights with rows or keys follow, one sum of columns a program (`second_products`).

With the names of `second`, a tile's program stores `p`, `p t`, `ds = p (dp - delta)` and `p ((dp - delta) t + u)` for a
range of heads and rows, and sums of its keys. These give T and E of each row, with which the weights are completed:

    T = sum p t,   E = sum p (u + dp t) - T sum p dp
    w = p (t - T),   r = p ((dp - delta) t + u) - T ds - E p
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .kernel import Pointer, Scalar, kernel
from .masking import key_blocks, key_bounds, mask_fill
from .parameters import DropoutInputs, KeyTensor, Lengths, Params, QueryTensor, RowTensor, WindowSize
from .prologue import head_info
from .rng import block_origin, keep_mask
from .rows import elements, head_pointer, load_row_stats, probabilities
from .score_tangent import FeatureTangents, score_tangent
from .sequences import key_seqlen

SUMS = tl.constexpr(3)  # of a row and a tile: p t, p (u + dp t) and p dp


class Directions(NamedTuple):
    tq: QueryTensor
    tk: KeyTensor
    tv: KeyTensor


class Weights(NamedTuple):
    """Weights of pairs `[range_heads, range_rows * UNIT, pitch * UNIT]`. A dropped pair has the opposite sign in
    `weight_p` until the weights are complete, and 0 then.
    """

    weight_p: Pointer
    weight_t: Pointer  # p t of kept pairs, then w
    weight_ds: Pointer
    weight_r: Pointer
    weight_sums: Pointer  # fp32 [range_heads, pitch * UNIT / BLOCK_N, SUMS, range_rows * UNIT]


class HeadRange(NamedTuple):
    """Query heads of all sequences, some of their rows, and columns for all keys; `UNIT` rows or keys are one."""

    first_head: Scalar
    first_row: Scalar  # in rows, a multiple of UNIT
    range_rows: Scalar
    pitch: Scalar


class Visibility(NamedTuple):
    """Of `Params`, what decides which blocks of keys a row sees."""

    lengths: Lengths
    window: WindowSize
    dropout: DropoutInputs


@triton.jit
def head_of_range(span, lengths, number):
    """Sequence and query head of a head of the range."""
    n = span.first_head + number
    return (n // lengths.num_heads_q).to(tl.int64), n % lengths.num_heads_q


@triton.jit
def first_weight(span, number, row, UNIT: tl.constexpr):
    """Where the weights of a row begin, for the row's position in the range."""
    return (number * elements(span.range_rows, UNIT) + row) * elements(span.pitch, UNIT)


@triton.jit
def visible_units(params, lengths, start, shift, seqlen_k, UNIT: tl.constexpr):
    """Blocks of keys that some row of a unit sees, whose weights are stored: none if it has no rows."""
    last = tl.minimum(start + UNIT, lengths.total_q) - 1
    blocks = key_blocks(params, start, last, shift, seqlen_k, UNIT)
    return blocks.lo, tl.where(last >= start, blocks.hi, blocks.lo)


@triton.jit
def columns(x, rows, first, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Load features `first` to `first + BLOCK_D` of rows whose pointers are `[N, 1]`; 0 past `WIDTH`."""
    d = first + tl.arange(0, BLOCK_D)[None, :]
    if WIDTH % BLOCK_D == 0:
        return tl.load(x + rows + d)
    else:
        return tl.load(x + rows + d, mask=d < WIDTH, other=0.0)


@kernel
def second_weights_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, row_stats: RowTensor, along: Directions,
    moving: FeatureTangents, weights: Weights, span: HeadRange, params: Params, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store the weights of one tile, and sums over its keys."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM.WIDTH
    DV: tl.constexpr = CONFIG.HEAD_DIM_V.WIDTH
    PRECISION: tl.constexpr = CONFIG.PRECISION
    lengths, program = params.lengths, tl.program_id(0)
    key_tiles, row_tiles = span.pitch * (UNIT // BLOCK_N), span.range_rows * (UNIT // BLOCK_M)
    key_tile, program = program % key_tiles, program // key_tiles
    row_tile, number = program % row_tiles, program // row_tiles
    b, head = head_of_range(span, lengths, number)
    first_row, seqlen_k = span.first_row + row_tile * BLOCK_M, key_seqlen(lengths, b)
    first_key = block_origin(params.dropout) + key_tile * BLOCK_N
    info = head_info(params, b, head, seqlen_k.seqlen - lengths.total_q + params.window.diagonal)
    unit = span.first_row + row_tile * BLOCK_M // UNIT * UNIT
    lo, hi = visible_units(params, lengths, unit, info.shift, seqlen_k, UNIT)
    if (first_key >= lo) & (first_key < hi):
        head_k = head // (lengths.num_heads_q // lengths.num_heads_k)
        row = first_row + tl.arange(0, BLOCK_M)
        row_exists = row < lengths.total_q
        # Loads need no masks: rows and keys past the last one repeat it, and have weights 0.
        at_row = tl.minimum(row, lengths.total_q - 1)[:, None]
        key = first_key + tl.arange(0, BLOCK_N)
        at_key = tl.maximum(tl.minimum(key, seqlen_k.end - 1), 0)[:, None]

        q_head, k_head = head_pointer(q, b, head, ALIGN), head_pointer(k, b, head_k, ALIGN)
        q_rows, k_rows = at_row * elements(q.stride_m, ALIGN), at_key * elements(k.stride_n, ALIGN)
        s, dproduct = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for d in range(0, D, BLOCK_D):
            q_i, k_j = columns(q_head, q_rows, d, BLOCK_D, D), columns(k_head, k_rows, d, BLOCK_D, D)
            s = tl.dot(q_i, k_j.T, s, input_precision=PRECISION)
            if along.tq.data is not None:
                tq_rows = at_row * elements(along.tq.stride_m, ALIGN)
                tq_i = columns(head_pointer(along.tq, b, head, ALIGN), tq_rows, d, BLOCK_D, D)
                dproduct = tl.dot(tq_i, k_j.T, dproduct, input_precision=PRECISION)
            if along.tk.data is not None:
                tk_rows = at_key * elements(along.tk.stride_n, ALIGN)
                tk_j = columns(head_pointer(along.tk, b, head_k, ALIGN), tk_rows, d, BLOCK_D, D)
                dproduct = tl.dot(q_i, tk_j.T, dproduct, input_precision=PRECISION)
        dout_head, v_head = head_pointer(dout, b, head, ALIGN), head_pointer(v, b, head_k, ALIGN)
        dout_rows, v_rows = at_row * elements(dout.stride_m, ALIGN), at_key * elements(v.stride_n, ALIGN)
        dp, u = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for d in range(0, DV, BLOCK_D):
            dout_i = columns(dout_head, dout_rows, d, BLOCK_D, DV)
            dp = tl.dot(dout_i, columns(v_head, v_rows, d, BLOCK_D, DV).T, dp, input_precision=PRECISION)
            if along.tv.data is not None:
                tv_rows = at_key * elements(along.tv.stride_n, ALIGN)
                tv_j = columns(head_pointer(along.tv, b, head_k, ALIGN), tv_rows, d, BLOCK_D, DV)
                u = tl.dot(dout_i, tv_j.T, u, input_precision=PRECISION)

        rows, keys = row[:, None], key[None, :]
        exists = (keys >= seqlen_k.begin) & (keys < seqlen_k.end)
        shown = tl.broadcast_to(row_exists[:, None], [BLOCK_M, BLOCK_N])
        bounds = key_bounds(params, rows, info.shift, seqlen_k)
        shown = mask_fill(shown, False, bounds, params, info, rows, keys, exists, True, True)
        stats = head_pointer(row_stats, b, head, 2)
        lse_i, delta_i, residual_i = load_row_stats(stats, row, row_exists, CONFIG.NATURAL)
        residual = residual_i[:, None] if CONFIG.NATURAL else 0.0
        score = scores.forward(s, params, info, rows, keys, exists, CONFIG.COMPENSATED)
        t = score_tangent(dproduct, score, moving, 0.0, params, info, rows, keys, exists, CONFIG)
        p = probabilities(score.t, info.factor, lse_i[:, None], residual, CONFIG.NATURAL)
        p, t = tl.where(shown, p, 0.0), tl.where(shown, t, 0.0)
        kept, signed = p * t, p
        if params.dropout.threshold is not None:
            keep = keep_mask(params.dropout, info.stream, rows, first_key, BLOCK_N)
            dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
            u = tl.where(keep, u * params.dropout.keep_scale, 0.0)
            kept, signed = tl.where(keep, kept, 0.0), tl.where(keep, p, -p)
        dp, u = tl.where(shown, dp, 0.0), tl.where(shown, u, 0.0)
        delta = tl.where(row_exists, delta_i, 0.0)[:, None]
        ds = tl.where(shown, p * (dp - delta), 0.0)  # not 0 * NaN, where a row's delta is NaN
        at = first_weight(span, number, row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None], UNIT)
        at += key_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        DTYPE: tl.constexpr = weights.weight_p.dtype.element_ty
        tl.store(weights.weight_p + at, signed.to(DTYPE))
        tl.store(weights.weight_t + at, kept.to(DTYPE))
        tl.store(weights.weight_ds + at, ds.to(DTYPE))
        tl.store(weights.weight_r + at, (ds * t + p * u).to(DTYPE))
        total_rows = elements(span.range_rows, UNIT)
        of_tile = weights.weight_sums + (number * key_tiles + key_tile) * SUMS * total_rows
        of_tile += row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(of_tile, tl.sum(p * t, 1))
        tl.store(of_tile + total_rows, tl.sum(p * (u + dp * t), 1))
        tl.store(of_tile + 2 * total_rows, tl.sum(p * dp, 1))


@kernel
def complete_weights_kernel(
    tlse: RowTensor, weights: Weights, span: HeadRange, params: Visibility, UNIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store T of `BLOCK_M` rows, and complete their weights, `WIDTH` keys at a time. Sums are of `TILE` keys, and
    `TILES` of them are added at a time.
    """
    lengths, program = params.lengths, tl.program_id(0)
    blocks = span.range_rows * (UNIT // BLOCK_M)
    block, number = program % blocks, program // blocks
    b, head = head_of_range(span, lengths, number)
    origin, seqlen_k = block_origin(params.dropout), key_seqlen(lengths, b)
    shift = seqlen_k.seqlen - lengths.total_q + params.window.diagonal
    unit = span.first_row + block * BLOCK_M // UNIT * UNIT
    lo, hi = visible_units(params, lengths, unit, shift, seqlen_k, UNIT)
    lo, hi = lo - origin, hi - origin
    local = block * BLOCK_M + tl.arange(0, BLOCK_M)
    total_rows = elements(span.range_rows, UNIT)
    sums = weights.weight_sums + number * span.pitch * (UNIT // TILE) * SUMS * total_rows + local[:, None]
    T, crossed, of_dp = (
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    for first in range(lo // TILE, hi // TILE, TILES):
        tile = first + tl.arange(0, TILES)[None, :]
        exists, at = tile < hi // TILE, sums + tile * SUMS * total_rows
        T += tl.sum(tl.load(at, mask=exists, other=0.0), 1)
        crossed += tl.sum(tl.load(at + total_rows, mask=exists, other=0.0), 1)
        of_dp += tl.sum(tl.load(at + 2 * total_rows, mask=exists, other=0.0), 1)
    row = span.first_row + local
    tl.store(head_pointer(tlse, b, head, 1) + row, T, mask=row < lengths.total_q)
    T_i, E_i = T[:, None], (crossed - T * of_dp)[:, None]
    DTYPE: tl.constexpr = weights.weight_p.dtype.element_ty
    at_row = first_weight(span, number, local[:, None], UNIT)
    for start in range(lo, hi, WIDTH):
        key = start + tl.arange(0, WIDTH)[None, :]
        exists, at = key < hi, at_row + key
        p = tl.load(weights.weight_p + at, mask=exists, other=0.0).to(tl.float32)
        kept = p
        if params.dropout.threshold is not None:
            kept, p = tl.maximum(p, 0.0), tl.abs(p)
            tl.store(weights.weight_p + at, kept.to(DTYPE), mask=exists)
        w = tl.load(weights.weight_t + at, mask=exists, other=0.0).to(tl.float32) - T_i * kept
        ds = tl.load(weights.weight_ds + at, mask=exists, other=0.0).to(tl.float32)
        r = tl.load(weights.weight_r + at, mask=exists, other=0.0).to(tl.float32) - T_i * ds - E_i * p
        tl.store(weights.weight_t + at, w.to(DTYPE), mask=exists)
        tl.store(weights.weight_r + at, r.to(DTYPE), mask=exists)
