"""Kernel of forward mode for Hopper, in Gluon: the tangents of `out` and `lse`, from the results of the forward kernel.

A row's tangents are `dlse = sum p ds` and `dout = sum p (dv + ds v) - dlse out`. With lse known, `p` needs no online
softmax, and one accumulator is all that a tile keeps: another one, of `out`, would leave 64 rows of 256 features no
registers. Scores are computed twice: seven products in all instead of six.

`dlse out` may cancel nearly all of the sum, so forward gives `out` in float32, which is rounded here.

A scheduler warp, a producer warp, and two consumer warpgroups of 64 rows each, as in the kernel of dq.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..shared import scores
from ..shared.column_masks import all_visible, where_bits
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout, kept_pairs, load_stream, where_kept
from ..shared.epilogue import ALIGN, OutputTensor
from ..shared.masking import MaskBounds, n_block_range, visible_keys
from ..shared.mma import MMA_M, gemm_nt, gemm_wait, scale_rows, zero_accumulators
from ..shared.pairs import PairBlock
from ..shared.partitions import numbered, run_partitions
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
from ..shared.ptx import opaque
from ..shared.score_mod import Loaded, load_head, load_keys, load_rows
from ..shared.scores import BackwardScores, ScoreParams
from ..shared.softmax import INFINITY, LOG2E, thread_row_sum
from ..shared.tile_scheduler import (
    PlainScheduler,
    TileQueue,
    UnpagedSeqlens,
    make_tile_queue,
    pop_tile,
    scheduler_warp,
)
from .producer import InputDescriptors, TangentPipelines, tangents_producer_warp


class RowResults(NamedTuple):
    """What forward has computed of rows, and where results go."""

    unrounded: OutputTensor  # out in float32
    out: OutputTensor
    dout: OutputTensor
    lse: Pointer  # [B, H, Sq] or [H, T], as residual and dlse
    residual: Pointer  # of natural scores
    dlse: Pointer
    lse_stride: Scalar  # between heads of these
    columns: Scalar  # of out, in units of ALIGN, or `None` where they are the kernel's


class TangentContext(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: TangentPipelines
    results: RowResults
    scale: gl.tensor  # of products
    queue: TileQueue
    bounds: MaskBounds
    diagonal: gl.tensor
    params: ScoreParams
    dropout: Dropout


@kernel
def tangents_kernel(
    inputs: InputDescriptors, results: RowResults, scale: Scalar, scheduler: PlainScheduler, seqlens: UnpagedSeqlens,
    bounds: MaskBounds, params: BackwardScores, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes are `[1, 1, MMA_M, columns]`, and `[1, 1, BLOCK_N, columns]` of keys and values. Packed sequences are
    described as in `forward_kernel`.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    gl.static_assert(FIRST_BARRIER + CONFIG.kv_stages - 1 <= LAST_BARRIER)
    q = make_buffers(inputs.q_desc, NUM_WARPGROUPS, HEAD_DIM)
    dq = q
    if CONFIG.moves_q:
        dq = make_buffers(inputs.dq_desc, NUM_WARPGROUPS, HEAD_DIM)
    stages = NamedBarriers(FIRST_BARRIER, 128 * NUM_WARPGROUPS + 32)
    kv = make_pipeline(inputs.k_desc, CONFIG.kv_stages, stages, HEAD_DIM)
    pipelines = TangentPipelines(q, dq, make_mbarriers(NUM_WARPGROUPS, 1), kv)
    queue = make_tile_queue(NUM_WARPGROUPS + 1)
    fence_async_shared()

    context = TangentContext(pipelines, results, scale, queue, bounds, scheduler.diagonal, params, dropout)
    run_partitions(
        CONFIG,
        numbered(consumer_warpgroup, NUM_WARPGROUPS, (context, CONFIG, PACKED)),
        [
            (tangents_producer_warp, (inputs, pipelines, queue, CONFIG, PACKED)),
            (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
        ],
    )


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes 64 rows of each tile."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.kv_stages
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    DS_GEMMS: gl.constexpr = len(HEAD_DIM.chunks) * (CONFIG.moves_q + CONFIG.moves_k)
    DV_GEMMS: gl.constexpr = len(HEAD_DIM_V.chunks) * CONFIG.moves_v
    # Whether the product with dv is in flight while `p * ds` is computed. Alone, it is always.
    EARLY: gl.constexpr = CONFIG.early_values or not CONFIG.moves_scores
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    pipelines, queue, bounds, params = context.pipelines, context.queue, context.bounds, context.params
    # A pair without weight adds nothing, whatever its tangent is: not 0 * NaN of a key that a mask hides.
    SELECT: gl.constexpr = (SCORE_MOD is not None) | (params.pairs.mask.data is not None) | CONFIG.natural
    dtype: gl.constexpr = pipelines.q.data[0].dtype
    dropout, stream = context.dropout, load_stream(context.dropout)
    kv = pipelines.kv
    zeros = gl.zeros([MMA_M, BLOCK_N], gl.float32, s_layout)
    load = 0
    tile_count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        first_row = tile.first_row + warpgroup * MMA_M
        shift = tile.seqlen_k - tile.seqlen_q + context.diagonal
        blocks = n_block_range(bounds, first_row, first_row + (MMA_M - 1), shift, tile.seqlen_k, BLOCK_N)
        neg_lse, neg_residual = load_row_stats(context.results, tile, first_row, s_layout, CONFIG)
        row = gl.expand_dims(first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, s_layout)), 1)
        sequence = gl.minimum(tile.b, params.batch - 1)
        of_head = load_head(params, tile.b, tile.head, SCORE_MOD)
        of_rows = load_rows(params, tile.b, tile.head, row, SCORE_MOD)
        acc = zero_accumulators(HEAD_DIM_V)
        u = thread_row_sum(zeros)  # [MMA_M, 4], of each thread: sum of p * ds
        mbarrier.wait(pipelines.q.full.index(warpgroup), tile_count & 1)
        if CONFIG.moves_q:
            mbarrier.wait(pipelines.dq.full.index(warpgroup), tile_count & 1)
        for n in range(tile.lo, tile.hi):
            block = tile.hi - 1 + tile.lo - n
            first_key = block * BLOCK_N
            masked = (block >= blocks.full_hi) | (block < blocks.full_lo)
            buffer = opaque(warpgroup)  # wide heads leave no registers for precomputed addresses
            q_i = stage_chunks(pipelines.q, buffer, NUM_WARPGROUPS, HEAD_DIM)
            of_k = load
            consumer_wait(kv, load, STAGES)
            k_j = stage_chunks(kv, load, STAGES, HEAD_DIM)
            load += 1
            s = gemm_nt(q_i, k_j, zeros)
            ds = zeros
            if CONFIG.moves_q:
                ds = gemm_nt(stage_chunks(pipelines.dq, buffer, NUM_WARPGROUPS, HEAD_DIM), k_j, ds)
            of_dk = load
            if CONFIG.moves_k:
                consumer_wait(kv, load, STAGES)
                ds = gemm_nt(q_i, stage_chunks(kv, load, STAGES, HEAD_DIM), ds, CONFIG.moves_q)
                load += 1
            key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout)), 0)
            of_keys = load_keys(params, tile.b, tile.head, key, None, SCORE_MOD)
            pairs = PairBlock(sequence, tile.head, row, key, first_key + BLOCK_N, tile.seqlen_k, ())
            loaded = Loaded(of_head, of_rows, of_keys, (), pairs)
            kept = kept_pairs(dropout, stream, tile.b, tile.head, first_row, first_key, zeros, False)
            s = warpgroup_mma_wait(DS_GEMMS, deps=(s,))
            score = scores.forward(
                s, params, tile.b, tile.head, shift, row, key, first_row - first_key, loaded, CONFIG
            )  # fmt: skip
            p = gl.exp2(scores.log2_probabilities(score.t, gl.expand_dims(neg_lse, 1), neg_residual, params))
            visible = all_visible(p)
            if masked:
                visible = visible_keys(p, bounds, first_row, first_key, shift, tile.seqlen_k)
                p = where_bits(visible, p, 0.0)
            of_dv = load
            load += CONFIG.moves_v
            if CONFIG.moves_v and EARLY:
                acc = add_loaded(acc, where_kept(kept, p, False).to(dtype), kv, of_dv, STAGES, HEAD_DIM_V)
            if CONFIG.moves_scores:
                weight = scores.derivative(p, score, params, SCORE_MOD) * context.scale
                ds, weight = warpgroup_mma_wait(DV_GEMMS * EARLY, deps=(ds, weight))
            consumer_release(kv.empty, of_k, STAGES)
            if CONFIG.moves_k:
                consumer_release(kv.empty, of_dk, STAGES)
            mbarrier.arrive(pipelines.rows_empty.index(warpgroup), count=1, pred=n == tile.hi - 1)
            if CONFIG.moves_scores:
                pds = weight * ds
                if SELECT:
                    pds = gl.where(p == 0, 0.0, pds)
                if masked:
                    pds = where_bits(visible, pds, 0.0)
                u += thread_row_sum(pds)
                if CONFIG.moves_v and not EARLY:
                    acc = add_loaded(acc, where_kept(kept, p, False).to(dtype), kv, of_dv, STAGES, HEAD_DIM_V)
                acc = gemm_wait(add_loaded(acc, where_kept(kept, pds, False).to(dtype), kv, load, STAGES, HEAD_DIM_V))
                consumer_release(kv.empty, load, STAGES)
                load += 1
            else:
                acc = gemm_wait(acc)
            if CONFIG.moves_v:
                consumer_release(kv.empty, of_dv, STAGES)
        store_tangents(context, tile, first_row, acc, u, CONFIG)
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def add_loaded(acc, p, kv, load, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue `acc + p @ b` for each chunk of a load `b`, with `p` in registers; acc may be in flight."""
    consumer_wait(kv, load, STAGES)
    b = stage_chunks(kv, load, STAGES, HEAD_DIM)
    result = ()
    for c in gl.static_range(len(acc)):
        result = result + (add_product_of_chunk(acc[c], p, b[c], HEAD_DIM.chunks[c]),)
    return result


