"""Forward kernel of latent rows: keys of 576 features, the first 512 of them values, one key head for all query heads.

A tile has 64 rows, whose sums of 512 columns are as many registers as two warpgroups have. So each warpgroup has half
of the columns. The keys of a block are loaded once, for scores and for values, and the memory of a core holds two
blocks. Each warpgroup computes the scores and p of one of them (`handoff` gives p to the other one), so that one
multiplies while the other one computes exponentials:

    first:   scores 0, softmax 0,          values 0, values 1 | scores 2, ...
    second:  scores 1, values 0, softmax 1,          values 1 | scores 3, ...

One row_max serves both; each warpgroup adds up its own p in l.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..forward.mainloop import mma_operand, zero_scores
from ..shared import softmax
from ..shared.column_masks import bits_below, where_bits
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.epilogue import ALIGN, OutputTensor
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait, gemm_wait_pair, scale_rows, zero_accumulators
from ..shared.partitions import run_partitions
from ..shared.pipeline import FIRST_BARRIER, LAST_BARRIER, make_buffers
from .handoff import Handoff, make_handoff, receive_block, receive_sums, send_block, send_sums
from .producer import CHUNKS, ORDER, LatentBuffers, make_block, matrix, producer_warp, release, wait_chunk
from .rows import (
    LatentKeys,
    LatentRows,
    head_of,
    page_of,
    queries_of,
    query_of,
    tile_of_program,
    visible_stop,
)


class LatentUnits(NamedTuple):
    """Factors of scores (`scalars.score_units`)."""

    factor: Scalar
    multiplier: Scalar


class LatentContext(NamedTuple):
    """What both warpgroups have in common."""

    buffers: LatentBuffers
    handoff: Handoff
    out: OutputTensor
    lse: gl.tensor
    rows: LatentRows
    keys: LatentKeys
    units: LatentUnits


@kernel
def latent_forward_kernel(
    q_desc: Pointer, k_desc: Pointer, out: OutputTensor, lse: Pointer, rows: LatentRows, keys: LatentKeys,
    units: LatentUnits, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes: q `[1, 1, MMA_M, columns]` of `[B, 1, rows, D]`, k `[1, 1, 1, MMA_M, columns]` of pages.

    With `num_splits`, out and lse are those of each split of the keys, `[num_splits * B, H, Sq, Dv]` in fp32 and
    `[num_splits * B, H, Sq]`.
    """
    gl.static_assert(FIRST_BARRIER + 2 * CHUNKS - 1 <= LAST_BARRIER)
    gl.static_assert(CONFIG.block_n == 2 * MMA_M)
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    q = make_buffers(q_desc, 1, HEAD_DIM)
    buffers = LatentBuffers(q, (make_block(k_desc, HEAD_DIM), make_block(k_desc, HEAD_DIM)))
    handoff = make_handoff(q_desc.dtype)
    fence_async_shared()
    context = LatentContext(buffers, handoff, out, lse, rows, keys, units)
    run_partitions(
        CONFIG,
        [(first_warpgroup, (context, CONFIG)), (second_warpgroup, (context, CONFIG))],
        [(producer_warp, (q_desc, k_desc, buffers, rows, keys, CONFIG))],
    )


@gluon.jit
def first_warpgroup(context, CONFIG: gl.constexpr):
    """The partition with the first half of the columns, and the scores of the first block of each pair."""
    handoff, blocks, tile, stops, full_stop, acc, row_max, l = begin(context, CONFIG)  # noqa: E741
    for n in range(tile.lo, tile.hi):
        count = n - tile.lo
        page = page_of(context.keys, tile, 2 * n, CONFIG)
        s = gemm_wait((scores(context.buffers, count, 0),))[0]
        row_max, alpha, changed, p = probabilities(s, row_max, stops, full_stop, page, 2 * n, context.units, CONFIG)
        l = l * alpha + softmax.thread_row_sum(p)  # noqa: E741
        p = p.to(context.buffers.q.data[0].dtype)
        send_block(handoff, p, row_max, alpha, changed, 0)
        acc = softmax.rescale(acc, alpha, changed)
        acc = add_values(blocks[0], acc, mma_operand(p, acc, p.dtype), 0, 0)
        p, row_max, alpha, changed = receive_block(handoff, acc, count, 0)
        l = l * alpha  # noqa: E741
        acc = softmax.rescale(acc, alpha, changed)
        wait_values(blocks[1], count, 0)
        acc = add_values(blocks[1], acc, p, 1, 0)
    send_sums(handoff, l, 0)
    l = l + receive_sums(handoff, tile.hi - tile.lo, 0)  # noqa: E741
    store(context, tile, acc, row_max, l, 0, CONFIG)


@gluon.jit
def second_warpgroup(context, CONFIG: gl.constexpr):
    """The partition with the second half of the columns, and the scores of the second block of each pair."""
    handoff, blocks, tile, stops, full_stop, acc, row_max, l = begin(context, CONFIG)  # noqa: E741
    for n in range(tile.lo, tile.hi):
        count = n - tile.lo
        page = page_of(context.keys, tile, 2 * n + 1, CONFIG)
        s = scores(context.buffers, count, 1)
        other, row_max, alpha, changed = receive_block(handoff, acc, count, 1)
        l = l * alpha  # noqa: E741
        s = gemm_wait((s,))[0]  # ptxas would serialize products in flight beside this branch
        acc = softmax.rescale(acc, alpha, changed)
        wait_values(blocks[0], count, 1)
        acc = gemm_rs(acc, other, value_chunks(blocks[0], 1))
        row_max, alpha, changed, p = probabilities(s, row_max, stops, full_stop, page, 2 * n + 1, context.units, CONFIG)
        l = l * alpha + softmax.thread_row_sum(p)  # noqa: E741
        p = p.to(context.buffers.q.data[0].dtype)
        send_block(handoff, p, row_max, alpha, changed, 1)
        acc, p, l = gemm_wait_pair(acc, p, l)  # noqa: E741
        release(0, 2)
        release(0, 3)
        acc = softmax.rescale(acc, alpha, changed)
        acc = add_values(blocks[1], acc, mma_operand(p, acc, p.dtype), 1, 1)
    others = receive_sums(handoff, tile.hi - tile.lo, 1)
    send_sums(handoff, l, 1)
    store(context, tile, acc, row_max, l + others, 1, CONFIG)


