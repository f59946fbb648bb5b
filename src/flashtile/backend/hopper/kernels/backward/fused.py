"""Fused backward kernel for Hopper (Shah et al., "FlashAttention-3", 2024, section 3 and appendix B), in Gluon.

A persistent program takes a block of 128 keys of a head and iterates over the rows that see it, with a scheduler warp,
a producer warp and two consumer warpgroups of 64 keys each. Blocks are transposed, `[N, M]`, so that p and ds are left
operands of dv and dk in the registers that hold them. ds also passes through shared memory: each warpgroup computes its
share of the block's dq from all 128 keys. Two more warps accumulate the shares in fp32 (`dq_writer`), or the warpgroups
do (`late_dq`); `postprocess` converts them. `mainloop` has a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from ..shared.bias_tiles import make_bias_tiles
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M
from ..shared.partitions import numbered, run_partitions
from ..shared.pipeline import (
    FIRST_BARRIER,
    NamedBarriers,
    allocate_boxes,
    make_mbarriers,
    make_pipeline,
)
from ..shared.ptx import launch_dependents, wait_prerequisites
from ..shared.scores import BackwardScores
from ..shared.tile_scheduler import UnpagedSeqlens, make_tile_queue
from .dq_share import DS_BARRIER, compute_dq_alone
from .dq_writer import DQ_COLUMNS, NUM_WARPGROUPS, DqPipeline, DqWriter, dq_writer_warp
from .late_dq import SECOND_DS_BARRIER
from .mainloop import BackwardContext, BackwardOutputs, compute_tile, stages_of_ds
from .producer import BackwardDescriptors, BackwardPipelines, backward_producer_warp, make_row_pipeline
from .scores import Residuals
from .slopes import SlopeGradient
from .tile_scheduler import (
    KeyTileScheduler,
    key_scheduler_warp,
    pop_key_tile,
)

PIPELINE_THREADS = gl.constexpr(256 + 32)  # with the producer warp


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
def compute_tile_or_dq(
    warpgroup: gl.constexpr, context, tile, tile_count, count, CONFIG: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """As `compute_tile`, where this warpgroup's keys may be past the last one."""
    if tile.first_key + warpgroup * MMA_M < tile.seqlen_k:
        count = compute_tile(warpgroup, context, tile, tile_count, count, CONFIG, PACKED)
    else:
        count = compute_dq_alone(warpgroup, context, tile, tile_count, count, CONFIG)
    return count
