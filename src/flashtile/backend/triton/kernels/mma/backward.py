"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2) in one loop, for chips whose matrix
units take their operands from registers (mma.sync).

A program owns a block of keys, walks over the rows that see it, and adds each tile's part of dq to fp32 sums: five
products a tile, where `dkdv` and `dq` take seven. Written in Gluon, because what a loop reads again and again has to
stay in shared memory: Triton keeps the fragments of keys and values in registers, which have no room for them.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .. import scores
from ..kernel import Scalar, gluon_kernel
from ..masking import block_list, first_visit, num_visits, row_blocks, row_bounds, within
from ..parameters import KeyTensor, Params, QueryTensor, RowTensor
from ..prologue import batch_index, head_info
from ..rows import HeadRows, elements, head_pointer, probabilities
from ..sequences import in_turns, key_seqlen, query_seqlen, work_tile
from .from_sums import first_row
from .tiles import (
    add_product,
    begin_copy,
    copy_rows,
    inner_products,
    layouts_of,
    padded,
    plain,
    store_rows,
    swizzled,
    visit,
    zeros,
)


class Buffers(NamedTuple):
    """Shared memory."""

    k: gl.shared_memory_descriptor  # [N, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [STAGES, M, D]
    dout: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor  # [STAGES, M]: lse and delta
    residual: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor  # [N, M]
    ds: gl.shared_memory_descriptor


class Rows(NamedTuple):
    """The rows of one sequence and query head in memory."""

    q: HeadRows
    dout: HeadRows
    dq: tl.tensor  # pointer to the sums of position 0
    stats: tl.tensor  # pointer to position 0
    seqlen: tl.tensor


