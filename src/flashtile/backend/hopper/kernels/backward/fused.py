"""Fused backward kernel for Hopper (Shah et al., "FlashAttention-3", 2024, section 3 and appendix B), in Gluon.

A persistent program takes a block of 128 keys of a head and iterates over the rows that see it, with a scheduler warp,
a producer warp and two consumer warpgroups of 64 keys each. Blocks are transposed, `[N, M]`, so that p and ds are left
operands of dv and dk in the registers that hold them. ds also passes through shared memory: each warpgroup computes its
share of the block's dq from all 128 keys. Two more warps accumulate the shares in fp32 (`dq_writer`), or the warpgroups
do (`late_dq`); `postprocess` converts them.

The products are ordered so that each overlaps other work: the exponentials overlap dout's product with v, the exchange
of ds overlaps dv, and the hand-over of dq overlaps the next scores and dk.
"""

from typing import NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..shared import scores
from ..shared.bias_tiles import make_bias_tiles
from ..shared.block_lists import BlockLists, block_at, first_entry, is_cut, load_bits, load_entry, partial_of, with_bits
from ..shared.column_masks import all_visible, where_bits
from ..shared.compat import Pointer, Scalar, kernel, reinterpret_smem, thread_barrier
from ..shared.coordinates import dkdv_coord
from ..shared.dropout import Dropout, both_where_kept, kept_pairs, load_stream
from ..shared.epilogue import tma_store_columns
from ..shared.masking import MaskBounds, m_block_range, visible_rows
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait, gemm_wait_with, left_operands, zero_accumulators
from ..shared.partitions import numbered, run_partitions
from ..shared.pipeline import (
    FIRST_BARRIER,
    NamedBarriers,
    allocate_boxes,
    consumer_release,
    consumer_wait,
    make_mbarriers,
    make_pipeline,
    stage_chunks,
    stage_of,
)
from ..shared.ptx import barrier_arrive, launch_dependents, opaque, wait_prerequisites
from ..shared.scores import BackwardScores, ScoreParams
from ..shared.tile_scheduler import TileQueue, UnpagedSeqlens, make_tile_queue
from .dq_share import DS_BARRIER, DS_STAGES, compute_dq_alone, start_dq, store_dq
from .dq_writer import DQ_COLUMNS, NUM_WARPGROUPS, DqPipeline, DqWriter, dq_writer_warp
from .late_dq import LATE_DS_STAGES, SECOND_DS_BARRIER, add_dq, announce_ds, start_late_dq, store_late
from .producer import BackwardDescriptors, BackwardPipelines, backward_producer_warp, make_row_pipeline
from .scores import Residuals, begin_probabilities, block_coord, finish_probabilities, load_block, with_bias
from .slopes import SlopeGradient, add_slope_gradient
from .tile_scheduler import (
    KeyTileScheduler,
    RowChunk,
    TileSplits,
    first_m_block,
    key_head,
    key_scheduler_warp,
    next_m_block,
    pop_key_tile,
)

PIPELINE_THREADS = gl.constexpr(256 + 32)  # with the producer warp


class BackwardOutputs(NamedTuple):
    """Gradients, and the shared memory that ds passes through."""

    dk: gl.tensor  # descriptor
    dv: gl.tensor  # descriptor
    scale: gl.tensor  # of dk
    dq_accum: gl.tensor | None  # pointer, if the warpgroups add dq
    ds: gl.shared_memory_descriptor  # [stages * NUM_WARPGROUPS, MMA_M, BLOCK_M]
    dq_pipeline: DqPipeline | None  # of dq, dk and dv, unless dk and dv leave through ds