@gluon.jit
def add_product_of_chunk(acc, p, b, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    return warpgroup_mma(left, b, acc, is_async=True)


@gluon.jit
def load_row_stats(results, tile, first_row, s_layout: gl.constexpr, CONFIG: gl.constexpr):
    """Load the negated lse `[MMA_M]` in base-2 logarithms and, of natural scores, as it is with its negated residual
    `[MMA_M, 1]` in a tuple. Rows past the sequence's end, and those without keys, get -inf, so that p is 0.
    """
    row = first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, s_layout))
    first = tile.lse_head.to(gl.int64) * results.lse_stride + tile.token_q
    exists = row < tile.seqlen_q
    lse = gl.load(results.lse + first + row, mask=exists, other=-INFINITY)
    no_keys = lse == -INFINITY
    if CONFIG.natural:
        residual = gl.load(results.residual + first + row, mask=exists, other=0.0)
        return gl.where(no_keys, -INFINITY, -lse), (gl.expand_dims(residual * -LOG2E, 1),)
    else:
        return gl.where(no_keys, -INFINITY, lse * -LOG2E), ()


@gluon.jit
def store_tangents(context, tile, first_row, acc, u, CONFIG: gl.constexpr):
    """Store `dlse`, `dout` and the rounded `out` of 64 finished rows."""
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    results, keep_scale = context.results, context.dropout.keep_scale
    dlse = gl.sum(u, 1)
    row = first_row + gl.arange(0, MMA_M, dlse.type.layout)
    base = results.dlse + tile.lse_head.to(gl.int64) * results.lse_stride + tile.token_q
    gl.store(base + row, dlse, mask=row < tile.seqlen_q)
    for c in gl.static_range(len(HEAD_DIM_V.chunks)):
        total = acc[c]
        if context.dropout.seed is not None:
            total = total * keep_scale
        store_chunk(results, tile, first_row, total, dlse, HEAD_DIM_V.offsets[c])


