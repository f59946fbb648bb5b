"""Forward with tangents, as `kernels.tangents`, for chips with mma.sync, in Gluon.

Queries and their tangents stay in shared memory: Triton keeps their fragments in registers, which two sums of values
fill. Of each block, keys are multiplied by both, and values by probabilities and by their tangents, from one load.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .. import scores, softmax
from ..kernel import Pointer, Scalar, gluon_kernel
from ..masking import block_list, first_visit, key_blocks, key_bounds, num_visits
from ..parameters import KeyTensor, Params, QueryTensor, RowTensor
from ..prologue import batch_index, head_info
from ..rows import Chunks, HeadRows, elements, head_pointer
from ..score_tangent import FeatureTangents, score_tangent
from ..sequences import in_turns, key_seqlen, query_tile
from ..softmax import RowState
from .forward import empty, shown
from .tiles import K_STEP, copy_rows, layouts_of, padded, store_rows, swizzled, visit, zeros


class Buffers(NamedTuple):
    """Shared memory."""

    q: gl.shared_memory_descriptor  # [M, D]
    dq: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [N, D]
    dk: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor  # [M, N], where warps divide the columns of sums
    pds: gl.shared_memory_descriptor


class Keys(NamedTuple):
    """Keys, values and their tangents of one sequence and head in memory."""

    k: HeadRows
    v: HeadRows
    dk: HeadRows
    dv: HeadRows
    end: tl.tensor


@dataclass(frozen=True)
class Moving:
    """Which rows have tangents."""

    q: bool
    k: bool
    v: bool


@constexpr_function
def moving_rows(q, k, v):
    return Moving(q, k, v)


class TangentState(NamedTuple):
    rows: RowState
    u: tl.tensor  # [M] sum of exp2(t * factor - m * unit) * ds
    acc: Chunks  # [M, Dv] sum of exp2(t * factor - m * unit) * (dv + ds * v)


@gluon_kernel
def tangents_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, dq: QueryTensor, dk: KeyTensor, dv: KeyTensor,
    dout: QueryTensor, lse: RowTensor, residual: Pointer, dlse: Pointer, moving: FeatureTangents, params: Params,
    heads_at_once: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]`, `lse [B, H, Sq]` with its residual of natural scores, and their tangents, or packed."""
    ALIGN: gl.constexpr = CONFIG.ALIGN
    M: gl.constexpr = CONFIG.BLOCK_M
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    WARPS: gl.constexpr = CONFIG.NUM_WARPS
    DOWN: gl.constexpr = min(WARPS, M // 16)
    LAYOUTS: gl.constexpr = layouts_of(DOWN, DOWN, D, WARPS)
    PAIRS: gl.constexpr = LAYOUTS.pairs
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    DQ: gl.constexpr = dq.data is not None
    DK: gl.constexpr = dk.data is not None
    D_V: gl.constexpr = dv.data is not None
    SHARED: gl.constexpr = DOWN < WARPS
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
            gl.allocate_shared_memory(dtype, [M, W], swizzled(W)) if DQ else 0,
            gl.allocate_shared_memory(dtype, [N, W], swizzled(W)),
            gl.allocate_shared_memory(dtype, [N, W], swizzled(W)) if DK else 0,
            gl.allocate_shared_memory(dtype, [N, WV], swizzled(WV)),
            gl.allocate_shared_memory(dtype, [N, WV], swizzled(WV)) if D_V else 0,
            gl.allocate_shared_memory(dtype, [M, N], swizzled(N)) if SHARED else 0,
            gl.allocate_shared_memory(dtype, [M, N], swizzled(N)) if SHARED and CONFIG.SCORES_MOVE else 0,
        )
        keys = Keys(
            head_rows(k, k.stride_n, b, head_k, seqlen_k.offset, ALIGN),
            head_rows(v, v.stride_n, b, head_k, seqlen_k.offset, ALIGN),
            head_rows(dk, dk.stride_n, b, head_k, seqlen_k.offset, ALIGN) if DK else HeadRows(0, 0),
            head_rows(dv, dv.stride_n, b, head_k, seqlen_k.offset, ALIGN) if D_V else HeadRows(0, 0),
            seqlen_k.end,
        )
        q_rows = head_rows(q, q.stride_m, b, work.head, work.offset, ALIGN)
        copy_rows(buffers.q, q_rows, work.start, work.seqlen, D, LAYOUTS)
        if DQ:
            dq_rows = head_rows(dq, dq.stride_m, b, work.head, work.offset, ALIGN)
            copy_rows(buffers.dq, dq_rows, work.start, work.seqlen, D, LAYOUTS)
        async_copy.commit_group()
        position = work.start + gl.arange(0, M, layout=ROWS)
        last = gl.minimum(work.start + M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, shift, seqlen_k, N)
        listed = block_list(params, b, work.head, work.start // M)
        bounds = key_bounds(params, position[:, None], shift, seqlen_k)
        info = head_info(params, b, work.head, shift)
        dslope = 0.0
        if moving.dslopes.data is not None:
            dslope = scores.load_slope(moving.dslopes, b, work.head, lengths.batch)
        with_sink = work.sequence < lengths.batch
        rows = empty(params.scores.sinks, work.head, with_sink, info.factor, zeros(M, DV, PAIRS), M, ROWS, CONFIG)
        u = gl.full([M], 0.0, gl.float32, ROWS)
        if moving.dsinks is not None:
            u = gl.where(rows.l.total == 0, 0.0, rows.l.total * gl.load(moving.dsinks + work.head).to(gl.float32))
        state = TangentState(rows, u, zeros(M, DV, PAIRS))
        state = walk(
            state, blocks, listed, position[:, None], bounds, buffers, keys, dslope, moving, params, info,
            moving_rows(DQ, DK, D_V), LAYOUTS, CONFIG,
        )  # fmt: skip

        async_copy.wait_group(0)  # rows without keys have not: `store_rows` may use the same shared memory
        weight, row_lse, row_residual = softmax.finalize(state.rows, info.factor, False, CONFIG.NATURAL)
        row_dlse = state.u * weight
        exists = position < work.seqlen
        row = b * elements(lse.stride_b, 1) + work.head * elements(lse.stride_h, 1) + work.offset + position
        gl.store(lse.data + row, row_lse, mask=exists)
        gl.store(dlse + row, row_dlse, mask=exists)
        if CONFIG.NATURAL:
            gl.store(residual + row, row_residual, mask=exists)
        out_rows = head_rows(out, out.stride_m, b, work.head, work.offset, ALIGN)
        dout_rows = head_rows(dout, dout.stride_m, b, work.head, work.offset, ALIGN)
        moved = along_row(state.acc, state.rows.acc, row_dlse[:, None], DV)
        store_rows(out_rows, work.start, work.seqlen, state.rows.acc, weight[:, None], DV, LAYOUTS)
        store_rows(dout_rows, work.start, work.seqlen, moved, weight[:, None], DV, LAYOUTS)


@gluon.jit
def head_rows(x, stride, b, head, offset, ALIGN: gl.constexpr):
    """The rows of a sequence and head."""
    step = elements(stride, ALIGN)
    return HeadRows(head_pointer(x, b, head, ALIGN) + offset * step, step)


@gluon.jit
def along_row(moved, acc, dlse, D: gl.constexpr):
    """The tangent of `out`, before its weight."""
    a = moved.a - dlse * acc.a
    if D.CHUNK_1 == 0:
        return Chunks(a, 0.0)
    else:
        return Chunks(a, moved.b - dlse * acc.b)


@gluon.jit
def walk(
    state, blocks, listed, rows, bounds, buffers, keys, dslope, moving, params, info,
    MOVING: gl.constexpr, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Update the rows' state with the blocks of keys that they see."""
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    BY_PAIR: gl.constexpr = params.scores.mask.data is not None or params.scores.mask_mod is not None
    # A pair without weight adds nothing, whatever its tangent is: not 0 * NaN of a key that is hidden.
    SELECT: gl.constexpr = CONFIG.NATURAL or BY_PAIR or not CONFIG.EVEN
    num_masked = num_visits(blocks, listed, params, True, N)
    count = num_masked + num_visits(blocks, listed, params, False, N)
    first = first_visit(listed, params, True)
    if count > 0:
        at = visit(blocks, first, 0, num_masked, params, N)
        copy_pair(buffers.k, buffers.dk, keys.k, keys.dk, at, keys.end, MOVING.k, D, LAYOUTS)
    for n in range(count):
        at = visit(blocks, first, n, num_masked, params, N)
        then = visit(blocks, first, gl.minimum(n + 1, count - 1), num_masked, params, N)
        async_copy.wait_group(0)
        copy_pair(buffers.v, buffers.dv, keys.v, keys.dv, at, keys.end, MOVING.v, DV, LAYOUTS)
        position = at.start + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
        exists = position < keys.end
        qk, dqk = score_products(buffers, D, MOVING, LAYOUTS)
        s = scores.forward(qk, params, info, rows, position, exists, False)
        t = shown(s.t, at, bounds, params, info, rows, position, exists, CONFIG)
        m, alpha, p = softmax.update(state.rows, t, info.factor, False, CONFIG.NATURAL)
        total = softmax.add_row_sums(state.rows, alpha, p, False)
        u, pds = state.u, p
        if CONFIG.SCORES_MOVE:
            pds = p * score_tangent(dqk, s, moving, dslope, params, info, rows, position, exists, CONFIG)
            if SELECT:
                pds = gl.where(p == 0.0, 0.0, pds)
            u = u * alpha + gl.sum(pds, 1)
        elif moving.dsinks is not None:
            u = u * alpha
        async_copy.wait_group(0)
        if n + 1 < count:
            copy_pair(buffers.k, buffers.dk, keys.k, keys.dk, then, keys.end, MOVING.k, D, LAYOUTS)
        acc, moved = value_products(state, alpha[:, None], p, pds, buffers, DV, MOVING, CONFIG)
        state = TangentState(RowState(m, total, acc), u, moved)
    return state


@gluon.jit
def copy_pair(to, to_moving, x, dx, at, end, MOVES: gl.constexpr, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """Begin to load a block of rows, and their tangents if they move."""
    copy_rows(to, x, at.start, end, D, LAYOUTS)
    if MOVES:
        copy_rows(to_moving, dx, at.start, end, D, LAYOUTS)
    async_copy.commit_group()


@gluon.jit
def score_products(buffers, D: gl.constexpr, MOVING: gl.constexpr, LAYOUTS: gl.constexpr):
    """`q @ k^T`, and its tangent `[M, N]`; each fragment is loaded once."""
    M: gl.constexpr = buffers.q.shape[0]
    N: gl.constexpr = buffers.k.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS.pairs, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUTS.pairs, 2)
    qk = gl.full([M, N], 0.0, gl.float32, LAYOUTS.pairs)
    dqk = qk
    for n in gl.static_range((D.WIDTH + K_STEP - 1) // K_STEP):
        left = buffers.q.slice(n * K_STEP, K_STEP, dim=1).load(LEFT)
        right = buffers.k.permute((1, 0)).slice(n * K_STEP, K_STEP, dim=0).load(RIGHT)
        qk = mma_v2(left, right, qk)
        if MOVING.q:
            dqk = mma_v2(buffers.dq.slice(n * K_STEP, K_STEP, dim=1).load(LEFT), right, dqk)
        if MOVING.k:
            dqk = mma_v2(left, buffers.dk.permute((1, 0)).slice(n * K_STEP, K_STEP, dim=0).load(RIGHT), dqk)
    return qk, dqk


@gluon.jit
def value_products(
    state, alpha, p, pds, buffers, D: gl.constexpr, MOVING: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Rescale both sums of values by `alpha`, then add `p @ v`, and `pds @ v + p @ dv`."""
    dtype: gl.constexpr = buffers.v.dtype
    p, pds = p.to(dtype), pds.to(dtype)
    if CONFIG.NUM_WARPS * 16 > CONFIG.BLOCK_M:  # a warp has some of a row's probabilities, and needs all
        buffers.p.store(p)
        if CONFIG.SCORES_MOVE:
            buffers.pds.store(pds)
    a, moved_a = value_columns(state.rows.acc.a * alpha, state.acc.a * alpha, p, pds, buffers, 0, MOVING, CONFIG)
    if D.CHUNK_1 == 0:
        return Chunks(a, 0.0), Chunks(moved_a, 0.0)
    else:
        b, moved_b = value_columns(
            state.rows.acc.b * alpha, state.acc.b * alpha, p, pds, buffers, D.CHUNK_0, MOVING, CONFIG
        )
        return Chunks(a, b), Chunks(moved_a, moved_b)


@gluon.jit
def value_columns(
    acc, moved, p, pds, buffers, FIRST: gl.constexpr, MOVING: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """`value_products` of columns from the first one on."""
    WIDTH: gl.constexpr = acc.shape[1]
    v = buffers.v.slice(FIRST, WIDTH, dim=1)
    dv = buffers.dv.slice(FIRST, WIDTH, dim=1) if MOVING.v else 0
    if CONFIG.NUM_WARPS * 16 > CONFIG.BLOCK_M:
        LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        for n in gl.static_range(CONFIG.BLOCK_N // K_STEP):
            left = buffers.p.slice(n * K_STEP, K_STEP, dim=1).load(LEFT)
            left_moving = left
            if CONFIG.SCORES_MOVE:
                left_moving = buffers.pds.slice(n * K_STEP, K_STEP, dim=1).load(LEFT)
            acc, moved = add_step(acc, moved, left, left_moving, v, dv, n * K_STEP, MOVING, CONFIG)
        return acc, moved
    else:
        return add_steps(acc, moved, p, pds, v, dv, 0, MOVING, CONFIG)


@gluon.jit
def add_steps(
    acc, moved, p, pds, v, dv, FIRST: gl.constexpr, MOVING: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Products with rows of values from the first one on, a step at a time."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    if N == K_STEP:
        LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        left = gl.convert_layout(p, LEFT, assert_trivial=True)
        left_moving = gl.convert_layout(pds, LEFT, assert_trivial=True)
        return add_step(acc, moved, left, left_moving, v, dv, FIRST, MOVING, CONFIG)
    else:
        a, b = p.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
        moving_a, moving_b = pds.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
        acc, moved = add_steps(acc, moved, a, moving_a, v, dv, FIRST, MOVING, CONFIG)
        return add_steps(acc, moved, b, moving_b, v, dv, FIRST + N // 2, MOVING, CONFIG)


@gluon.jit
def add_step(
    acc, moved, left, left_moving, v, dv, FIRST: gl.constexpr, MOVING: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Products with `K_STEP` rows of values."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    right = v.slice(FIRST, K_STEP, dim=0).load(RIGHT)
    acc = mma_v2(left, right, acc)
    if CONFIG.SCORES_MOVE:
        moved = mma_v2(left_moving, right, moved)
    if MOVING.v:
        moved = mma_v2(left, dv.slice(FIRST, K_STEP, dim=0).load(RIGHT), moved)
    return acc, moved
