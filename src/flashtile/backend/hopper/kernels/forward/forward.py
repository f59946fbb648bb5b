"""Forward kernel for Hopper (Shah et al., "FlashAttention-3", 2024, section 3), in Gluon.

Warp-specialized and persistent: a scheduler warp, a producer warp that loads q, k and v by TMA, and two or three
consumer warpgroups of 64 rows each that iterate over blocks of keys (`mainloop`). A tile's last product with values is
issued in the first step of the next tile, so that the tensor cores do not idle between tiles. All steps share one copy
of the main loop's code in each warpgroup; separate code for a tile's edges would take longer to compile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.grouped import without
from ..shared import softmax
from ..shared.bias_tiles import make_bias_tiles
from ..shared.block_lists import BlockLists, first_entry, load_entry
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.coordinates import q_coord
from ..shared.dropout import Dropout, load_stream
from ..shared.epilogue import tma_store_columns
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M, gemm_rs, gemm_wait, scale_rows
from ..shared.partitions import numbered, run_partitions
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    allocate_boxes,
    consumer_wait,
    make_buffers,
    make_mbarriers,
    make_pipeline,
    stage_chunks,
    wraps_of,
)
from ..shared.ptx import opaque
from ..shared.scores import ScoreParams
from ..shared.tile_scheduler import SeqlenInfo, TileScheduler, make_tile_queue, pop_tile, scheduler_warp
from .mainloop import (
    ForwardContext,
    ForwardOutputs,
    initial_state,
    load_tile,
    mainloop_step,
    next_tile_state,
    skip_steps,
    tile_units,
    warpgroup_tile,
)
from .page_producers import keys_warp, values_warp
from .producer import ForwardPipelines, producer_warp, q_stage

ForwardScheduler = without(TileScheduler, lists=without(BlockLists, "ranks"))


@kernel
def forward_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, out_desc: Pointer, bias_desc: Pointer, lse: Pointer,
    residual: Pointer, stride_lse: Scalar, scheduler: ForwardScheduler, seqlens: SeqlenInfo, bounds: MaskBounds,
    params: ScoreParams, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes: q and out `[1, 1, MMA_M, columns]`, k and v `[1, 1, BLOCK_N, columns]`; one more leading 1 if packed. With
    tiles of a bias, those are `[1, 1, MMA_M, BLOCK_N]`. With pages, boxes of k and v are `[1, 1, 1, CONFIG.page_rows,
    columns]` (`pages`).

    If packed, `seqlen_q` and `seqlen_k` are numbers of tokens; with pages, `seqlen_k` is a sequence's room for keys.
    With `num_splits`, out and lse are those of each split of the keys, `[num_splits * B, H, Sq, Dv]` in fp32 and
    `[num_splits * B, H, Sq]`. A score_mod, in CONFIG, takes `params.inputs`.
    """
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.num_warpgroups
    THREADS: gl.constexpr = 128 * CONFIG.num_warpgroups + 32  # consumers and producer
    gl.static_assert(FIRST_BARRIER + 2 * CONFIG.stages - 1 <= LAST_BARRIER)
    q = make_buffers(q_desc, Q_BUFFERS, HEAD_DIM)
    PARTS: gl.constexpr = CONFIG.page_parts
    k = make_pipeline(k_desc, CONFIG.stages, NamedBarriers(FIRST_BARRIER, THREADS), HEAD_DIM, PARTS)
    v = make_pipeline(v_desc, CONFIG.stages, NamedBarriers(FIRST_BARRIER + CONFIG.stages, THREADS), HEAD_DIM_V, PARTS)
    bias_tiles = make_bias_tiles(bias_desc, CONFIG.num_warpgroups, CONFIG)
    pipelines = ForwardPipelines(q, make_mbarriers(Q_BUFFERS, 1), k, v, bias_tiles)
    queue = make_tile_queue(CONFIG.num_warpgroups + CONFIG.num_producers)
    smem = allocate_boxes(out_desc, CONFIG.num_warpgroups, CONFIG.epilogue_columns)
    fence_async_shared()

    pages, lists = seqlens.page_table, scheduler.lists
    outputs = ForwardOutputs(
        out_desc, smem, lse, residual, stride_lse, None if scheduler.num_splits is None else scheduler.num_heads
    )
    context = ForwardContext(pipelines, outputs, queue, bounds, scheduler.diagonal, params, dropout, lists, pages)
    if CONFIG.page_rows > 0:
        run_partitions(
            CONFIG,
            numbered(consumer_warpgroup, CONFIG.num_warpgroups, (context, CONFIG, PACKED)),
            [
                (keys_warp, (q_desc, k_desc, pipelines, queue, pages, CONFIG, PACKED)),
                (values_warp, (v_desc, pipelines, queue, pages, CONFIG)),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )
    else:
        run_partitions(
            CONFIG,
            numbered(consumer_warpgroup, CONFIG.num_warpgroups, (context, CONFIG, PACKED)),
            [
                (
                    producer_warp,
                    (q_desc, k_desc, v_desc, bias_desc, pipelines, queue, params, lists, CONFIG, PACKED),
                ),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes 64 rows of each tile."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    STAGES: gl.constexpr = CONFIG.stages
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    Q_BUFFERS: gl.constexpr = Q_STAGES * CONFIG.num_warpgroups
    pipelines, outputs, queue, params = context.pipelines, context.outputs, context.queue, context.params
    lists, stream = context.lists, load_stream(context.dropout)
    q, v = pipelines.q, pipelines.v
    count = 0  # steps of the main loop
    tile_count = 0
    tile = pop_tile(queue, 0)
    wg_tile = warpgroup_tile(tile, warpgroup, context, CONFIG)
    state = initial_state(wg_tile, params, outputs, q.data[0].dtype, CONFIG)
    accumulate = count == 0
    # Coordinates and 1 / l of the tile whose last product with values is still to come.
    out_coord = result_coord(tile, wg_tile.first_row, outputs, PACKED)
    inv_l = gl.zeros([MMA_M], gl.float32, gl.SliceLayout(1, state.acc[0].type.layout))
    while tile.b >= 0:
        stage = q_stage(tile_count, warpgroup, CONFIG)
        mbarrier.wait(q.full.index(stage), wraps_of(tile_count, Q_STAGES) & 1)
        q_i = stage_chunks(q, stage, Q_BUFFERS, HEAD_DIM)
        loaded = load_tile(params, wg_tile, CONFIG)
        units = tile_units(params, wg_tile, loaded, CONFIG)
        state = next_tile_state(state.acc, state.p, wg_tile, params, outputs, CONFIG)
        first = tile.hi - 1
        n, stop = first, first
        entry = first_entry(lists, tile)
        # The first step completes the previous tile. Two loops, as a branch in each step would cost 1 to 4%.
        while n >= tile.lo:
            while n >= stop:
                next_entry = load_entry(lists, tile.token_k, n - 1)
                state = mainloop_step(
                    state, accumulate, context, stream, q_i, loaded, units, count, tile_count, wg_tile, n, entry,
                    warpgroup, CONFIG,
                )  # fmt: skip
                accumulate = n != first
                n -= 1
                if lists.data is not None:
                    entry = next_entry
                count += 1
            if (stop == first) & (tile_count > 0):
                store_out(outputs, state.acc, inv_l, out_coord, warpgroup, CONFIG)
            stop = tile.lo
            if CONFIG.skips_steps:
                skipped = gl.where(wg_tile.first_row < tile.seqlen_q, 0, n - tile.lo + 1)
                skip_steps(pipelines, tile_count, count, skipped, warpgroup, CONFIG)
                n -= skipped
                count += skipped
        out_coord = result_coord(tile, wg_tile.first_row, outputs, PACKED)
        inv_l = finalize(outputs, params, state, wg_tile, CONFIG)
        if context.dropout.seed is not None:
            inv_l = inv_l * context.dropout.keep_scale
        if Q_STAGES > 1:
            mbarrier.arrive(pipelines.q_empty.index(stage), count=1)
        tile_count += 1
        tile = pop_tile(queue, tile_count)
        wg_tile = warpgroup_tile(tile, warpgroup, context, CONFIG)
    consumer_wait(v, count, STAGES)
    acc = gemm_wait(gemm_rs(state.acc, state.p, stage_chunks(v, count, STAGES, HEAD_DIM_V), accumulate))
    store_out(outputs, acc, inv_l, out_coord, warpgroup, CONFIG)
    tma.store_wait(0)


@gluon.jit
def result_coord(tile, first_row, outputs, PACKED: gl.constexpr):
    """TMA coordinates of 64 rows of the output."""
    if outputs.num_heads is None:
        return q_coord(tile, tile.head, first_row, PACKED)
    else:
        return (tile.lse_head // outputs.num_heads, tile.head, first_row, 0)


@gluon.jit
def finalize(outputs, params, state, wg_tile, CONFIG: gl.constexpr):
    """Store lse of finished rows and its residual, and return `1 / l [MMA_M]`, which normalizes acc."""
    tile = wg_tile.tile
    layout: gl.constexpr = gl.SliceLayout(1, state.acc[0].type.layout)
    WITH_SINKS: gl.constexpr = params.sinks is not None
    inv_l, lse, residual = softmax.finalize(state.row_max, state.l, layout, WITH_SINKS, CONFIG.natural)
    row = wg_tile.first_row + gl.arange(0, MMA_M, layout)
    base = outputs.lse + tile.lse_head.to(gl.int64) * outputs.stride_lse + tile.token_q
    gl.store(base + row, lse, mask=row < tile.seqlen_q)
    if outputs.residual is not None:
        base = outputs.residual + tile.lse_head.to(gl.int64) * outputs.stride_lse + tile.token_q
        gl.store(base + row, residual, mask=row < tile.seqlen_q)
    return inv_l


@gluon.jit
def store_out(outputs, acc, inv_l, out_coord, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Store the output of 64 finished rows."""
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    smem = outputs.smem.index(opaque(warpgroup))
    for c in gl.static_range(len(acc)):
        tma_store_columns(outputs.out, scale_rows(acc[c], inv_l), out_coord, smem, HEAD_DIM_V.offsets[c])
