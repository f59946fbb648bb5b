"""A tile of the fused backward pass: 64 keys of a warpgroup against all blocks of rows that see them.

The products of a block are issued so that each overlaps other work: the exponentials overlap dout's product with v, the
exchange of ds overlaps dv, and the hand-over of dq overlaps the next scores and dk. `CONFIG.late_dq` has other orders.
"""

from typing import NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ..shared import scores
from ..shared.block_lists import BlockLists, block_at, first_entry, is_cut, load_bits, load_entry, partial_of, with_bits
from ..shared.column_masks import all_visible, where_bits
from ..shared.dropout import Dropout, both_where_kept, kept_pairs, load_stream
from ..shared.masking import MaskBounds, m_block_range, visible_rows
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait, gemm_wait_with, left_operands, zero_accumulators
from ..shared.pipeline import consumer_release, consumer_wait, stage_chunks, stage_of
from ..shared.ptx import opaque
from ..shared.score_mod import Loaded
from ..shared.scores import ScoreParams
from ..shared.tile_scheduler import TileQueue
from .dq_share import DS_STAGES, begin_tile, end_tile, hand_over_dq, start_dq
from .dq_writer import DQ_COLUMNS, NUM_WARPGROUPS, DqPipeline
from .epilogue import store_tile
from .late_dq import LATE_DS_STAGES, add_dq, announce_ds, start_late_dq
from .producer import BackwardPipelines
from .scores import (
    BlockCoord,
    Residuals,
    begin_probabilities,
    block_coord,
    finish_probabilities,
    load_block,
    with_bias,
)
from .slopes import SlopeGradient, add_slope_gradient
from .tile_scheduler import RowChunk, TileSplits, first_m_block, next_m_block


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


class Block(NamedTuple):
    """What the scores and probabilities of a block need beside products."""

    coord: BlockCoord
    loaded: Loaded
    bits: tuple  # `block_lists.load_bits`
    kept: tuple  # `dropout.kept_pairs`