@gluon.jit
def begin(context, CONFIG: gl.constexpr):
    """What both warpgroups begin with."""
    HALF: gl.constexpr = CONFIG.head_dim_v.half
    tile = tile_of_program(context.rows, context.keys, CONFIG)
    acc = zero_accumulators(HALF)
    s = zero_scores(MMA_M)
    full_stop = visible_stop(context.rows, context.keys, tile, 0)
    stops = visible_stop(
        context.rows, context.keys, tile, queries_of(context.rows, tile, gl.SliceLayout(1, s.type.layout))
    )
    row_max, l = softmax.initial_state(s, None, 0, False, False)  # noqa: E741
    mbarrier.wait(context.buffers.q.full.index(0), 0)
    return context.handoff, context.buffers.blocks, tile, stops, full_stop, acc, row_max, l


@gluon.jit
def scores(buffers, count, n: gl.constexpr):
    """Issue the products of q and block n of a pair, a chunk as soon as it is there."""
    q, block = buffers.q.data, buffers.blocks[n]
    wait_chunk(block, ORDER[n][0], count)
    s = gemm_nt((matrix(q[CHUNKS]),), (matrix(block.data[CHUNKS]),), zero_scores(MMA_M))
    for place in gl.static_range(CHUNKS):
        if place > 0:
            wait_chunk(block, ORDER[n][place], count)
        s = gemm_nt((matrix(q[ORDER[n][place]]),), (matrix(block.data[ORDER[n][place]]),), s, True)
    return s


@gluon.jit
def probabilities(s, row_max, stops, full_stop, page, block, units, CONFIG: gl.constexpr):
    """`softmax.update` for the visible scores of a block."""
    if units.multiplier is not None:
        s = s * units.multiplier
    if (page < 0) | ((block + 1) * MMA_M > full_stop):
        s = where_bits(bits_below(gl.where(page < 0, 0, stops - block * MMA_M), s), s, -softmax.INFINITY)
    return softmax.update(row_max, s, units.factor, CONFIG.speculative_exps, False)


@gluon.jit
def value_chunks(block, half: gl.constexpr):
    """The chunks of one half of the values' columns."""
    return matrix(block.data[2 * half]), matrix(block.data[2 * half + 1])


@gluon.jit
def wait_values(block, count, half: gl.constexpr):
    """Wait for values of which the other warpgroup has computed scores: they are there, but this one has not looked."""
    wait_chunk(block, 2 * half, count)
    wait_chunk(block, 2 * half + 1, count)


@gluon.jit
def add_values(block, acc, p, n: gl.constexpr, half: gl.constexpr):
    """Add the products of p and the values of block n to a half of the columns, and release their memory."""
    acc = gemm_rs(acc, p, value_chunks(block, half))
    first = warpgroup_mma_wait(1, deps=(acc[0],))
    release(n, 2 * half)
    acc = gemm_wait((first, acc[1]))
    release(n, 2 * half + 1)
    return acc


@gluon.jit
def store(context, tile, acc, row_max, l, half: gl.constexpr, CONFIG: gl.constexpr):  # noqa: E741
    """Store half of the columns of finished rows, and their lse once."""
    rows, out = context.rows, context.out
    layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    inv_l, lse, _ = softmax.finalize(row_max, l, layout, False, False)
    b = (tile.split * context.keys.batch + tile.b).to(gl.int64)
    if half == 0:
        row = tile.first_row + gl.arange(0, MMA_M, layout)
        place = (b * rows.num_heads + head_of(rows, row)) * rows.seqlen_q + query_of(rows, row)
        gl.store(context.lse + place, lse, mask=row < rows.seqlen_q * rows.num_heads)
    for c in gl.static_range(len(acc)):
        x = scale_rows(acc[c], inv_l).to(out.data.dtype.element_ty)
        if out.data.dtype.element_ty != gl.float32:
            x = by_rows(x, context.buffers.blocks[0].data[2 * half + c])
        store_columns(out, rows, x, b, tile.first_row, CONFIG.head_dim_v.offsets[2 * half + c])


@gluon.jit
def by_rows(x, chunk):
    """`x` in a layout in which threads hold 16 bytes of a row, through memory of values that nobody reads any more."""
    smem = matrix(chunk)
    smem.store(x)
    return smem.load(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def store_columns(out, rows, x, b, first_row, FIRST: gl.constexpr):
    """Store columns of rows from FIRST on."""
    layout: gl.constexpr = x.type.layout
    row = first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    places = (head_of(rows, row).to(gl.int64) * out.stride_h + query_of(rows, row).to(gl.int64) * out.stride_m) * ALIGN
    pointers = out.data + b * out.stride_b * ALIGN + gl.expand_dims(places, 1) + gl.expand_dims(feature, 0)
    gl.store(pointers, x, mask=gl.expand_dims(row < rows.seqlen_q * rows.num_heads, 1))
