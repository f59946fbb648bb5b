"""Kernels for dk and for dv of heads above 256 features: a tile of 64 keys, and the columns of one gradient in the
registers of two warpgroups.

The first warpgroup computes p. For dv it passes p to the second one, and each multiplies it with half of the columns
of dout. For dk the second one computes dp meanwhile, makes ds of it and the first one's derivatives, and returns ds.
Blocks are transposed as in `kernels.dkdv`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..backward.producer import (
    BackwardDescriptors,
    BackwardPipelines,
    backward_producer_warp,
    make_row_pipeline,
    stat_of,
)
from ..backward.scores import Residuals, block_coord, block_scores, load_block, load_residual
from ..backward.tile_scheduler import first_m_block, key_scheduler_warp, next_m_block, pop_key_tile
from ..dkdv.dkdv import CONSUMER_THREADS, DkdvContext, DkdvScheduler, DsWeights, first_token, full_blocks, visible_in
from ..shared import scores
from ..shared.column_masks import where_bits
from ..shared.columns import chunks_of
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout
from ..shared.epilogue import OutputTensor, store_accumulators
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait, zero_accumulators
from ..shared.partitions import run_partitions
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
from ..shared.scores import BackwardScores
from ..shared.swizzle import swizzled, unswizzled
from ..shared.tile_scheduler import UnpagedSeqlens, make_tile_queue


class Factors(NamedTuple):
    """p or ds in 16 bits, which one warpgroup passes to the other. Each thread reads what the same thread of the other
    warpgroup wrote. A stage is empty when the stage of its rows is, which is released later.
    """

    data: gl.shared_memory_descriptor  # [STAGES, MMA_M, BLOCK_M]
    full: NamedBarriers


class WideContext(NamedTuple):
    """Arguments of both consumer warpgroups."""

    shared: DkdvContext
    factors: Factors
    output: OutputTensor  # dk or dv
    columns: gl.tensor | None
    scale: gl.tensor


@kernel
def wide_dkdv_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, dout_desc: Pointer, neg_lse_desc: Pointer,
    neg_delta_desc: Pointer, neg_residual: Residuals, dx: OutputTensor, scale: Scalar, columns: Scalar,
    scheduler: DkdvScheduler, seqlens: UnpagedSeqlens, bounds: MaskBounds, params: BackwardScores, dropout: Dropout,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """As `dkdv_kernel`, for one gradient `dx = scale * ...`. There is no dropout: a block has too few rows for the
    threads that share its random bits.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    STAGES: gl.constexpr = CONFIG.stages
    K_BARRIER: gl.constexpr = FIRST_BARRIER + STAGES
    WEIGHTS_BARRIER: gl.constexpr = K_BARRIER + 2
    FACTORS_BARRIER: gl.constexpr = WEIGHTS_BARRIER + STAGES
    gl.static_assert(FACTORS_BARRIER + STAGES - 1 <= LAST_BARRIER)
    gl.static_assert(dropout.seed is None)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, dout_desc, neg_lse_desc, neg_delta_desc, None)
    rows = make_row_pipeline(descs, NamedBarriers(FIRST_BARRIER, CONSUMER_THREADS + 32), CONFIG)
    k = make_pipeline(k_desc, 1, NamedBarriers(K_BARRIER, 128 + 32), HEAD_DIM)
    shape: gl.constexpr = [STAGES, MMA_M, CONFIG.block_m]
    dtype: gl.constexpr = q_desc.dtype
    factors = Factors(
        gl.allocate_shared_memory(dtype, shape, gl.NVMMASharedLayout.get_default_for(shape[1:], dtype)),
        NamedBarriers(FACTORS_BARRIER, CONSUMER_THREADS),
    )
    v, weights = None, None
    if CONFIG.result == "dk":
        v = make_pipeline(v_desc, 1, NamedBarriers(K_BARRIER + 1, 128 + 32), HEAD_DIM_V)
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        weights = DsWeights(
            gl.allocate_shared_memory(gl.float32, shape, layout), NamedBarriers(WEIGHTS_BARRIER, CONSUMER_THREADS)
        )
    pipelines = BackwardPipelines(rows, k, v, ())
    queue = make_tile_queue(3)
    fence_async_shared()

    group, padded_rows, splits = scheduler.group, scheduler.padded_rows, scheduler.splits
    shared = DkdvContext(pipelines, splits, weights, group, bounds, params, neg_residual, dropout, queue)
    context = WideContext(shared, factors, dx, columns, scale)
    run_partitions(
        CONFIG,
        [(scores_warpgroup, (context, CONFIG)), (second_warpgroup, (context, CONFIG))],
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
def scores_warpgroup(context, CONFIG: gl.constexpr):
    """The partition that computes p, and the first half of the columns."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    COLUMNS: gl.constexpr = CONFIG.columns[0]
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    shared, factors = context.shared, context.factors
    k, rows, weights, params = shared.pipelines.k, shared.pipelines.rows, shared.weights, shared.params
    dtype: gl.constexpr = rows.q.data[0].dtype
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = pop_key_tile(shared.queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = full_blocks(shared.bounds, tile, BLOCK_M)
        acc = zero_accumulators(COLUMNS)
        consumer_wait(k, tile_count, 1)
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(shared.group * (tile.hi - tile.lo)):
            stage = stage_of(count, STAGES)
            masked = (m < full_lo) | (m >= full_hi)
            consumer_wait(rows.q, count, STAGES)
            s = gemm_nt(stage_chunks(k, opaque(0), 1, HEAD_DIM), stage_chunks(rows.q, count, STAGES, HEAD_DIM), zeros)
            coord = block_coord(tile, shared.group, group_head, m, tile.first_key, (), shared.residuals, CONFIG)
            loaded = load_block(coord, params, CONFIG)
            s = warpgroup_mma_wait(0, deps=(s,))
            score = block_scores(s, coord, loaded, params, CONFIG)
            neg_lse = stat_of(rows.neg_lse, stage).load(s_layout)
            p = gl.exp2(scores.log2_probabilities(score.t, neg_lse, load_residual(coord, CONFIG), params))
            if masked:
                p = where_bits(visible_in(p, shared.bounds, tile, m * BLOCK_M), p, 0.0)
            if CONFIG.result == "dv":
                factor = p.to(dtype)
                factors.data.index(stage).store(factor)
                barrier_arrive(factors.full.first + stage, factors.full.threads)
                consumer_wait(rows.dout, count, STAGES)
                right = stage_chunks(rows.dout, count, STAGES, HEAD_DIM_V)
                acc = gemm_wait(gemm_rs(acc, factor, chunks_of(right, COLUMNS)))
            else:
                ds_weight = scores.derivative(p, score, params, SCORE_MOD)
                if SCORE_MOD is not None and not SCORE_MOD.same:  # noqa: SIM102 - a compile-time branch
                    if masked:  # 0 * the derivative is NaN where that is
                        ds_weight = where_bits(visible_in(p, shared.bounds, tile, m * BLOCK_M), ds_weight, 0.0)
                weights.data.index(stage).store(swizzled(ds_weight, 32))
                barrier_arrive(weights.full.first + stage, weights.full.threads)
                right = stage_chunks(rows.q, count, STAGES, HEAD_DIM)
                acc = add_received(acc, factors, stage, chunks_of(right, COLUMNS))
            consumer_release(rows.empty, count, STAGES)
            count += 1
            m, group_head = next_m_block(m, group_head, tile, shared.group, CONFIG.lpt)
        consumer_release(k.empty, tile_count, 1)
        store(context, tile, acc, COLUMNS)
        tile_count += 1
        tile = pop_key_tile(shared.queue, tile_count)


@gluon.jit
def second_warpgroup(context, CONFIG: gl.constexpr):
    """The partition that computes the second half of the columns; for dk, also dp and ds."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    COLUMNS: gl.constexpr = CONFIG.columns[1]
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    shared, factors = context.shared, context.factors
    v, rows, weights = shared.pipelines.v, shared.pipelines.rows, shared.weights
    dtype: gl.constexpr = rows.dout.data[0].dtype
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = pop_key_tile(shared.queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = full_blocks(shared.bounds, tile, BLOCK_M)
        acc = zero_accumulators(COLUMNS)
        if CONFIG.result == "dk":
            consumer_wait(v, tile_count, 1)
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(shared.group * (tile.hi - tile.lo)):
            stage = stage_of(count, STAGES)
            consumer_wait(rows.dout, count, STAGES)
            dout_i = stage_chunks(rows.dout, count, STAGES, HEAD_DIM_V)
            if CONFIG.result == "dv":
                acc = add_received(acc, factors, stage, chunks_of(dout_i, COLUMNS))
            else:
                masked = (m < full_lo) | (m >= full_hi)
                dp = gemm_nt(stage_chunks(v, opaque(0), 1, HEAD_DIM_V), dout_i, zeros)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dp += stat_of(rows.neg_delta, stage).load(s_layout)
                if masked:  # 0 * dp is NaN where dp is
                    dp = where_bits(visible_in(dp, shared.bounds, tile, m * BLOCK_M), dp, 0.0)
                barrier_sync(weights.full.first + stage, weights.full.threads)
                smem_layout: gl.constexpr = swizzled(zeros, 32).type.layout
                ds_weight = unswizzled(weights.data.index(stage).load(smem_layout), s_layout)
                ds = (ds_weight * dp).to(dtype)
                factors.data.index(stage).store(ds)
                barrier_arrive(factors.full.first + stage, factors.full.threads)
                consumer_wait(rows.q, count, STAGES)
                q_i = chunks_of(stage_chunks(rows.q, count, STAGES, HEAD_DIM), COLUMNS)
                acc = gemm_wait(gemm_rs(acc, ds, q_i))
            consumer_release(rows.empty, count, STAGES)
            count += 1
            m, group_head = next_m_block(m, group_head, tile, shared.group, CONFIG.lpt)
        if CONFIG.result == "dk":
            consumer_release(v.empty, tile_count, 1)
        store(context, tile, acc, COLUMNS)
        tile_count += 1
        tile = pop_key_tile(shared.queue, tile_count)


@gluon.jit
def add_received(acc, factors, stage, right):
    """Add the product of what the other warpgroup passes and `right`, and wait for it."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    barrier_sync(factors.full.first + stage, factors.full.threads)
    return gemm_wait(gemm_rs(acc, factors.data.index(stage).load(layout), right))


@gluon.jit
def store(context, tile, acc, COLUMNS: gl.constexpr):
    """Store half of the columns of 64 keys."""
    store_accumulators(
        context.output, context.columns, acc, context.scale, tile.b, tile.head_k,
        first_token(tile, context.shared.splits), tile.first_key, tile.seqlen_k, COLUMNS,
    )  # fmt: skip