@gluon_kernel
def backward_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, dk: KeyTensor, dv: KeyTensor, dq: RowTensor,
    row_stats: RowTensor, params: Params, scale: Scalar, heads_at_once: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dk` and `dv`, and add to `dq`, fp32 sums that `from_sums` scales."""
    ALIGN: gl.constexpr = CONFIG.ALIGN
    N: gl.constexpr = CONFIG.BLOCK_N
    M: gl.constexpr = CONFIG.BLOCK_M
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    WARPS: gl.constexpr = CONFIG.NUM_WARPS
    STAGES: gl.constexpr = CONFIG.STAGES
    LAYOUTS: gl.constexpr = layouts_of(min(WARPS, 4, N // 16), min(WARPS, 4, M // 16), D, WARPS)
    PAIRS: gl.constexpr = LAYOUTS.pairs
    dtype: gl.constexpr = k.data.dtype.element_ty
    lengths = params.lengths
    index = gl.arange(0, CONFIG.BLOCK_B, layout=LAYOUTS.numbers)
    program = in_turns(gl.program_id(0), lengths.num_tiles, heads_at_once)
    work = work_tile(
        program, lengths.num_tiles, lengths.num_heads_k, lengths.cu_seqlens_k, None, lengths.batch,
        lengths.total_k, 0, 1, N, index, FIRST_FIRST=True,
    )  # fmt: skip
    if work.start < work.seqlen:
        b = batch_index(params, work)
        offset_q, seqlen_q = query_seqlen(lengths, work.sequence)
        seqlen_k = key_seqlen(lengths, work.sequence)
        end = seqlen_k.end
        shift = seqlen_k.seqlen - seqlen_q + params.window.diagonal
        W: gl.constexpr = padded(D)
        WV: gl.constexpr = padded(DV)
        buffers = Buffers(
            gl.allocate_shared_memory(dtype, [N, W], swizzled(W)),
            gl.allocate_shared_memory(dtype, [N, WV], swizzled(WV)),
            gl.allocate_shared_memory(dtype, [STAGES, M, W], swizzled(W)),
            gl.allocate_shared_memory(dtype, [STAGES, M, WV], swizzled(WV)),
            gl.allocate_shared_memory(gl.int64, [STAGES, M], plain()),
            gl.allocate_shared_memory(gl.int64, [STAGES, M], plain()) if CONFIG.NATURAL else 0,
            gl.allocate_shared_memory(dtype, [N, M], swizzled(M)),
            gl.allocate_shared_memory(dtype, [N, M], swizzled(M)),
        )
        stride_k, stride_v = elements(k.stride_n, ALIGN), elements(v.stride_n, ALIGN)
        k_rows = HeadRows(head_pointer(k, b, work.head, ALIGN) + work.offset * stride_k, stride_k)
        v_rows = HeadRows(head_pointer(v, b, work.head, ALIGN) + work.offset * stride_v, stride_v)
        copy_rows(buffers.k, k_rows, work.start, end, D, LAYOUTS)
        copy_rows(buffers.v, v_rows, work.start, end, DV, LAYOUTS)
        async_copy.commit_group()

        last = gl.minimum(work.start + N, end) - 1
        num_rows = gl.where(last >= work.start, seqlen_q, 0)  # no row sees a block without keys
        blocks = row_blocks(params.window, work.start, last, shift, num_rows, M)
        keys = work.start + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUTS.pairs))[:, None]
        exists = keys < end
        cut = work.start + N > end  # a key that does not exist has probabilities too, if nothing hides it
        bounds = row_bounds(params.window, keys, shift, exists, seqlen_q)
        stride_q, stride_dout = elements(q.stride_m, ALIGN), elements(dout.stride_m, ALIGN)
        dq_row = first_row(offset_q, work.sequence, lengths.cu_seqlens_q, M) * (D.CHUNK_0 + D.CHUNK_1)
        dk_j, dv_j = zeros(N, D, PAIRS), zeros(N, DV, PAIRS)
        for g in range(lengths.num_heads_q // lengths.num_heads_k):
            head = work.head * (lengths.num_heads_q // lengths.num_heads_k) + g
            info = head_info(params, b, head, shift)
            listed = block_list(params, b, head, work.start // N)
            rows = Rows(
                HeadRows(head_pointer(q, b, head, ALIGN) + offset_q * stride_q, stride_q),
                HeadRows(head_pointer(dout, b, head, ALIGN) + offset_q * stride_dout, stride_dout),
                head_pointer(dq, b, head, 8) + dq_row,
                head_pointer(row_stats, b, head, 2) + (2 * offset_q if CONFIG.NATURAL else offset_q),
                seqlen_q,
            )
            dk_j, dv_j = walk(
                dk_j, dv_j, blocks, listed, keys, exists, cut, bounds, buffers, rows, params, info, LAYOUTS, CONFIG
            )

        async_copy.wait_group(0)  # keys without rows have not: `store_rows` may use the same shared memory
        stride_dk, stride_dv = elements(dk.stride_n, ALIGN), elements(dv.stride_n, ALIGN)
        dk_rows = HeadRows(head_pointer(dk, b, work.head, ALIGN) + work.offset * stride_dk, stride_dk)
        dv_rows = HeadRows(head_pointer(dv, b, work.head, ALIGN) + work.offset * stride_dv, stride_dv)
        store_rows(dk_rows, work.start, work.seqlen, dk_j, scale, D, LAYOUTS)
        store_rows(dv_rows, work.start, work.seqlen, dv_j, 1.0, DV, LAYOUTS)


@gluon.jit
def walk(
    dk_j, dv_j, blocks, listed, keys, exists, cut, bounds, buffers, rows, params, info, LAYOUTS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Add the gradients of the blocks of rows that see a block of keys."""
    M: gl.constexpr = CONFIG.BLOCK_M
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    ROWS: gl.constexpr = LAYOUTS.rows
    TWO: gl.constexpr = CONFIG.STAGES > 1
    num_masked = num_visits(blocks, listed, params, True, M)
    count = num_masked + num_visits(blocks, listed, params, False, M)
    first = first_visit(listed, params, True)
    if count > 0:
        at = visit(blocks, first, 0, num_masked, params, M)
        load_dout(buffers, rows, at, 0, LAYOUTS, CONFIG)
        load_q(buffers, rows, at, 0, LAYOUTS, CONFIG)
    for n in range(count):
        at = visit(blocks, first, n, num_masked, params, M)
        then = visit(blocks, first, gl.minimum(n + 1, count - 1), num_masked, params, M)
        stage = n % CONFIG.STAGES
        q_s, dout_s = buffers.q.index(stage), buffers.dout.index(stage)
        async_copy.wait_group(0)
        if TWO:
            if n + 1 < count:
                load_dout(buffers, rows, then, 1 - stage, LAYOUTS, CONFIG)
                load_q(buffers, rows, then, 1 - stage, LAYOUTS, CONFIG)
        row = at.start + gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
        lse_i, delta_i, residual_i = stats_of(buffers, stage, LAYOUTS, CONFIG)
        kq = inner_products(buffers.k, q_s, D, LAYOUTS)
        s = scores.forward(kq, params, info, row, keys, exists, False)
        p = probabilities(s.t, info.factor, lse_i, residual_i, CONFIG.NATURAL)
        p = shown(p, at.masked | cut, bounds, keys, exists, row, params, info, CONFIG)
        buffers.p.store(p.to(buffers.p.dtype))
        dp = inner_products(buffers.v, dout_s, DV, LAYOUTS)
        ds = scores.unmodified(p * (dp - delta_i), s, lse_i, params)
        ds = shown(ds, at.masked | cut, bounds, keys, exists, row, params, info, CONFIG)
        buffers.ds.store(scores.backward(ds, s, params).to(buffers.ds.dtype))
        dv_j = add_product(dv_j, buffers.p, dout_s, DV)
        if not TWO:
            if n + 1 < count:
                load_dout(buffers, rows, then, 0, LAYOUTS, CONFIG)
        dk_j = add_product(dk_j, buffers.ds, q_s, D)
        if not TWO:
            if n + 1 < count:
                load_q(buffers, rows, then, 0, LAYOUTS, CONFIG)
        dq_i = add_product(zeros(M, D, ROWS), buffers.ds.permute((1, 0)), buffers.k, D)
        add_rows(rows.dq + at.start.to(gl.int64) * (D.CHUNK_0 + D.CHUNK_1), dq_i, D)
    return dk_j, dv_j


@gluon.jit
def load_dout(buffers, rows, at, stage, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr):
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    copy_rows(buffers.dout.index(stage), rows.dout, at.start, rows.seqlen, DV, LAYOUTS)


@gluon.jit
def load_q(buffers, rows, at, stage, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr):
    """Begin to load rows and their statistics."""
    M: gl.constexpr = CONFIG.BLOCK_M
    D: gl.constexpr = CONFIG.HEAD_DIM
    copy_rows(buffers.q.index(stage), rows.q, at.start, rows.seqlen, D, LAYOUTS)
    row = at.start + gl.arange(0, M, layout=LAYOUTS.numbers)
    pointers = rows.stats + (2 * row if CONFIG.NATURAL else row)
    begin_copy(buffers.stats.index(stage), pointers, mask=row < rows.seqlen)
    if CONFIG.NATURAL:
        begin_copy(buffers.residual.index(stage), pointers + 1, mask=row < rows.seqlen)
    async_copy.commit_group()


@gluon.jit
def stats_of(buffers, stage, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr):
    """lse, delta and the residual of rows, `[1, M]`, as `load_row_stats`."""
    pair = buffers.stats.index(stage).load(gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
    low, high = (pair & 0xFFFFFFFF).to(gl.int32), (pair >> 32).to(gl.int32)
    lse, delta = low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)
    if CONFIG.NATURAL:
        rest = buffers.residual.index(stage).load(gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
        return lse, delta, (rest & 0xFFFFFFFF).to(gl.int32).to(gl.float32, bitcast=True)
    else:
        return lse, delta, 0.0


@gluon.jit
def shown(x, masked, bounds, keys, exists, row, params, info, CONFIG: gl.constexpr):
    """`x [N, M]` where a pair is visible, else 0."""
    BY_PAIR: gl.constexpr = params.scores.mask.data is not None or params.scores.mask_mod is not None
    if BY_PAIR and params.lists.data is None:
        x = gl.where(visible(bounds, keys, exists, row, params, info), x, 0.0)
    elif not CONFIG.EVEN:
        if masked:
            x = gl.where(visible(bounds, keys, exists, row, params, info), x, 0.0)
    return x


@gluon.jit
def visible(bounds, keys, exists, row, params, info):
    found = within(bounds, row)
    if params.scores.mask.data is not None:
        found = found & scores.load_mask(params, info, row, keys, exists)
    if params.scores.mask_mod is not None:
        found = found & scores.visible_by_function(params, info, row, keys)
    return found


@gluon.jit
def add_rows(to, sums, D: gl.constexpr):
    """Add a block of rows to fp32 sums in memory, in the order of `from_sums.load_sums`: the lanes of a warp add to
    neighbors.
    """
    W: gl.constexpr = D.CHUNK_0 + D.CHUNK_1
    add_chunk(to, sums.a, W)
    if D.CHUNK_1 > 0:
        add_chunk(to + 8 * D.CHUNK_0, sums.b, W)


@gluon.jit
def add_chunk(to, sums, W: gl.constexpr):
    M: gl.constexpr = sums.shape[0]
    C: gl.constexpr = sums.shape[1]
    by_lanes = sums.reshape([M // 8, 8, C // 8, 4, 2]).permute((0, 2, 4, 1, 3)).reshape([M // 8, 8 * C])
    LAYOUT: gl.constexpr = by_lanes.type.layout
    eight = gl.arange(0, M // 8, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    at = gl.arange(0, 8 * C, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.atomic_add(to + (eight * (8 * W) + at), by_lanes, sem="relaxed")