class BackwardContext(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: BackwardPipelines
    outputs: BackwardOutputs
    queue: TileQueue
    group: gl.tensor
    padded_rows: gl.tensor
    splits: TileSplits
    chunk: RowChunk
    bounds: MaskBounds
    params: ScoreParams
    residuals: Residuals
    dropout: Dropout
    lists: BlockLists
    slope_gradient: SlopeGradient


@kernel
def backward_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, dout_desc: Pointer, neg_lse_desc: Pointer,
    neg_delta_desc: Pointer, bias_desc: Pointer, dq_desc: Pointer, dq_accum_desc: Pointer, dq_accum: Pointer,
    dk_desc: Pointer, dv_desc: Pointer, dq_semaphore: Pointer, dslopes: Pointer, neg_residual: Residuals,
    dq_parts: Scalar, scale: Scalar, scheduler: KeyTileScheduler, seqlens: UnpagedSeqlens, bounds: MaskBounds,
    params: BackwardScores, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes: q and dout `[1, 1, BLOCK_M, columns]`, k, v, dk and dv `[1, 1, MMA_M, columns]`, dq_accum `[MMA_M,
    columns]`, row statistics `[1, BLOCK_M]`, tiles of a bias `[1, 1, BLOCK_M, MMA_M]`. Packed sequences are described
    as in `forward_kernel`.
    """
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    K_BARRIER: gl.constexpr = FIRST_BARRIER + CONFIG.stages
    V_BARRIER: gl.constexpr = K_BARRIER + NUM_WARPGROUPS
    DQ_BARRIER: gl.constexpr = V_BARRIER + NUM_WARPGROUPS
    if CONFIG.late_dq is not None:
        gl.static_assert(V_BARRIER + NUM_WARPGROUPS <= SECOND_DS_BARRIER)
    else:
        gl.static_assert(DQ_BARRIER + NUM_WARPGROUPS <= DS_BARRIER)
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, dout_desc, neg_lse_desc, neg_delta_desc, bias_desc)
    pipelines = BackwardPipelines(
        make_row_pipeline(descs, NamedBarriers(FIRST_BARRIER, PIPELINE_THREADS), CONFIG),
        make_pipeline(k_desc, NUM_WARPGROUPS, NamedBarriers(K_BARRIER, PIPELINE_THREADS), HEAD_DIM),
        make_pipeline(v_desc, NUM_WARPGROUPS, NamedBarriers(V_BARRIER, PIPELINE_THREADS), HEAD_DIM),
        make_bias_tiles(bias_desc, NUM_WARPGROUPS, CONFIG),
    )
    if CONFIG.stores_through_ds:
        dq_pipeline = None
    else:
        if CONFIG.late_dq is not None:  # dk and dv alone
            COLUMNS: gl.constexpr = DQ_COLUMNS if dk_desc.dtype == gl.float32 else 2 * DQ_COLUMNS
            dq_smem = allocate_boxes(dk_desc, NUM_WARPGROUPS, COLUMNS)
        elif dq_accum_desc is None:  # 16-bit numbers, with as much room for dk and dv
            dq_smem = allocate_boxes(dq_desc, NUM_WARPGROUPS, 2 * DQ_COLUMNS)
        else:
            dq_smem = allocate_boxes(dq_accum_desc, NUM_WARPGROUPS, DQ_COLUMNS)
        dq_pipeline = DqPipeline(dq_smem, NamedBarriers(DQ_BARRIER, 128 + 32), make_mbarriers(NUM_WARPGROUPS, 1))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([MMA_M, CONFIG.block_m], q_desc.dtype)
    DS_ROWS: gl.constexpr = stages_of_ds(CONFIG) * NUM_WARPGROUPS
    ds = gl.allocate_shared_memory(q_desc.dtype, [DS_ROWS, MMA_M, CONFIG.block_m], ds_layout)
    DQ_WRITERS: gl.constexpr = 0 if CONFIG.late_dq is not None else NUM_WARPGROUPS
    queue = make_tile_queue(NUM_WARPGROUPS + DQ_WRITERS + 1)
    fence_async_shared()
    if scheduler.splits.wave.first_tile is None:
        wait_prerequisites()
    launch_dependents()

    group, padded_rows, splits = scheduler.group, scheduler.padded_rows, scheduler.splits
    outputs = BackwardOutputs(dk_desc, dv_desc, scale, dq_accum, ds, dq_pipeline)
    num_heads = scheduler.num_heads_k * group
    if splits.head_splits is not None:
        num_heads *= splits.head_splits
    slope_gradient = SlopeGradient(dslopes, num_heads, scheduler.num_blocks)
    context = BackwardContext(
        pipelines,
        outputs,
        queue,
        group,
        padded_rows,
        splits,
        scheduler.chunk,
        bounds,
        params,
        neg_residual,
        dropout,
        scheduler.lists,
        slope_gradient,
    )
    # Dense calls alone have several parts or splits.
    part_rows = None if dq_parts is None else params.batch * num_heads * padded_rows
    dq_writer = DqWriter(
        dq_desc, dq_accum_desc, dq_pipeline, queue, dq_semaphore, bounds, group, padded_rows, dq_parts, part_rows,
        scheduler.lists,
    )  # fmt: skip
    run_partitions(
        CONFIG,
        numbered(consumer_warpgroup, NUM_WARPGROUPS, (context, CONFIG, PACKED)),
        [
            (
                backward_producer_warp,
                (descs, pipelines, queue, group, padded_rows, splits, params, scheduler.lists, CONFIG, PACKED),
            )
        ],
        numbered(dq_writer_warp, DQ_WRITERS, (dq_writer, CONFIG)),
        [(key_scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED))],
    )
    if scheduler.splits.wave.first_tile is not None:
        wait_prerequisites()


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes dk and dv of 64 keys, and its share of the dq of 128 keys."""
    queue = context.queue
    count = 0
    tile_count = 0
    tile = pop_key_tile(queue, 0)
    while tile.b >= 0:
        if warpgroup == 0 or len(context.pipelines.bias) > 0 or CONFIG.late_dq is not None:
            count = compute_tile(warpgroup, context, tile, tile_count, count, CONFIG, PACKED)
        else:
            count = compute_tile_or_dq(warpgroup, context, tile, tile_count, count, CONFIG, PACKED)
        tile_count += 1
        tile = pop_key_tile(queue, tile_count)
    tma.store_wait(0)


@gluon.jit
def compute_tile(
    warpgroup: gl.constexpr, context, tile, tile_count, count, CONFIG: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Compute dk and dv of a tile's keys, and shares of dq. Returns the number of blocks of rows so far."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    CHUNKS: gl.constexpr = len(HEAD_DIM.chunks)  # wgmmas of a product over the head dimension
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    LATE_DQ: gl.constexpr = CONFIG.late_dq is not None
    ADD_FIRST: gl.constexpr = HEAD_DIM.width > DQ_COLUMNS + MMA_M // 2  # the next scores need the registers of dq
    DP_PENDING: gl.constexpr = NUM_WARPGROUPS if LATE_DQ else 0  # products behind dp
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pipelines, outputs = context.pipelines, context.outputs
    group, bounds, params, lists = context.group, context.bounds, context.params, context.lists
    residuals = context.residuals
    dropout, stream = context.dropout, load_stream(context.dropout)
    dtype: gl.constexpr = outputs.ds.dtype
    rows, k, v, dq_pipeline = pipelines.rows, pipelines.k, pipelines.v, outputs.dq_pipeline
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    first_key = tile.first_key + warpgroup * MMA_M
    blocks = m_block_range(bounds, first_key, first_key + (MMA_M - 1), tile.shift, tile.seqlen_q, BLOCK_M)
    full_lo = gl.where(first_key + MMA_M > tile.seqlen_k, blocks.hi, blocks.full_lo)
    dk = zero_accumulators(HEAD_DIM)
    dv = zero_accumulators(HEAD_DIM)
    for h in gl.static_range(NUM_WARPGROUPS):
        consumer_wait(k, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
        consumer_wait(v, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
    tma.store_wait(0)  # TMA has read the previous tile's dk
    thread_barrier()
    m, group_head = first_m_block(tile, CONFIG.lpt), 0
    steps = group * (tile.hi - tile.lo)
    k_own, v_own = (), ()
    if LATE_DQ:
        k_own = load_own(k, warpgroup, CONFIG.late_dq.keys[warpgroup], CONFIG)
        v_own = load_own(v, warpgroup, CONFIG.late_dq.values[warpgroup], CONFIG)
    s = zeros
    if steps > 0:
        s = warpgroup_mma_wait(0, deps=(start_qk(rows, k, k_own, count, zeros, warpgroup, CONFIG),))
    entry = first_entry(lists, tile)
    row_block = block_at(lists, m, entry)
    partial = partial_of(lists, entry)
    block = block_coord(tile, group, group_head, row_block, first_key, partial, residuals, CONFIG)
    # Unused where there are no steps.
    loaded = load_block(block, params, CONFIG)
    loaded = with_bias(loaded, pipelines.bias, count, steps > 0, warpgroup, NUM_WARPGROUPS, CONFIG)
    partial_p = begin_probabilities(s, rows, count, block, loaded, params, CONFIG)
    bits = load_bits(lists, entry, tile.token_q, m, warpgroup * MMA_M, zeros, CONFIG.block_n)
    kept = kept_pairs(dropout, stream, block.b, block.head, block.first_row, block.first_key, zeros, True)
    last_row = 0  # of the accumulators, of the block before
    for steps_left in range(steps, 0, -1):
        q_i = stage_chunks(rows.q, count, STAGES, HEAD_DIM)
        dout_i = stage_chunks(rows.dout, count, STAGES, HEAD_DIM)
        row_block = block_at(lists, m, entry)
        masked = is_cut((row_block < full_lo) | (row_block >= blocks.full_hi), lists, entry)
        next_entry = 0
        if lists.data is not None:
            next_entry = load_entry(lists, tile.token_q, next_m_block(m, group_head, tile, group, CONFIG.lpt)[0])

        # Write accumulators before any product is in flight: ptxas would insert a wait.
        consumer_wait(rows.dout, count, STAGES)
        dp = zeros
        if dropout.seed is None:
            dp = rows.neg_delta.index(stage_of(count, STAGES)).load(s_layout).broadcast_to([MMA_M, BLOCK_M])
        dp = gemm_nt(own_chunks(v, v_own, warpgroup, CONFIG), dout_i, dp, ACCUMULATE=dropout.seed is None)
        if LATE_DQ:
            dq = start_late_dq(outputs.ds, k, count - 1, steps_left < steps, warpgroup, CONFIG)
        p, score = finish_probabilities(partial_p, rows, count, block, loaded, params, CONFIG)
        visible = all_visible(p)
        if masked:
            visible = visible_rows(
                p, bounds, opaque(first_key), row_block * BLOCK_M, tile.shift, tile.seqlen_q, tile.seqlen_k
            )
            visible = with_bits(visible, bits)
            p = where_bits(visible, p, 0.0)
        ds_weight = scores.derivative(p, score, params, SCORE_MOD)
        if SCORE_MOD is not None and not SCORE_MOD.same:  # noqa: SIM102 - a compile-time branch
            if masked:  # 0 * the derivative is NaN where that is
                ds_weight = where_bits(visible, ds_weight, 0.0)
        dp, ds_weight = warpgroup_mma_wait(DP_PENDING, deps=(dp, ds_weight))
        if dropout.seed is None:
            if masked:  # 0 * dp is NaN where dp is
                dp = where_bits(visible, dp, 0.0)
            ds = ds_weight * dp
        else:
            dp, p = both_where_kept(kept, dp, p, True)
            p = p.to(dtype)
            dp = dp * dropout.keep_scale + rows.neg_delta.index(stage_of(count, STAGES)).load(s_layout)
            ds = ds_weight * dp
            if masked:  # 0 * dp is NaN where dp is
                ds = where_bits(visible, ds, 0.0)
        if context.slope_gradient.data is not None:
            p = p.to(dtype)  # in half of the registers
            add_slope_gradient(context.slope_gradient, ds, block, tile, params.batch, warpgroup, PACKED, CONFIG)
        ds = ds.to(dtype)
        stage = stage_of(count, stages_of_ds(CONFIG)) * NUM_WARPGROUPS
        outputs.ds.index(stage + warpgroup).store(ds)
        if LATE_DQ:
            announce_ds(count, warpgroup)
        dv = gemm_rs(dv, p.to(dtype), dout_i)
        if not LATE_DQ:
            dq = start_dq(outputs.ds, k, stage, warpgroup, CONFIG)
            dv = gemm_wait(dv, NUM_WARPGROUPS)  # frees the registers of p
        elif ADD_FIRST:
            dq = warpgroup_mma_wait(CHUNKS, deps=(dq,))
            if steps_left < steps:
                add_dq(outputs.dq_accum, last_row, dq, warpgroup, CONFIG)
        # The next block's scores; after the last block its own again, unused.
        next_count = gl.where(steps_left > 1, count + 1, count)
        s = start_qk(rows, k, k_own, next_count, zeros, warpgroup, CONFIG)
        if LATE_DQ and ADD_FIRST:
            dv = gemm_wait(dv, CHUNKS)
        dk = gemm_rs(dk, ds, q_i)
        if LATE_DQ and not ADD_FIRST:
            dq = warpgroup_mma_wait(3 * CHUNKS, deps=(dq,))
            if steps_left < steps:
                add_dq(outputs.dq_accum, last_row, dq, warpgroup, CONFIG)
            dv = gemm_wait(dv, 2 * CHUNKS)
        if LATE_DQ:
            last_row = tile.padded_row + group_head * context.padded_rows + row_block * BLOCK_M
        else:
            dq = warpgroup_mma_wait(2 * CHUNKS, deps=(dq,))
            mbarrier.wait(dq_pipeline.empty.index(warpgroup), (count & 1) ^ 1)
            store_dq(dq_pipeline.smem.index(warpgroup), dq, outputs.scale, CONFIG)
            barrier_arrive(dq_pipeline.full.first + warpgroup, dq_pipeline.full.threads)
        next_m, next_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        next_block = block_at(lists, next_m, next_entry)
        partial = partial_of(lists, next_entry)
        next_coord = block_coord(tile, group, next_head, next_block, first_key, partial, residuals, CONFIG)
        loaded = load_block(next_coord, params, CONFIG)  # before the wait
        bits = load_bits(lists, next_entry, tile.token_q, next_m, warpgroup * MMA_M, zeros, CONFIG.block_n)
        kept = kept_pairs(
            dropout, stream, next_coord.b, next_coord.head, next_coord.first_row, first_key, zeros, True
        )  # fmt: skip
        s = warpgroup_mma_wait(CHUNKS, deps=(s,))
        m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        if lists.data is not None:
            entry = next_entry
        row_block = block_at(lists, m, entry)
        partial = partial_of(lists, entry)
        block = block_coord(tile, group, group_head, row_block, first_key, partial, residuals, CONFIG)
        loaded = with_bias(loaded, pipelines.bias, next_count, steps_left > 1, warpgroup, NUM_WARPGROUPS, CONFIG)
        partial_p = begin_probabilities(s, rows, next_count, block, loaded, params, CONFIG)
        dk, partial_p = gemm_wait_with(dk, partial_p)
        consumer_release(rows.empty, count, STAGES)
        count += 1
    if LATE_DQ:  # noqa: SIM102 - a compile-time branch
        if steps > 0:
            dq = start_late_dq(outputs.ds, k, count - 1, True, warpgroup, CONFIG)
            add_dq(outputs.dq_accum, last_row, warpgroup_mma_wait(0, deps=(dq,)), warpgroup, CONFIG)
    for h in gl.static_range(NUM_WARPGROUPS):
        consumer_release(k.empty, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
        consumer_release(v.empty, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
    if not LATE_DQ:  # dv and dk reuse the memory of the last dq
        mbarrier.wait(dq_pipeline.empty.index(warpgroup), (count & 1) ^ 1)
    splits = context.splits
    coord = dkdv_coord(tile, key_head(tile, splits), first_key, params.batch, splits, PACKED)
    OF_HEADS: gl.constexpr = splits.head_splits is not None and splits.row_splits is None
    ADD: gl.constexpr = OF_HEADS or context.chunk.chunk_lo is not None or splits.wave.first_tile is not None
    if CONFIG.stores_through_ds:
        stored = store_late(outputs.dv, coord, dv, dropout.keep_scale, outputs.ds, count, warpgroup, 0, HEAD_DIM, ADD)
        store_late(outputs.dk, coord, dk, outputs.scale, outputs.ds, count, warpgroup, stored, HEAD_DIM, ADD)
    else:
        store_dkdv(outputs.dv, coord, dv, dropout.keep_scale, dq_pipeline.smem.index(warpgroup), HEAD_DIM, ADD)
        store_dkdv(outputs.dk, coord, dk, outputs.scale, dq_pipeline.smem.index(warpgroup), HEAD_DIM, ADD)
    return count


@gluon.jit
def compute_tile_or_dq(
    warpgroup: gl.constexpr, context, tile, tile_count, count, CONFIG: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """As `compute_tile`, where this warpgroup's keys may be past the last one."""
    if tile.first_key + warpgroup * MMA_M < tile.seqlen_k:
        count = compute_tile(warpgroup, context, tile, tile_count, count, CONFIG, PACKED)
    else:
        count = compute_dq_alone(warpgroup, context, tile, tile_count, count, CONFIG)
    return count


@constexpr_function
def stages_of_ds(CONFIG):
    """Stages of the shared memory that ds passes through."""
    return LATE_DS_STAGES if CONFIG.late_dq is not None else DS_STAGES


@gluon.jit
def load_own(keys, warpgroup: gl.constexpr, COUNT: gl.constexpr, CONFIG: gl.constexpr):
    """The last COUNT chunks of the warpgroup's 64 keys or values, as left operands in registers. Products of 64 rows
    would read them from shared memory as often as the rows.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_m, 16])
    if COUNT == 0:
        return ()
    else:
        smem = stage_chunks(keys, opaque(warpgroup), NUM_WARPGROUPS, HEAD_DIM)
        return left_operands(smem[len(smem) - COUNT :], layout)


@gluon.jit
def own_chunks(keys, loaded, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """The warpgroup's keys or values as a left operand."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    if len(loaded) == len(HEAD_DIM.chunks):
        return loaded
    else:
        smem = stage_chunks(keys, opaque(warpgroup), NUM_WARPGROUPS, HEAD_DIM)
        return smem[: len(smem) - len(loaded)] + loaded


@gluon.jit
def start_qk(rows, k, k_own, count, zeros, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Issue `k @ q^T [MMA_M, BLOCK_M]` with block of rows number `count`."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    consumer_wait(rows.q, count, CONFIG.stages)
    q_i = stage_chunks(rows.q, count, CONFIG.stages, HEAD_DIM)
    return gemm_nt(own_chunks(k, k_own, warpgroup, CONFIG), q_i, zeros)


@gluon.jit
def store_dkdv(desc, coord, x, scale, smem, HEAD_DIM: gl.constexpr, ADD: gl.constexpr):
    """Store or add (ADD) dk or dv of 64 keys; in fp32 as many columns at a time as the buffer holds."""
    WIDTH: gl.constexpr = HEAD_DIM.padded_width
    COLUMNS: gl.constexpr = min(WIDTH, DQ_COLUMNS) if desc.dtype == gl.float32 else WIDTH
    # Triton 3.8 takes views of the whole buffer only.
    PARTS: gl.constexpr = 1 if desc.dtype == gl.float32 else 2 * DQ_COLUMNS // COLUMNS
    if PARTS == 1:
        buffer = reinterpret_smem(smem, desc.dtype, desc.block_type.shape[:-1] + [COLUMNS], desc.layout)
    else:
        parts = reinterpret_smem(smem, desc.dtype, [PARTS] + desc.block_type.shape[:-1] + [COLUMNS], desc.layout)
        buffer = parts.index(0)
    for c in gl.static_range(len(x)):
        columns = x[c]
        if scale is not None:
            columns = columns * scale
        tma_store_columns(desc, columns, coord, buffer, HEAD_DIM.offsets[c], ADD)
