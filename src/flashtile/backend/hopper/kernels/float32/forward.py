"""Forward kernel of float32 for Hopper, in Gluon: products of bfloat16 parts (`shared.parts`) and compensated sums.

A scheduler warp, a producer warp, and two consumer warpgroups of 64 rows each; the products of one overlap the softmax
of the other.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..shared.column_masks import where_bits
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.coordinates import kv_coord, q_coord
from ..shared.epilogue import OutputTensor, store_accumulators
from ..shared.masking import MaskBounds, n_block_range, visible_keys
from ..shared.mma import MMA_M, scale_rows
from ..shared.partitions import numbered, run_partitions
from ..shared.parts import add_product, large_product, small_products, zero_sums
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    Pipeline,
    SmemBuffers,
    acquire_and_load,
    consumer_release,
    consumer_wait,
    expect_bytes,
    load_boxes,
    make_buffers,
    make_mbarriers,
    make_pipeline,
    stage_chunks,
)
from ..shared.ptx import opaque, wait_prerequisites
from ..shared.softmax import INFINITY
from ..shared.tile_scheduler import (
    REQUEST_DISTANCE,
    PlainScheduler,
    TileQueue,
    UnpagedSeqlens,
    make_tile_queue,
    pop_tile,
    request_tile,
    scheduler_warp,
)
from . import softmax

NUM_WARPGROUPS = gl.constexpr(2)


class Pipelines(NamedTuple):
    """Buffers between the producer warp and the consumer warpgroups."""

    q: SmemBuffers  # one for each warpgroup
    q_empty: gl.shared_memory_descriptor  # [NUM_WARPGROUPS, 1] mbarriers
    kv: Pipeline  # block n: k in load 2n, v in load 2n + 1


class Context(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: Pipelines
    output: OutputTensor
    columns: gl.tensor | None
    lse: gl.tensor  # pointer, [B * H, Sq] or [H, T]
    stride_lse: gl.tensor
    queue: TileQueue
    bounds: MaskBounds
    diagonal: gl.tensor
    factor: gl.tensor  # makes base-2 logarithms of scores
    multiplier: gl.tensor | None  # makes scores of products, where the factor does not


@kernel
def float32_forward_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, out: OutputTensor, lse: Pointer, stride_lse: Scalar,
    columns: Scalar, factor: Scalar, multiplier: Scalar, scheduler: PlainScheduler, seqlens: UnpagedSeqlens,
    bounds: MaskBounds, CONFIG: gl.constexpr,
):  # fmt: skip
    """Store `out` and `lse`. Boxes are `[1, 1, MMA_M, columns]` of q, and `[1, 1, BLOCK_N, columns]` of k and v."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    gl.static_assert(FIRST_BARRIER + CONFIG.kv_stages - 1 <= LAST_BARRIER)
    pipelines = Pipelines(
        make_buffers(q_desc, NUM_WARPGROUPS, HEAD_DIM),
        make_mbarriers(NUM_WARPGROUPS, 1),
        make_pipeline(k_desc, CONFIG.kv_stages, NamedBarriers(FIRST_BARRIER, 128 * NUM_WARPGROUPS + 32), HEAD_DIM),
    )
    queue = make_tile_queue(NUM_WARPGROUPS + 1)
    fence_async_shared()
    wait_prerequisites()

    context = Context(
        pipelines, out, columns, lse, stride_lse, queue, bounds, scheduler.diagonal, factor, multiplier
    )  # fmt: skip
    run_partitions(
        CONFIG,
        numbered(consumer_warpgroup, NUM_WARPGROUPS, (context, CONFIG, PACKED)),
        [
            (producer_warp, (q_desc, k_desc, v_desc, pipelines, queue, CONFIG, PACKED)),
            (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
        ],
    )


@gluon.jit
def producer_warp(q_desc, k_desc, v_desc, pipelines, queue, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that loads: a tile of rows, then the keys and values that it sees, the last ones first."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.kv_stages
    tile_count = 0
    count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        request_tile(queue, tile.hi - tile.lo < REQUEST_DISTANCE)
        first_key = (tile.hi - 1) * CONFIG.block_n
        for n in range(tile.lo, tile.hi):
            request_tile(queue, n == tile.hi - REQUEST_DISTANCE)
            if n == tile.lo:
                for warpgroup in gl.static_range(NUM_WARPGROUPS):
                    coord = q_coord(tile, tile.head, tile.first_row + warpgroup * MMA_M, PACKED)
                    mbarrier.wait(pipelines.q_empty.index(warpgroup), (tile_count & 1) ^ 1)
                    expect_bytes(pipelines.q, q_desc, warpgroup, HEAD_DIM)
                    load_boxes(pipelines.q, q_desc, coord, warpgroup, HEAD_DIM)
            coord = kv_coord(tile, first_key, PACKED)
            acquire_and_load(pipelines.kv, k_desc, coord, 2 * count, STAGES, HEAD_DIM)
            acquire_and_load(pipelines.kv, v_desc, coord, 2 * count + 1, STAGES, HEAD_DIM)
            first_key -= CONFIG.block_n
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes 64 rows of each tile."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.kv_stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    pipelines, queue, bounds = context.pipelines, context.queue, context.bounds
    q, kv = pipelines.q, pipelines.kv
    dtype: gl.constexpr = q.data[0].dtype
    zeros = gl.zeros([MMA_M, BLOCK_N], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        first_row = tile.first_row + warpgroup * MMA_M
        shift = tile.seqlen_k - tile.seqlen_q + context.diagonal
        blocks = n_block_range(bounds, first_row, first_row + (MMA_M - 1), shift, tile.seqlen_k, BLOCK_N)
        state = softmax.initial_state(MMA_M, row_layout)
        acc = zero_sums(HEAD_DIM)
        mbarrier.wait(q.full.index(warpgroup), tile_count & 1)
        for n in range(tile.lo, tile.hi):
            block = tile.hi - 1 + tile.lo - n
            first_key = block * BLOCK_N
            q_i = stage_chunks(q, opaque(warpgroup), NUM_WARPGROUPS, HEAD_DIM)
            consumer_wait(kv, 2 * count, STAGES)
            k_j = stage_chunks(kv, 2 * count, STAGES, HEAD_DIM)
            s = small_products(q_i, k_j, zeros, HEAD_DIM.parts)
            t = large_product(q_i, k_j, warpgroup_mma_wait(0, deps=(s,)), HEAD_DIM.parts)
            consumer_release(kv.empty, 2 * count, STAGES)
            mbarrier.arrive(pipelines.q_empty.index(warpgroup), count=1, pred=n == tile.hi - 1)
            if context.multiplier is not None:
                t = t * context.multiplier
            if (block >= blocks.full_hi) | (block < blocks.full_lo):
                t = where_bits(visible_keys(t, bounds, first_row, first_key, shift, tile.seqlen_k), t, -INFINITY)
            state, alpha, p = softmax.update(state, t, context.factor)
            consumer_wait(kv, 2 * count + 1, STAGES)
            v_j = stage_chunks(kv, 2 * opaque(count) + 1, STAGES, HEAD_DIM)
            acc = add_product(acc, p, v_j, dtype, HEAD_DIM, alpha)
            consumer_release(kv.empty, 2 * count + 1, STAGES)
            count += 1
        store_rows(context, tile, first_row, state, acc, HEAD_DIM)
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def store_rows(context, tile, first_row, state, acc, HEAD_DIM: gl.constexpr):
    """Store 64 rows of the results."""
    inv_l, lse = softmax.finalize(state)
    row = first_row + gl.arange(0, MMA_M, lse.type.layout)
    lse_rows = context.lse + tile.lse_head.to(gl.int64) * context.stride_lse + tile.token_q + row
    gl.store(lse_rows, lse, mask=row < tile.seqlen_q)
    out = ()
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        out = out + (scale_rows(acc[c], inv_l),)
    store_accumulators(
        context.output, context.columns, out, 1.0, tile.b, tile.head, tile.token_q, first_row, tile.seqlen_q, HEAD_DIM
    )