@gluon.jit
def store_chunk(results, tile, first_row, total, dlse, FIRST: gl.constexpr):
    """Store features from FIRST on of `dout = total - dlse * out` and of `out`."""
    layout: gl.constexpr = total.type.layout
    row = tile.token_q + first_row + gl.arange(0, total.shape[0], gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    exists = gl.expand_dims(row < tile.token_q + tile.seqlen_q, 1)
    if results.columns is not None:
        exists = exists & gl.expand_dims(feature < results.columns * ALIGN, 0)
    out = gl.load(addresses(results.unrounded, tile, row, feature), mask=exists, other=0.0)
    dout = total - scale_rows(out, dlse)
    gl.store(addresses(results.out, tile, row, feature), out.to(results.out.data.dtype.element_ty), mask=exists)
    gl.store(addresses(results.dout, tile, row, feature), dout.to(results.dout.data.dtype.element_ty), mask=exists)


@gluon.jit
def addresses(output, tile, row, feature):
    """Pointers to rows and features of a tile's head."""
    base = (
        output.data + tile.b.to(gl.int64) * output.stride_b * ALIGN + tile.head.to(gl.int64) * output.stride_h * ALIGN
    )
    return base + gl.expand_dims(row.to(gl.int64) * output.stride_m * ALIGN, 1) + gl.expand_dims(feature, 0)