@gluon.jit
def compute_tile(
    warpgroup: gl.constexpr, context, tile, tile_count, count, CONFIG: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Compute dk and dv of a tile's keys, and shares of dq. Returns the number of blocks of rows so far."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    CHUNKS: gl.constexpr = len(HEAD_DIM.chunks)  # wgmmas of a product over the head dimension
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    LATE_DQ: gl.constexpr = CONFIG.late_dq is not None
    ADD_FIRST: gl.constexpr = HEAD_DIM.width > DQ_COLUMNS + MMA_M // 2  # the next scores need the registers of dq
    DP_PENDING: gl.constexpr = NUM_WARPGROUPS if LATE_DQ else 0  # products behind dp
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pipelines, outputs = context.pipelines, context.outputs
    group, params, lists = context.group, context.params, context.lists
    stream = load_stream(context.dropout)
    dtype: gl.constexpr = outputs.ds.dtype
    rows, k, v = pipelines.rows, pipelines.k, pipelines.v
    zeros = gl.zeros([MMA_M, BLOCK_M], gl.float32, s_layout)
    first_key = tile.first_key + warpgroup * MMA_M
    blocks = m_block_range(context.bounds, first_key, first_key + (MMA_M - 1), tile.shift, tile.seqlen_q, BLOCK_M)
    full_lo = gl.where(first_key + MMA_M > tile.seqlen_k, blocks.hi, blocks.full_lo)
    dk = zero_accumulators(HEAD_DIM)
    dv = zero_accumulators(HEAD_DIM)
    begin_tile(k, v, tile_count)
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
    # Unused where there are no steps.
    block = load_inputs(context, stream, tile, m, group_head, entry, first_key, zeros, warpgroup, CONFIG)
    block = with_bias_tile(block, pipelines.bias, count, steps > 0, warpgroup, CONFIG)
    partial_p = begin_probabilities(s, rows, count, block.coord, block.loaded, params, CONFIG)
    last_row = 0  # of the accumulators, of the block before
    for steps_left in range(steps, 0, -1):
        q_i = stage_chunks(rows.q, count, STAGES, HEAD_DIM)
        dout_i = stage_chunks(rows.dout, count, STAGES, HEAD_DIM)
        row_block = block_at(lists, m, entry)
        masked = is_cut((row_block < full_lo) | (row_block >= blocks.full_hi), lists, entry)
        next_entry = load_entry(lists, tile.token_q, next_m_block(m, group_head, tile, group, CONFIG.lpt)[0])
        dp = start_dp(rows, v, v_own, dout_i, context.dropout, zeros, count, warpgroup, CONFIG)
        if LATE_DQ:
            dq = start_late_dq(outputs.ds, k, count - 1, steps_left < steps, warpgroup, CONFIG)
        p, ds = score_gradients(dp, partial_p, context, tile, block, masked, row_block, count, DP_PENDING, CONFIG)
        if context.slope_gradient.data is not None:
            p = p.to(dtype)  # in half of the registers
            add_slope_gradient(context.slope_gradient, ds, block.coord, tile, params.batch, warpgroup, PACKED, CONFIG)
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
            hand_over_dq(outputs, dq, count, warpgroup, CONFIG)
        m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        if lists.data is not None:
            entry = next_entry
        block = load_inputs(context, stream, tile, m, group_head, entry, first_key, zeros, warpgroup, CONFIG)
        s = warpgroup_mma_wait(CHUNKS, deps=(s,))
        block = with_bias_tile(block, pipelines.bias, next_count, steps_left > 1, warpgroup, CONFIG)
        partial_p = begin_probabilities(s, rows, next_count, block.coord, block.loaded, params, CONFIG)
        dk, partial_p = gemm_wait_with(dk, partial_p)
        consumer_release(rows.empty, count, STAGES)
        count += 1
    if LATE_DQ:  # noqa: SIM102 - a compile-time branch
        if steps > 0:
            dq = start_late_dq(outputs.ds, k, count - 1, True, warpgroup, CONFIG)
            add_dq(outputs.dq_accum, last_row, warpgroup_mma_wait(0, deps=(dq,)), warpgroup, CONFIG)
    end_tile(k, v, tile_count)
    store_tile(context, tile, dk, dv, first_key, count, warpgroup, CONFIG, PACKED)
    return count


@gluon.jit
def load_inputs(
    context, stream, tile, m, group_head, entry, first_key, zeros, warpgroup: gl.constexpr, CONFIG: gl.constexpr
):
    """Load what the scores of the block at position m of its list need, but for a tile of a bias."""
    lists = context.lists
    row_block, partial = block_at(lists, m, entry), partial_of(lists, entry)
    coord = block_coord(tile, context.group, group_head, row_block, first_key, partial, context.residuals, CONFIG)
    loaded = load_block(coord, context.params, CONFIG)
    bits = load_bits(lists, entry, tile.token_q, m, warpgroup * MMA_M, zeros, CONFIG.block_n)
    kept = kept_pairs(context.dropout, stream, coord.b, coord.head, coord.first_row, first_key, zeros, True)
    return Block(coord, loaded, bits, kept)


@gluon.jit
def with_bias_tile(block, tiles, count, exists, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """The inputs of a block with its tile of the bias; unused where the block does not exist."""
    loaded = with_bias(block.loaded, tiles, count, exists, warpgroup, NUM_WARPGROUPS, CONFIG)
    return Block(block.coord, loaded, block.bits, block.kept)


@gluon.jit
def start_dp(rows, v, v_own, dout_i, dropout, zeros, count, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Issue `v @ dout^T [MMA_M, BLOCK_M]` of block of rows number `count`; without dropout, less delta."""
    # Write accumulators before any product is in flight: ptxas would insert a wait.
    consumer_wait(rows.dout, count, CONFIG.stages)
    dp = zeros
    if dropout.seed is None:
        dp = load_neg_delta(rows, count, zeros, CONFIG).broadcast_to(zeros.shape)
    return gemm_nt(own_chunks(v, v_own, warpgroup, CONFIG), dout_i, dp, ACCUMULATE=dropout.seed is None)


@gluon.jit
def load_neg_delta(rows, count, x, CONFIG: gl.constexpr):
    """The negated delta `[1, M]` of a block of rows, for `x [N, M]`."""
    return rows.neg_delta.index(stage_of(count, CONFIG.stages)).load(x.type.layout)


@gluon.jit
def score_gradients(
    dp, partial_p, context, tile, block, masked, row_block, count, PENDING: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """p and ds of a block. dp is in flight, with PENDING products behind it."""
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    rows, params, dropout = context.pipelines.rows, context.params, context.dropout
    p, score = finish_probabilities(partial_p, rows, count, block.coord, block.loaded, params, CONFIG)
    visible = all_visible(p)
    if masked:
        first_key, first_row = opaque(block.coord.first_key), row_block * CONFIG.block_m
        visible = visible_rows(p, context.bounds, first_key, first_row, tile.shift, tile.seqlen_q, tile.seqlen_k)
        visible = with_bits(visible, block.bits)
        p = where_bits(visible, p, 0.0)
    ds_weight = scores.derivative(p, score, params, SCORE_MOD)
    if SCORE_MOD is not None and not SCORE_MOD.same:  # noqa: SIM102 - a compile-time branch
        if masked:  # 0 * the derivative is NaN where that is
            ds_weight = where_bits(visible, ds_weight, 0.0)
    dp, ds_weight = warpgroup_mma_wait(PENDING, deps=(dp, ds_weight))
    if dropout.seed is None:
        if masked:  # 0 * dp is NaN where dp is
            dp = where_bits(visible, dp, 0.0)
        return p, ds_weight * dp
    else:
        dp, p = both_where_kept(block.kept, dp, p, True)
        p = p.to(context.outputs.ds.dtype)
        dp = dp * dropout.keep_scale + load_neg_delta(rows, count, dp, CONFIG)
        ds = ds_weight * dp
        if masked:  # 0 * dp is NaN where dp is
            ds = where_bits(visible, ds, 0.0)
        return p, ds


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
