"""The forward pass of heads of 257 to 512 features for chips with mma.sync, in Gluon.

Sums of 64 rows fill half of the registers, and q most of the shared memory that Ada has. So warps divide the columns of
the sums, probabilities go through shared memory, and keys and values pass in chunks of columns through a ring of slots.
"""

from typing import NamedTuple

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ... import constants
from .. import scores, softmax
from ..kernel import Pointer, Scalar, gluon_kernel
from ..masking import block_list, first_visit, key_blocks, key_bounds, num_visits
from ..parameters import KeyTensor, Params, QueryTensor, RowTensor
from ..prologue import batch_index, head_info
from ..rows import HeadRows, elements, head_pointer
from ..sequences import in_turns, key_seqlen, query_tile
from ..softmax import RowState
from .forward import Keys, empty, shown
from .tiles import K_STEP, Layouts, begin_copy, multiply, products_layout, swizzled, visit

COLUMNS = gl.constexpr(constants.WIDE_COLUMNS)  # of a chunk


class Buffers(NamedTuple):
    """Shared memory."""

    q: gl.shared_memory_descriptor  # [chunks, M, COLUMNS]
    ring: tuple  # STAGES slots [N, COLUMNS] for chunks of keys and values
    p: gl.shared_memory_descriptor  # [M, N]


@constexpr_function
def wide_layouts(M, WARPS):
    """Layouts of a program whose warps have 32 rows of pairs and of sums."""
    pairs = products_layout(max(1, M // 32), WARPS)
    across = COLUMNS.value // 8  # threads that copy a row, 16 bytes each
    copies = gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])
    return Layouts(pairs, pairs, copies, gl.BlockedLayout([1], [32], [WARPS], [0]))


