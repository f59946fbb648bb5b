"""dq kernel of the split backward pass for Hopper, in Gluon: tiles of rows iterate over blocks of keys.

For head dimensions over 128, the accumulators of dk and dv of 64 keys fill the registers. Accumulating dq in memory for
every 64 keys, instead of 128 as in the fused kernel, would take longer than computing the scores twice. So dq has its
own kernel, `dkdv` computes dk and dv, and each result has one writer.

A scheduler warp, a producer warp, and two consumer warpgroups of 64 rows each; the products of one overlap the
exponentials of the other. Over 256 features both have the same rows, whose scores each computes, and half of dq's
columns.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ..shared import scores
from ..shared.column_masks import all_visible, where_bits
from ..shared.columns import chunks_of
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout, kept_pairs, load_stream, where_kept
from ..shared.epilogue import OutputTensor, store_accumulators
from ..shared.masking import MaskBounds, n_block_range, visible_keys
from ..shared.mma import MMA_M, left_operands
from ..shared.pairs import PairBlock
from ..shared.partitions import numbered, run_partitions
from ..shared.parts import LEFT, add_product, issue_large_product, large_product, small_products, zero_sums
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    consumer_release,
    consumer_wait,
    make_buffers,
    make_mbarriers,
    make_pipeline,
    stage_chunks,
)
from ..shared.ptx import launch_dependents, opaque, wait_prerequisites
from ..shared.score_mod import Loaded, load_head, load_keys, load_rows
from ..shared.scores import BackwardScores, ScoreParams
from ..shared.softmax import INFINITY
from ..shared.tile_scheduler import (
    PlainScheduler,
    TileQueue,
    UnpagedSeqlens,
    make_tile_queue,
    pop_tile,
    scheduler_warp,
)
from .producer import DqPipelines, dq_producer_warp


class RowStats(NamedTuple):
    """Row statistics `[heads, padded_rows]` as `padded_rows` lays them out."""

    neg_lse: Pointer
    neg_residual: Pointer  # of natural scores
    neg_delta: Pointer
    padded_rows: Scalar


class DqContext(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: DqPipelines
    row_stats: RowStats
    output: OutputTensor
    columns: gl.tensor | None
    scale: gl.tensor  # of dq
    queue: TileQueue
    bounds: MaskBounds
    diagonal: gl.tensor
    params: ScoreParams
    dropout: Dropout


@kernel
def dq_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, dout_desc: Pointer, row_stats: RowStats, dq: OutputTensor,
    scale: Scalar, columns: Scalar, scheduler: PlainScheduler, seqlens: UnpagedSeqlens, bounds: MaskBounds,
    params: BackwardScores, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes are `[1, 1, 64, columns]`. Packed sequences are described as in `forward_kernel`."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    gl.static_assert(FIRST_BARRIER + CONFIG.kv_stages - 1 <= LAST_BARRIER)
    ROW_GROUPS: gl.constexpr = CONFIG.row_groups
    pipelines = DqPipelines(
        make_buffers(q_desc, ROW_GROUPS, HEAD_DIM),
        make_buffers(dout_desc, ROW_GROUPS, HEAD_DIM_V),
        make_mbarriers(ROW_GROUPS, CONFIG.column_groups),
        make_pipeline(k_desc, CONFIG.kv_stages, NamedBarriers(FIRST_BARRIER, 128 * NUM_WARPGROUPS + 32), HEAD_DIM),
    )
    queue = make_tile_queue(NUM_WARPGROUPS + 1)
    fence_async_shared()
    wait_prerequisites()
    launch_dependents()

    context = DqContext(
        pipelines, row_stats, dq, columns, scale, queue, bounds, scheduler.diagonal, params, dropout
    )  # fmt: skip
    run_partitions(
        CONFIG,
        numbered(consumer_warpgroup, NUM_WARPGROUPS, (context, CONFIG, PACKED)),
        [
            (dq_producer_warp, (q_desc, k_desc, v_desc, dout_desc, pipelines, queue, CONFIG, PACKED)),
            (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
        ],
    )


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes dq of 64 rows of each tile, or a group of its columns."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    COLUMNS: gl.constexpr = CONFIG.columns[warpgroup]
    ROW_GROUP: gl.constexpr = warpgroup // CONFIG.column_groups
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    KV_STAGES: gl.constexpr = CONFIG.kv_stages
    ROW_GROUPS: gl.constexpr = CONFIG.row_groups
    PARTS: gl.constexpr = HEAD_DIM.parts
    DP_GEMMS: gl.constexpr = len(HEAD_DIM_V.chunks) * max(1, len(LEFT[PARTS]))
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    pipelines, queue, bounds, params = context.pipelines, context.queue, context.bounds, context.params
    dtype: gl.constexpr = pipelines.q.data[0].dtype
    dropout, stream = context.dropout, load_stream(context.dropout)
    kv = pipelines.kv
    zeros = gl.zeros([MMA_M, BLOCK_N], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        first_row = tile.first_row + ROW_GROUP * MMA_M
        shift = tile.seqlen_k - tile.seqlen_q + context.diagonal
        blocks = n_block_range(bounds, first_row, first_row + (MMA_M - 1), shift, tile.seqlen_k, BLOCK_N)
        neg_lse, neg_residual, neg_delta = load_row_stats(context.row_stats, tile, first_row, s_layout, PACKED)
        row = gl.expand_dims(first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, s_layout)), 1)
        sequence = gl.minimum(tile.b, params.batch - 1)
        of_head = load_head(params, tile.b, tile.head, SCORE_MOD)
        of_rows = load_rows(params, tile.b, tile.head, row, SCORE_MOD)
        dq = zero_sums(COLUMNS)
        mbarrier.wait(pipelines.q.full.index(ROW_GROUP), tile_count & 1)
        mbarrier.wait(pipelines.dout.full.index(ROW_GROUP), tile_count & 1)
        dout_own = ()
        if CONFIG.dout_in_registers:
            dout_own = left_operands(stage_chunks(pipelines.dout, opaque(ROW_GROUP), ROW_GROUPS, HEAD_DIM_V), s_layout)
        for n in range(tile.lo, tile.hi):
            block = tile.hi - 1 + tile.lo - n
            first_key = block * BLOCK_N
            masked = (block >= blocks.full_hi) | (block < blocks.full_lo)
            buffer = opaque(ROW_GROUP)  # wide heads leave no registers for precomputed addresses
            consumer_wait(kv, 2 * count + 1, KV_STAGES)
            q_i = stage_chunks(pipelines.q, buffer, ROW_GROUPS, HEAD_DIM)
            k_j = stage_chunks(kv, 2 * count + 1, KV_STAGES, HEAD_DIM)
            s = small_products(q_i, k_j, zeros, PARTS)
            if PARTS > 1:
                s = issue_large_product(q_i, k_j, warpgroup_mma_wait(0, deps=(s,)), PARTS)
            consumer_wait(kv, 2 * count, KV_STAGES)
            v_j = stage_chunks(kv, 2 * count, KV_STAGES, HEAD_DIM_V)
            dout_i = dout_own
            if not CONFIG.dout_in_registers:
                dout_i = stage_chunks(pipelines.dout, buffer, ROW_GROUPS, HEAD_DIM_V)
            dp = small_products(dout_i, v_j, zeros, PARTS)
            key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout)), 0)
            of_keys = load_keys(params, tile.b, tile.head, key, None, SCORE_MOD)
            pairs = PairBlock(sequence, tile.head, row, key, first_key + BLOCK_N, tile.seqlen_k, ())
            loaded = Loaded(of_head, of_rows, of_keys, (), pairs)
            kept = kept_pairs(dropout, stream, tile.b, tile.head, first_row, first_key, zeros, False)
            s = warpgroup_mma_wait(DP_GEMMS, deps=(s,))
            distance = first_row - first_key
            score = scores.forward(s, params, tile.b, tile.head, shift, row, key, distance, loaded, CONFIG)
            p = gl.exp2(scores.log2_probabilities(score.t, gl.expand_dims(neg_lse, 1), neg_residual, params))
            visible = all_visible(p)
            if masked:
                visible = visible_keys(p, bounds, first_row, first_key, shift, tile.seqlen_k)
                p = where_bits(visible, p, 0.0)
            ds_weight = scores.derivative(p, score, params, SCORE_MOD)
            dp, ds_weight = warpgroup_mma_wait(0, deps=(dp, ds_weight))
            dp = large_product(dout_i, v_j, dp, PARTS)
            consumer_release(kv.empty, 2 * count, KV_STAGES)
            mbarrier.arrive(pipelines.rows_empty.index(ROW_GROUP), count=1, pred=n == tile.hi - 1)
            if dropout.seed is not None:
                dp = where_kept(kept, dp, False) * dropout.keep_scale
            dp += gl.expand_dims(neg_delta, 1)
            ds = ds_weight * dp
            if masked:  # NaN in a hidden pair: dp, or a derivative
                ds = where_bits(visible, ds, 0.0)
            k_j = chunks_of(stage_chunks(kv, 2 * opaque(count) + 1, KV_STAGES, HEAD_DIM), COLUMNS)
            dq = add_product(dq, ds, k_j, dtype, COLUMNS)
            consumer_release(kv.empty, 2 * count + 1, KV_STAGES)
            count += 1
        store_accumulators(
            context.output, context.columns, dq, context.scale, tile.b, tile.head, tile.token_q, first_row,
            tile.seqlen_q, COLUMNS,
        )  # fmt: skip
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def load_row_stats(row_stats, tile, first_row, s_layout: gl.constexpr, PACKED: gl.constexpr):
    """Load neg_lse `[MMA_M]`, neg_residual `[MMA_M, 1]` in a tuple (of natural scores), and neg_delta `[MMA_M]`. Rows
    past the sequence's end get -inf, 0 and 0, so that p is 0.
    """
    row = first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, s_layout))
    base = tile.lse_head.to(gl.int64) * row_stats.padded_rows
    if PACKED:  # each sequence begins with a block of its own
        base += (tile.token_q // MMA_M + tile.b) * MMA_M
    exists = row < tile.seqlen_q
    neg_lse = gl.load(row_stats.neg_lse + base + row, mask=exists, other=-INFINITY)
    neg_residual = ()
    if row_stats.neg_residual is not None:
        neg_residual = (gl.expand_dims(gl.load(row_stats.neg_residual + base + row, mask=exists, other=0.0), 1),)
    return neg_lse, neg_residual, gl.load(row_stats.neg_delta + base + row, mask=exists, other=0.0)
