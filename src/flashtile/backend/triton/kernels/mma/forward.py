"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1) for chips with mma.sync, in Gluon."""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .. import scores, softmax
from ..kernel import Pointer, Scalar, gluon_kernel
from ..masking import block_list, first_visit, key_blocks, key_bounds, mask_fill, num_visits
from ..parameters import KeyTensor, Params, QueryTensor, RowTensor
from ..products import Sum
from ..prologue import batch_index, head_info
from ..rows import Chunks, HeadRows, elements, head_pointer
from ..sequences import in_turns, key_seqlen, query_tile
from ..softmax import INFINITY, LOG2E, RowState
from .tiles import (
    K_STEP,
    copy_rows,
    inner_products,
    layouts_of,
    padded,
    store_rows,
    swizzled,
    visit,
    zeros,
)


class Buffers(NamedTuple):
    """Shared memory."""

    q: gl.shared_memory_descriptor  # [M, D]
    k: gl.shared_memory_descriptor  # [STAGES, N, D]
    v: gl.shared_memory_descriptor


class Keys(NamedTuple):
    """The keys and values of one sequence and head in memory."""

    k: HeadRows
    v: HeadRows
    end: tl.tensor


@gluon_kernel
def forward_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, params: Params,
    heads_at_once: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]`, `lse [B, H, Sq]` and its residual of natural scores, or packed."""
    ALIGN: gl.constexpr = CONFIG.ALIGN
    M: gl.constexpr = CONFIG.BLOCK_M
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    STAGES: gl.constexpr = CONFIG.STAGES
    LAYOUTS: gl.constexpr = layouts_of(CONFIG.NUM_WARPS, CONFIG.NUM_WARPS, D, CONFIG.NUM_WARPS)
    PAIRS: gl.constexpr = LAYOUTS.pairs
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    dtype: gl.constexpr = q.data.dtype.element_ty
    lengths = params.lengths
    index = gl.arange(0, CONFIG.BLOCK_B, layout=LAYOUTS.numbers)
    program = in_turns(gl.program_id(0), lengths.num_tiles, heads_at_once)
    work = query_tile(lengths, program, lengths.num_heads_q, 1, M, index)
    if work.start < work.seqlen:
        b = batch_index(params, work)
        seqlen_k = key_seqlen(lengths, work.sequence)
        shift = seqlen_k.seqlen - work.seqlen + params.window.diagonal
        head_k = work.head // (lengths.num_heads_q // lengths.num_heads_k)
        W: gl.constexpr = padded(D)
        WV: gl.constexpr = padded(DV)
        buffers = Buffers(
            gl.allocate_shared_memory(dtype, [M, W], swizzled(W)),
            gl.allocate_shared_memory(dtype, [STAGES, N, W], swizzled(W)),
            gl.allocate_shared_memory(dtype, [STAGES, N, WV], swizzled(WV)),
        )
        stride_q, stride_out = elements(q.stride_m, ALIGN), elements(out.stride_m, ALIGN)
        stride_k, stride_v = elements(k.stride_n, ALIGN), elements(v.stride_n, ALIGN)
        q_rows = HeadRows(head_pointer(q, b, work.head, ALIGN) + work.offset * stride_q, stride_q)
        keys = Keys(
            HeadRows(head_pointer(k, b, head_k, ALIGN) + seqlen_k.offset * stride_k, stride_k),
            HeadRows(head_pointer(v, b, head_k, ALIGN) + seqlen_k.offset * stride_v, stride_v),
            seqlen_k.end,
        )
        copy_rows(buffers.q, q_rows, work.start, work.seqlen, D, LAYOUTS)
        async_copy.commit_group()
        position = work.start + gl.arange(0, M, layout=ROWS)
        last = gl.minimum(work.start + M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, shift, seqlen_k, N)
        listed = block_list(params, b, work.head, work.start // M)
        bounds = key_bounds(params, position[:, None], shift, seqlen_k)
        info = head_info(params, b, work.head, shift)
        with_sink = work.sequence < lengths.batch
        state = empty(params.scores.sinks, work.head, with_sink, info.factor, zeros(M, DV, PAIRS), M, ROWS, CONFIG)
        state = walk(state, blocks, listed, position[:, None], bounds, buffers, keys, params, info, LAYOUTS, CONFIG)

        async_copy.wait_group(0)  # rows without keys have not: `store_rows` may use the same shared memory
        weight, row_lse, row_residual = softmax.finalize(state, info.factor, False, CONFIG.NATURAL)
        exists = position < work.seqlen
        row = b * elements(lse.stride_b, 1) + work.head * elements(lse.stride_h, 1) + work.offset + position
        gl.store(lse.data + row, row_lse, mask=exists)
        if CONFIG.NATURAL:
            gl.store(residual + row, row_residual, mask=exists)
        out_rows = HeadRows(head_pointer(out, b, work.head, ALIGN) + work.offset * stride_out, stride_out)
        store_rows(out_rows, work.start, work.seqlen, state.acc, weight[:, None], DV, LAYOUTS)


@gluon.jit
def empty(
    sinks, head, with_sink, factor, acc, M: gl.constexpr, ROWS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """The state before the first key, as `softmax.init`."""
    m = gl.full([M], -float("inf"), gl.float32, ROWS)
    total = gl.full([M], 0.0, gl.float32, ROWS)
    if sinks is not None:
        sink = gl.load(sinks + head).to(gl.float32)
        sink = gl.where(with_sink, sink if CONFIG.NATURAL else sink * (LOG2E / factor), -INFINITY)
        m = gl.maximum(m, sink)
        total = gl.where(m == -INFINITY, 0.0, 1.0)
    return RowState(m, Sum(total, 0.0), acc)


@gluon.jit
def walk(
    state, blocks, listed, rows, bounds, buffers, keys, params, info, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Update the rows' state with the blocks of keys that they see."""
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    TWO: gl.constexpr = CONFIG.STAGES > 1
    num_masked = num_visits(blocks, listed, params, True, N)
    count = num_masked + num_visits(blocks, listed, params, False, N)
    first = first_visit(listed, params, True)
    if count > 0:
        at = visit(blocks, first, 0, num_masked, params, N)
        copy_rows(buffers.k.index(0), keys.k, at.start, keys.end, D, LAYOUTS)
        async_copy.commit_group()
        if TWO:
            copy_rows(buffers.v.index(0), keys.v, at.start, keys.end, DV, LAYOUTS)
            async_copy.commit_group()
    for n in range(count):
        at = visit(blocks, first, n, num_masked, params, N)
        then = visit(blocks, first, gl.minimum(n + 1, count - 1), num_masked, params, N)
        stage = n % CONFIG.STAGES
        if TWO:
            async_copy.wait_group(1)
            if n + 1 < count:
                copy_rows(buffers.k.index(1 - stage), keys.k, then.start, keys.end, D, LAYOUTS)
        else:
            async_copy.wait_group(0)
            copy_rows(buffers.v.index(0), keys.v, at.start, keys.end, DV, LAYOUTS)
        async_copy.commit_group()
        position = at.start + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
        exists = position < keys.end
        qk = inner_products(buffers.q, buffers.k.index(stage), D, LAYOUTS)
        s = scores.forward(qk, params, info, rows, position, exists, False)
        t = shown(s.t, at, bounds, params, info, rows, position, exists, CONFIG)
        if TWO:
            async_copy.wait_group(1)
            if n + 1 < count:
                copy_rows(buffers.v.index(1 - stage), keys.v, then.start, keys.end, DV, LAYOUTS)
        else:
            async_copy.wait_group(0)
            if n + 1 < count:
                copy_rows(buffers.k.index(0), keys.k, then.start, keys.end, D, LAYOUTS)
        async_copy.commit_group()
        m, alpha, p = softmax.update(state, t, info.factor, False, CONFIG.NATURAL)
        total = softmax.add_row_sums(state, alpha, p, False)
        acc = weighted_sum(state.acc, alpha[:, None], p, buffers.v.index(stage), DV)
        state = RowState(m, total, acc)
    return state


@gluon.jit
def shown(t, at, bounds, params, info, rows, keys, exists, CONFIG: gl.constexpr):
    """The scores of visible pairs, else -inf."""
    BY_PAIR: gl.constexpr = params.scores.mask.data is not None or params.scores.mask_mod is not None
    if BY_PAIR and params.lists.data is None:
        t = mask_fill(t, -INFINITY, bounds, params, info, rows, keys, exists, True, True)
    elif not CONFIG.EVEN:
        if at.masked:
            t = mask_fill(t, -INFINITY, bounds, params, info, rows, keys, exists, True, True)
    return t


@gluon.jit
def weighted_sum(acc, alpha, p, v, D: gl.constexpr):
    """`acc [M, D] * alpha + p [M, N] @ v [N, D]`."""
    a = add_weighted(acc.a * alpha, p, v.slice(0, D.CHUNK_0, dim=1), 0)
    if D.CHUNK_1 == 0:
        return Chunks(a, 0.0)
    else:
        return Chunks(a, add_weighted(acc.b * alpha, p, v.slice(D.CHUNK_0, D.CHUNK_1, dim=1), 0))


@gluon.jit
def add_weighted(acc, p, v, FIRST: gl.constexpr):
    """`acc + p @ v`, for rows of `v` from the first one on, a step at a time as `multiply`."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    if N == K_STEP:
        left = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
        right = v.slice(FIRST, N, dim=0).load(gl.DotOperandLayout(1, acc.type.layout, 2))
        return mma_v2(left, right, acc)
    else:
        a, b = p.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
        return add_weighted(add_weighted(acc, a, v, FIRST), b, v, FIRST + N // 2)
