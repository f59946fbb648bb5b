"""Forward kernel for q, k and v of 8 bits on Hopper, in Gluon: q in float8_e4m3fn, k and v in that or in float8_e5m2.

The structure is that of `forward.forward`: a scheduler warp, a producer warp, consumer warpgroups of 64 rows. One more
warpgroup transposes values on their way (`transpose`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.grouped import without
from ..forward.forward import result_coord
from ..forward.mainloop import ForwardOutputs, load_tile, warpgroup_tile
from ..forward.producer import q_stage
from ..shared import softmax as shared_softmax
from ..shared.block_lists import BlockLists, first_entry, load_entry
from ..shared.compat import Pointer, Scalar, kernel, reinterpret_smem
from ..shared.epilogue import tma_store_columns
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M, scale_rows
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    Pipeline,
    allocate_boxes,
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
    SUM_COLUMNS,
    Descales,
    EightBitContext,
    initial_state,
    mainloop_step,
    tile_units,
    value_descale,
)
from .partitions import run_partitions
from .producer import EightBitPipelines, pages_warp, producer_warp
from .transpose import panel_layout, transpose_warps

QUARTERS = gl.constexpr(0x2828)  # two numbers 0.25 in float8_e4m3fn
EightBitScheduler = without(TileScheduler, lists=without(BlockLists, "ranks"))


@kernel
def eight_bit_forward_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, out_desc: Pointer, lse: Pointer, stride_lse: Scalar,
    scheduler: EightBitScheduler, seqlens: SeqlenInfo, bounds: MaskBounds, params: ScoreParams,
    descales: Descales, CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes: q and out `[1, 1, MMA_M, columns]`, k and v `[1, 1, BLOCK_N, columns]`; one more leading 1 if packed. With
    pages, boxes of k and v are `[1, 1, 1, CONFIG.page_rows, columns]` (`pages`). With `num_splits`, results are
    those of each split, as in `forward.forward`.
    """
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.stages
    V_STAGES: gl.constexpr = CONFIG.v_stages
    TRANSPOSED_STAGES: gl.constexpr = CONFIG.transposed_stages
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.num_warpgroups
    CONSUMERS: gl.constexpr = 128 * CONFIG.num_warpgroups
    TRANSPOSING: gl.constexpr = 32 * CONFIG.transpose_warps
    OF_V: gl.constexpr = FIRST_BARRIER + STAGES
    OF_TRANSPOSED: gl.constexpr = OF_V + V_STAGES
    gl.static_assert(OF_TRANSPOSED + TRANSPOSED_STAGES - 1 <= LAST_BARRIER)
    q = make_buffers(q_desc, Q_BUFFERS, HEAD_DIM)
    PARTS: gl.constexpr = CONFIG.page_parts
    k = make_pipeline(k_desc, STAGES, NamedBarriers(FIRST_BARRIER, CONSUMERS + 32), HEAD_DIM, PARTS)
    v = make_pipeline(v_desc, V_STAGES, NamedBarriers(OF_V, TRANSPOSING + 32), HEAD_DIM_V, PARTS)
    layout: gl.constexpr = gl.NVMMASharedLayout(min(BLOCK_N, 128), 8, 2)
    data = gl.allocate_shared_memory(v_desc.dtype, [TRANSPOSED_STAGES, HEAD_DIM_V.width, BLOCK_N], layout)
    empty = NamedBarriers(OF_TRANSPOSED, CONSUMERS + TRANSPOSING)
    transposed = Pipeline((data,), make_mbarriers(TRANSPOSED_STAGES, 1), empty)
    pipelines = EightBitPipelines(q, make_mbarriers(Q_BUFFERS, 1), k, v, transposed)
    quarters = gl.allocate_shared_memory(q_desc.dtype, [SUM_COLUMNS, BLOCK_N], layout)
    fill_quarters(quarters)
    queue = make_tile_queue(CONFIG.num_warpgroups + 2)
    smem = allocate_boxes(out_desc, CONFIG.num_warpgroups, CONFIG.epilogue_columns)
    fence_async_shared()

    pages = seqlens.page_table
    split_heads = None if scheduler.num_splits is None else scheduler.num_heads
    outputs = ForwardOutputs(out_desc, smem, lse, None, stride_lse, split_heads)
    context = EightBitContext(
        pipelines, quarters, outputs, queue, bounds, scheduler.diagonal, params, descales, scheduler.lists,
        pages,
    )  # fmt: skip
    if CONFIG.page_rows > 0:
        run_partitions(
            CONFIG,
            consumer_warpgroup,
            (context, CONFIG, PACKED),
            (transpose_warps, (pipelines, queue, CONFIG)),
            [
                (pages_warp, (q_desc, k_desc, v_desc, pipelines, queue, pages, CONFIG, PACKED)),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )
    else:
        run_partitions(
            CONFIG,
            consumer_warpgroup,
            (context, CONFIG, PACKED),
            (transpose_warps, (pipelines, queue, CONFIG)),
            [
                (producer_warp, (q_desc, k_desc, v_desc, pipelines, queue, scheduler.lists, CONFIG, PACKED)),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )


@gluon.jit
def fill_quarters(quarters):
    """As words: ptxas 12.8 converts equal numbers to 8 bits wrong, of which every other one is then arbitrary."""
    BYTES: gl.constexpr = quarters.shape[1]
    words = reinterpret_smem(quarters, gl.int16, [SUM_COLUMNS, BYTES // 2], panel_layout(min(BYTES, 128)))
    of_threads: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    words.store(gl.full([SUM_COLUMNS, BYTES // 2], QUARTERS, gl.int16, of_threads))


@gluon.jit
def consumer_warpgroup(warpgroup: gl.constexpr, context, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes 64 rows of each tile."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    Q_BUFFERS: gl.constexpr = Q_STAGES * CONFIG.num_warpgroups
    pipelines, queue, params, lists = context.pipelines, context.queue, context.params, context.lists
    q = pipelines.q
    count = 0  # steps of the main loop
    tile_count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        wg_tile = warpgroup_tile(tile, warpgroup, context, CONFIG)
        stage = q_stage(tile_count, warpgroup, CONFIG)
        mbarrier.wait(q.full.index(stage), wraps_of(tile_count, Q_STAGES) & 1)
        q_i = stage_chunks(q, stage, Q_BUFFERS, HEAD_DIM)
        units = tile_units(params, context.descales, tile)
        state = initial_state(tile, params, context.outputs, CONFIG)
        loaded = load_tile(params, wg_tile, CONFIG)
        n = tile.hi - 1
        entry = first_entry(lists, tile)
        while n >= tile.lo:
            next_entry = load_entry(lists, tile.token_k, n - 1)
            state = mainloop_step(
                state, context, q_i, loaded, units, count, tile_count, wg_tile, n, entry, warpgroup, CONFIG
            )  # fmt: skip
            n -= 1
            if lists.data is not None:
                entry = next_entry
            count += 1
        if Q_STAGES > 1:
            mbarrier.arrive(pipelines.q_empty.index(stage), count=1)
        finish(context, state.acc, state.l, state.row_base, state.total, wg_tile, warpgroup, CONFIG, PACKED)
        tile_count += 1
        tile = pop_tile(queue, tile_count)
    tma.store_wait(0)


@gluon.jit
def finish(
    context, acc, l, row_base, total, wg_tile, warpgroup: gl.constexpr, CONFIG: gl.constexpr, PACKED: gl.constexpr  # noqa: E741
):  # fmt: skip
    """Store lse and the results of 64 finished rows."""
    outputs, tile = context.outputs, wg_tile.tile
    layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    WITH_SINKS: gl.constexpr = context.params.sinks is not None
    inv_l, _, _ = shared_softmax.finalize(row_base, l, layout, WITH_SINKS, False)
    inv_total, lse, _ = shared_softmax.finalize(row_base, total, layout, WITH_SINKS, False)
    inv_l = gl.where(inv_total == inv_total, inv_l, inv_total)  # NaN of an infinite score, which p no longer has
    row = wg_tile.first_row + gl.arange(0, MMA_M, layout)
    base = outputs.lse + tile.lse_head.to(gl.int64) * outputs.stride_lse + tile.token_q
    gl.store(base + row, lse, mask=row < tile.seqlen_q)
    inv_l = inv_l * value_descale(context.params, context.descales, tile)
    out_coord = result_coord(tile, wg_tile.first_row, outputs, PACKED)
    smem = outputs.smem.index(opaque(warpgroup))
    CHUNKS: gl.constexpr = CONFIG.value_chunks
    for c in gl.static_range(CHUNKS):
        x = scale_rows(acc[c], inv_l)
        tma_store_columns(outputs.out, x, out_coord, smem, c * CONFIG.value_columns)
