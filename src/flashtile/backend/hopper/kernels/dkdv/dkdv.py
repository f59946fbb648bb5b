"""dk and dv kernel of the split backward pass for Hopper, in Gluon: blocks of 64 keys iterate over blocks of rows.

Two consumer warpgroups compute two products of a step each: one p and dv, the other dp and dk. The first passes p,
times the score's derivative, to the second through shared memory in fp32. Blocks are transposed, `[N, M]`, so that p
and ds are left operands of dv and dk in the registers that hold them. dq has its own kernel, `dq`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ....gpu.grouped import without
from ..backward.producer import BackwardDescriptors, BackwardPipelines, backward_producer_warp, make_row_pipeline
from ..backward.scores import Residuals, block_coord, block_scores, load_block, load_residual
from ..backward.tile_scheduler import (
    KeyTileScheduler,
    TileSplits,
    first_m_block,
    key_scheduler_warp,
    next_m_block,
    pop_key_tile,
)
from ..shared import scores
from ..shared.column_masks import where_bits
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout, kept_pairs, load_stream, where_kept
from ..shared.epilogue import OutputTensor, store_accumulators
from ..shared.masking import MaskBounds, m_block_range, visible_rows
from ..shared.mma import MMA_M, gemm_rs, gemm_wait
from ..shared.partitions import run_partitions
from ..shared.parts import add_product, large_product, small_products, zero_sums
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    consumer_release,
    consumer_wait,
    make_pipeline,
    stage_chunks,
    stage_of,
)
from ..shared.ptx import barrier_arrive, barrier_sync, opaque, wait_prerequisites
from ..shared.scores import BackwardScores, ScoreParams
from ..shared.swizzle import swizzled, unswizzled
from ..shared.tile_scheduler import TileQueue, UnpagedSeqlens, make_tile_queue
from .keys import begin_keys, end_keys, left_keys

CONSUMER_THREADS = gl.constexpr(256)


class DsWeights(NamedTuple):
    """`ds / dp`: p times the derivative of the score transformations.

    A stage is empty when the stage of its rows is, which is released later.
    """

    data: gl.shared_memory_descriptor  # [STAGES, MMA_M, BLOCK_M] fp32, swizzled
    full: NamedBarriers


class DkdvContext(NamedTuple):
    """Arguments of both consumer warpgroups."""

    pipelines: BackwardPipelines
    splits: TileSplits
    weights: DsWeights
    group: gl.tensor
    bounds: MaskBounds
    params: ScoreParams
    residuals: Residuals
    dropout: Dropout
    queue: TileQueue


DkdvScheduler = without(KeyTileScheduler, "chunk", "lists", splits=without(TileSplits, "row_splits", "wave"))


@kernel
def dkdv_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, dout_desc: Pointer, neg_lse_desc: Pointer,
    neg_delta_desc: Pointer, neg_residual: Residuals, dk: OutputTensor, dv: OutputTensor, scale: Scalar,
    columns: Scalar, columns_v: Scalar, scheduler: DkdvScheduler, seqlens: UnpagedSeqlens, bounds: MaskBounds,
    params: BackwardScores, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes are `[1, 1, 64, columns]`, of row statistics `[1, 64]`. Packed sequences as in `forward_kernel`."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    BLOCK_M: gl.constexpr = CONFIG.block_m
    K_BARRIER: gl.constexpr = FIRST_BARRIER + CONFIG.stages
    WEIGHTS_BARRIER: gl.constexpr = K_BARRIER + 2
    gl.static_assert(WEIGHTS_BARRIER + CONFIG.stages - 1 <= LAST_BARRIER)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, dout_desc, neg_lse_desc, neg_delta_desc, None)
    rows = make_row_pipeline(descs, NamedBarriers(FIRST_BARRIER, CONSUMER_THREADS + 32), CONFIG)
    if CONFIG.keys_in_registers:
        pipelines = BackwardPipelines(rows, None, None, ())
    else:
        k = make_pipeline(k_desc, 1, NamedBarriers(K_BARRIER, 128 + 32), HEAD_DIM)
        v = make_pipeline(v_desc, 1, NamedBarriers(K_BARRIER + 1, 128 + 32), HEAD_DIM_V)
        pipelines = BackwardPipelines(rows, k, v, ())
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = DsWeights(
        gl.allocate_shared_memory(gl.float32, [CONFIG.stages, MMA_M, BLOCK_M], layout),
        NamedBarriers(WEIGHTS_BARRIER, CONSUMER_THREADS),
    )
    queue = make_tile_queue(3)
    fence_async_shared()

    group, padded_rows, splits = scheduler.group, scheduler.padded_rows, scheduler.splits
    context = DkdvContext(pipelines, splits, weights, group, bounds, params, neg_residual, dropout, queue)
    run_partitions(
        CONFIG,
        [(dv_warpgroup, (context, dv, columns_v, CONFIG)), (dk_warpgroup, (context, dk, columns, scale, CONFIG))],
        [
            (
                backward_producer_warp,
                (descs, pipelines, queue, group, padded_rows, splits, params, scheduler.lists, CONFIG, PACKED),
            ),
            (key_scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
        ],
    )
    wait_prerequisites()  # what is launched next expects dq, too


@gluon.jit
def dv_warpgroup(context, output, columns, CONFIG: gl.constexpr):
    """The partition that computes p and dv."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    EARLY_SCORES: gl.constexpr = CONFIG.keys_in_registers  # a third stage of rows has them in time
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k, rows, weights, params = context.pipelines.k, context.pipelines.rows, context.weights, context.params
    dropout, stream = context.dropout, load_stream(context.dropout)
    dtype: gl.constexpr = rows.q.data[0].dtype
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    dv_scale = 1.0 if dropout.seed is None else dropout.keep_scale
    count = 0
    tile_count = 0
    tile = pop_key_tile(context.queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = full_blocks(context.bounds, tile, BLOCK_M)
        dv = zero_sums(HEAD_DIM_V)
        k_own, count = begin_keys(k, rows.q, rows.empty, tile_count, count, s_layout, HEAD_DIM, CONFIG)
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        steps = context.group * (tile.hi - tile.lo)
        s = zeros
        if EARLY_SCORES:  # noqa: SIM102 - a compile-time branch
            if steps > 0:
                s = warpgroup_mma_wait(0, deps=(start_scores(rows, k_own, count, zeros, CONFIG),))
        for steps_left in range(steps, 0, -1):
            stage = stage_of(count, STAGES)
            masked = (m < full_lo) | (m >= full_hi)
            if EARLY_SCORES:  # the next block's; after the last block its own again, unused
                next_s = start_scores(rows, k_own, gl.where(steps_left > 1, count + 1, count), zeros, CONFIG)
            else:
                k_j = left_keys(k, k_own, HEAD_DIM, CONFIG)
                s = start_scores(rows, k_j, count, zeros, CONFIG)
            coord = block_coord(tile, context.group, group_head, m, tile.first_key, (), context.residuals, CONFIG)
            loaded = load_block(coord, params, CONFIG)
            kept = kept_pairs(dropout, stream, coord.b, coord.head, coord.first_row, coord.first_key, zeros, True)
            if not EARLY_SCORES:
                q_i = stage_chunks(rows.q, count, STAGES, HEAD_DIM)
                s = large_product(k_j, q_i, warpgroup_mma_wait(0, deps=(s,)), HEAD_DIM.parts)
            score = block_scores(s, coord, loaded, params, CONFIG)
            neg_lse = rows.neg_lse.index(stage).load(s_layout)
            p = gl.exp2(scores.log2_probabilities(score.t, neg_lse, load_residual(coord, CONFIG), params))
            if masked:
                visible = visible_in(p, context.bounds, tile, m * BLOCK_M)
                p = where_bits(visible, p, 0.0)
            ds_weight = scores.derivative(p, score, params, SCORE_MOD)
            if SCORE_MOD is not None and not SCORE_MOD.same:  # noqa: SIM102 - a compile-time branch
                if masked:  # 0 * the derivative is NaN where that is
                    visible = visible_in(p, context.bounds, tile, m * BLOCK_M)
                    ds_weight = where_bits(visible, ds_weight, 0.0)
            weights.data.index(stage).store(swizzled(ds_weight, 32))
            barrier_arrive(weights.full.first + stage, weights.full.threads)
            consumer_wait(rows.dout, count, STAGES)
            dout_i = stage_chunks(rows.dout, count, STAGES, HEAD_DIM_V)
            p = where_kept(kept, p, True)
            if EARLY_SCORES:
                dv = gemm_rs(dv, p.to(dtype), dout_i)
                s = warpgroup_mma_wait(len(HEAD_DIM_V.chunks), deps=(next_s,))
                dv = gemm_wait(dv)
            else:
                dv = add_product(dv, p, dout_i, dtype, HEAD_DIM_V)
            consumer_release(rows.empty, count, STAGES)
            count += 1
            m, group_head = next_m_block(m, group_head, tile, context.group, CONFIG.lpt)
        end_keys(k, tile_count, CONFIG)
        store_accumulators(
            output, columns, dv, dv_scale, tile.b, tile.head_k, first_token(tile, context.splits), tile.first_key,
            tile.seqlen_k, HEAD_DIM_V,
        )  # fmt: skip
        tile_count += 1
        tile = pop_key_tile(context.queue, tile_count)


@gluon.jit
def dk_warpgroup(context, output, columns, scale, CONFIG: gl.constexpr):
    """The partition that computes dp, ds and dk."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    v, rows, weights = context.pipelines.v, context.pipelines.rows, context.weights
    dropout, stream = context.dropout, load_stream(context.dropout)
    dtype: gl.constexpr = rows.dout.data[0].dtype
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    smem_layout: gl.constexpr = swizzled(zeros, 32).type.layout
    count = 0
    tile_count = 0
    tile = pop_key_tile(context.queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = full_blocks(context.bounds, tile, BLOCK_M)
        dk = zero_sums(HEAD_DIM)
        v_own, count = begin_keys(v, rows.dout, rows.empty, tile_count, count, s_layout, HEAD_DIM_V, CONFIG)
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(context.group * (tile.hi - tile.lo)):
            stage = stage_of(count, STAGES)
            masked = (m < full_lo) | (m >= full_hi)
            consumer_wait(rows.dout, count, STAGES)
            v_j = left_keys(v, v_own, HEAD_DIM_V, CONFIG)
            dout_i = stage_chunks(rows.dout, count, STAGES, HEAD_DIM_V)
            dp = small_products(v_j, dout_i, zeros, HEAD_DIM_V.parts)
            coord = block_coord(tile, context.group, group_head, m, tile.first_key, (), context.residuals, CONFIG)
            kept = kept_pairs(dropout, stream, coord.b, coord.head, coord.first_row, coord.first_key, zeros, True)
            dp = large_product(v_j, dout_i, warpgroup_mma_wait(0, deps=(dp,)), HEAD_DIM_V.parts)
            if dropout.seed is not None:
                dp = where_kept(kept, dp, True) * dropout.keep_scale
            dp += rows.neg_delta.index(stage).load(s_layout)
            if masked:  # 0 * dp is NaN where dp is
                dp = where_bits(visible_in(dp, context.bounds, tile, m * BLOCK_M), dp, 0.0)
            barrier_sync(weights.full.first + stage, weights.full.threads)
            ds_weight = unswizzled(weights.data.index(stage).load(smem_layout), s_layout)
            ds = ds_weight * dp
            consumer_wait(rows.q, count, STAGES)
            dk = add_product(dk, ds, stage_chunks(rows.q, count, STAGES, HEAD_DIM), dtype, HEAD_DIM)
            consumer_release(rows.empty, count, STAGES)
            count += 1
            m, group_head = next_m_block(m, group_head, tile, context.group, CONFIG.lpt)
        end_keys(v, tile_count, CONFIG)
        store_accumulators(
            output, columns, dk, scale, tile.b, tile.head_k, first_token(tile, context.splits), tile.first_key,
            tile.seqlen_k, HEAD_DIM,
        )  # fmt: skip
        tile_count += 1
        tile = pop_key_tile(context.queue, tile_count)


@gluon.jit
def start_scores(rows, k_j, count, zeros, CONFIG: gl.constexpr):
    """Issue all products of parts of block of rows number `count` with k but the largest; with one part, the whole."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    consumer_wait(rows.q, count, CONFIG.stages)
    return small_products(k_j, stage_chunks(rows.q, count, CONFIG.stages, HEAD_DIM), zeros, HEAD_DIM.parts)


@gluon.jit
def first_token(tile, splits):
    """The token of key 0; 0 if dense."""
    if splits.head_splits is None:
        return tile.token_k
    else:
        return tile.token_k * 0


@gluon.jit
def full_blocks(bounds, tile, BLOCK_M: gl.constexpr):
    """Range of the blocks of rows that see all keys of a tile."""
    blocks = m_block_range(bounds, tile.first_key, tile.first_key + (MMA_M - 1), tile.shift, tile.seqlen_q, BLOCK_M)
    return gl.where(tile.first_key + MMA_M > tile.seqlen_k, tile.hi, blocks.full_lo), blocks.full_hi


@gluon.jit
def visible_in(x, bounds, tile, first_row):
    """Mask bits of a block of the tile."""
    return visible_rows(x, bounds, opaque(tile.first_key), first_row, tile.shift, tile.seqlen_q, tile.seqlen_k)