@constexpr_function
def num_chunks(D):
    return -(-D.WIDTH // COLUMNS.value)


@constexpr_function
def num_steps(D, DV, STAGES):
    """Chunks of a block, and steps without one, so that each chunk has the same slot in all blocks."""
    return -(-(num_chunks(D) + num_chunks(DV)) // STAGES) * STAGES


@constexpr_function
def columns_of(chunk, D):
    """Columns of a chunk's sums: a power of two."""
    rest = D.WIDTH - chunk * COLUMNS.value
    return COLUMNS.value if rest > COLUMNS.value // 2 else COLUMNS.value // 2


@constexpr_function
def steps_of(chunk, D):
    """Steps of a product over the features of a chunk."""
    return -(-min(COLUMNS.value, D.WIDTH - chunk * COLUMNS.value) // K_STEP.value)


@gluon_kernel
def wide_forward_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, params: Params,
    heads_at_once: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]`, `lse [B, H, Sq]` and its residual of natural scores, or packed."""
    ALIGN: gl.constexpr = CONFIG.ALIGN
    M: gl.constexpr = CONFIG.BLOCK_M
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    LAYOUTS: gl.constexpr = wide_layouts(M, CONFIG.NUM_WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUTS.pairs)
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
        buffers = Buffers(
            gl.allocate_shared_memory(dtype, [num_chunks(D), M, COLUMNS], swizzled(COLUMNS)),
            slots(dtype, N, CONFIG.STAGES),
            gl.allocate_shared_memory(dtype, [M, N], swizzled(N)),
        )
        stride_q, stride_out = elements(q.stride_m, ALIGN), elements(out.stride_m, ALIGN)
        stride_k, stride_v = elements(k.stride_n, ALIGN), elements(v.stride_n, ALIGN)
        q_rows = HeadRows(head_pointer(q, b, work.head, ALIGN) + work.offset * stride_q, stride_q)
        keys = Keys(
            HeadRows(head_pointer(k, b, head_k, ALIGN) + seqlen_k.offset * stride_k, stride_k),
            HeadRows(head_pointer(v, b, head_k, ALIGN) + seqlen_k.offset * stride_v, stride_v),
            seqlen_k.end,
        )
        for c in gl.static_range(num_chunks(D)):
            copy_chunk(buffers.q.index(c), q_rows, work.start, work.seqlen, c, D, LAYOUTS)
        async_copy.commit_group()
        position = work.start + gl.arange(0, M, layout=ROWS)
        last = gl.minimum(work.start + M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, shift, seqlen_k, N)
        listed = block_list(params, b, work.head, work.start // M)
        bounds = key_bounds(params, position[:, None], shift, seqlen_k)
        info = head_info(params, b, work.head, shift)
        with_sink = work.sequence < lengths.batch
        sums = no_sums(M, DV, LAYOUTS)
        state = empty(params.scores.sinks, work.head, with_sink, info.factor, sums, M, ROWS, CONFIG)
        state = walk(state, blocks, listed, position[:, None], bounds, buffers, keys, params, info, LAYOUTS, CONFIG)

        async_copy.wait_group(0)  # rows without keys have not: `store_rows` may use the same shared memory
        weight, row_lse, row_residual = softmax.finalize(state, info.factor, False, CONFIG.NATURAL)
        exists = position < work.seqlen
        row = b * elements(lse.stride_b, 1) + work.head * elements(lse.stride_h, 1) + work.offset + position
        gl.store(lse.data + row, row_lse, mask=exists)
        if CONFIG.NATURAL:
            gl.store(residual + row, row_residual, mask=exists)
        out_rows = HeadRows(head_pointer(out, b, work.head, ALIGN) + work.offset * stride_out, stride_out)
        for c in gl.static_range(num_chunks(DV)):
            store_chunk(out_rows, work.start, work.seqlen, state.acc[c], weight[:, None], c, DV, LAYOUTS)


@gluon.jit
def slots(dtype: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr):
    """An allocation each: with one for all, the compiler synchronizes warps before each load of another slot."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(dtype, [N, COLUMNS], swizzled(COLUMNS)),)  # noqa: RUF005
    return found


@gluon.jit
def no_sums(M: gl.constexpr, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """Empty sums `[M, D]`, a tensor for each chunk."""
    sums = ()
    for c in gl.static_range(num_chunks(D)):
        sums = sums + (gl.full([M, columns_of(c, D)], 0.0, gl.float32, LAYOUTS.pairs),)  # noqa: RUF005
    return sums


@gluon.jit
def walk(
    state, blocks, listed, rows, bounds, buffers, keys, params, info, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Update the rows' state with the blocks of keys that they see."""
    N: gl.constexpr = CONFIG.BLOCK_N
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    OF_K: gl.constexpr = num_chunks(D)
    OF_V: gl.constexpr = num_chunks(DV)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS.pairs, 2)
    num_masked = num_visits(blocks, listed, params, True, N)
    count = num_masked + num_visits(blocks, listed, params, False, N)
    first = first_visit(listed, params, True)
    if count > 0:
        at = visit(blocks, first, 0, num_masked, params, N)
        for c in gl.static_range(CONFIG.STAGES - 1):
            copy_keys(buffers.ring[c], keys, at.start, c, LAYOUTS, CONFIG)
            async_copy.commit_group()
    for n in range(count):
        at = visit(blocks, first, n, num_masked, params, N)
        then = visit(blocks, first, gl.minimum(n + 1, count - 1), num_masked, params, N)
        more = n + 1 < count
        position = at.start + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUTS.pairs))[None, :]
        exists = position < keys.end
        qk = gl.full([rows.shape[0], N], 0.0, gl.float32, LAYOUTS.pairs)
        for c in gl.static_range(OF_K):
            chunk = next_chunk(buffers.ring, keys, at, then, more, c, LAYOUTS, CONFIG)
            qk = multiply(qk, buffers.q.index(c), chunk.permute((1, 0)), steps_of(c, D))
        s = scores.forward(qk, params, info, rows, position, exists, False)
        t = shown(s.t, at, bounds, params, info, rows, position, exists, CONFIG)
        m, alpha, p = softmax.update(state, t, info.factor, False, CONFIG.NATURAL)
        total = softmax.add_row_sums(state, alpha, p, False)
        buffers.p.store(p.to(buffers.p.dtype))
        sums = ()
        left = ()
        for c in gl.static_range(OF_V):
            chunk = next_chunk(buffers.ring, keys, at, then, more, OF_K + c, LAYOUTS, CONFIG)
            if c == 0:
                left = fragments(buffers.p, LEFT)
            values = chunk.slice(0, columns_of(c, DV), dim=1)
            sums = sums + (add_weighted(state.acc[c] * alpha[:, None], left, values),)  # noqa: RUF005
        for c in gl.static_range(OF_K + OF_V, num_steps(D, DV, CONFIG.STAGES)):
            next_chunk(buffers.ring, keys, at, then, more, c, LAYOUTS, CONFIG)
        state = RowState(m, total, sums)
    return state


@gluon.jit
def next_chunk(
    ring, keys, at, then, more, CHUNK: gl.constexpr, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Wait for a chunk of a block's keys or values; begin to load one into the slot that is read no more."""
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    ALL: gl.constexpr = num_steps(D, DV, CONFIG.STAGES)
    AHEAD: gl.constexpr = CHUNK + CONFIG.STAGES - 1
    async_copy.wait_group(CONFIG.STAGES - 2)
    free = ring[AHEAD % CONFIG.STAGES]
    if AHEAD < ALL:
        copy_keys(free, keys, at.start, AHEAD, LAYOUTS, CONFIG)
    elif more:
        copy_keys(free, keys, then.start, AHEAD - ALL, LAYOUTS, CONFIG)
    async_copy.commit_group()
    return ring[CHUNK % CONFIG.STAGES]


@gluon.jit
def copy_keys(slot, keys, start, CHUNK: gl.constexpr, LAYOUTS: gl.constexpr, CONFIG: gl.constexpr):
    """Begin to load a chunk of a block: those of keys come first."""
    D: gl.constexpr = CONFIG.HEAD_DIM
    DV: gl.constexpr = CONFIG.HEAD_DIM_V
    OF_K: gl.constexpr = num_chunks(D)
    ALL: gl.constexpr = OF_K + num_chunks(DV)
    if CHUNK < OF_K:
        copy_chunk(slot, keys.k, start, keys.end, CHUNK, D, LAYOUTS)
    elif CHUNK < ALL:
        copy_chunk(slot, keys.v, start, keys.end, CHUNK - OF_K, DV, LAYOUTS)


@gluon.jit
def copy_chunk(slot, x, first, seqlen, CHUNK: gl.constexpr, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """Begin to load a chunk of rows; those that do not exist are 0, and features past the last one."""
    row = first + gl.arange(0, slot.shape[0], layout=gl.SliceLayout(1, LAYOUTS.copies))
    d = CHUNK * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUTS.copies))
    pointers = (x.data + row * x.stride)[:, None] + d[None, :]
    begin_copy(slot, pointers, mask=(row < seqlen)[:, None] & (d < D.WIDTH)[None, :])


@gluon.jit
def fragments(p, LEFT: gl.constexpr):
    """Probabilities as left operands, a step of keys each."""
    found = ()
    for n in gl.static_range(p.shape[1] // K_STEP):
        found = found + (p.slice(n * K_STEP, K_STEP, dim=1).load(LEFT),)  # noqa: RUF005
    return found


@gluon.jit
def add_weighted(acc, left, v):
    """`acc [M, D] + p @ v [N, D]`."""
    for n in gl.static_range(v.shape[0] // K_STEP):
        right = v.slice(n * K_STEP, K_STEP, dim=0).load(gl.DotOperandLayout(1, acc.type.layout, 2))
        acc = mma_v2(left[n], right, acc)
    return acc


@gluon.jit
def store_chunk(
    x, first, seqlen, sums, factor, CHUNK: gl.constexpr, D: gl.constexpr, LAYOUTS: gl.constexpr
):  # fmt: skip
    """Store the chunk of those rows that exist, times `factor [M, 1]`."""
    values = gl.convert_layout((sums * factor).to(x.data.dtype.element_ty), LAYOUTS.copies)
    row = first + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUTS.copies))
    d = CHUNK * COLUMNS + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUTS.copies))
    pointers = (x.data + row * x.stride)[:, None] + d[None, :]
    gl.store(pointers, values, mask=(row < seqlen)[:, None] & (d < D.WIDTH)[None, :])
