"""A warpgroup's share of a block's dq: its product, and its hand-over to the warp that writes it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ... import tile_config
from ..shared.compat import thread_barrier
from ..shared.mma import MMA_M
from ..shared.pipeline import (
    LAST_BARRIER,
    as_matrix,
    consumer_release,
    consumer_wait,
    slice_columns,
    stage_chunks,
    stage_of,
)
from ..shared.ptx import barrier_arrive, barrier_sync, opaque
from ..shared.swizzle import swizzled

NUM_WARPGROUPS = gl.constexpr(tile_config.NUM_WARPGROUPS)
DS_STAGES = gl.constexpr(2)
CONSUMER_THREADS = gl.constexpr(256)
DS_BARRIER = LAST_BARRIER  # both warpgroups have stored their ds


@gluon.jit
def start_dq(ds, k, stage, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the warpgroup's share of `ds @ k [BLOCK_M, D]` once both warpgroups have stored their ds."""
    barrier_sync(DS_BARRIER, CONSUMER_THREADS)
    fence_async_shared()  # for both warpgroups' stores, complete since the barrier
    return issue_dq(ds, k, stage, warpgroup, CONFIG)


@gluon.jit
def issue_dq(ds, k, stage, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the warpgroup's share of `ds @ k [BLOCK_M, D]`, one product for the keys of each warpgroup."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    SHARE: gl.constexpr = CONFIG.dq_shares[warpgroup]
    WIDTH: gl.constexpr = SHARE.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros([MMA_M, WIDTH], gl.float32, layout)
    zero = opaque(0)
    for h in gl.static_range(NUM_WARPGROUPS):
        ds_j = slice_columns(ds.index(stage + h), SHARE.row, MMA_M)
        k_j = stage_chunks(k, zero + h, NUM_WARPGROUPS, HEAD_DIM)[SHARE.chunk]
        k_j = slice_columns(k_j, SHARE.column - HEAD_DIM.offsets[SHARE.chunk], WIDTH)
        dq = warpgroup_mma(ds_j.permute((1, 0)), k_j, dq, use_acc=h > 0, is_async=True)
    return dq


@gluon.jit
def store_dq(smem, dq, scale, CONFIG: gl.constexpr):
    """Store a share of dq to its staging buffer: in fp32 for its accumulators, or the final numbers."""
    if smem.dtype == gl.float32:
        slice_columns(smem, 0, dq.shape[1]).store(swizzled(dq, CONFIG.dq_box))
    else:
        slice_columns(as_matrix(smem), 0, dq.shape[1]).store((dq * scale).to(smem.dtype))


@gluon.jit
def begin_tile(k, v, tile_count):
    """Wait for all keys and values of a tile, and for the memory of its results."""
    for h in gl.static_range(NUM_WARPGROUPS):
        consumer_wait(k, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
        consumer_wait(v, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
    tma.store_wait(0)  # TMA has read the previous tile's dk
    thread_barrier()


@gluon.jit
def end_tile(k, v, tile_count):
    """Release the keys and values of a tile."""
    for h in gl.static_range(NUM_WARPGROUPS):
        consumer_release(k.empty, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)
        consumer_release(v.empty, tile_count * NUM_WARPGROUPS + h, NUM_WARPGROUPS)


@gluon.jit
def hand_over_dq(outputs, dq, count, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Hand the warpgroup's share of the dq of block number `count` to the warp that writes it."""
    dq_pipeline = outputs.dq_pipeline
    mbarrier.wait(dq_pipeline.empty.index(warpgroup), (count & 1) ^ 1)
    store_dq(dq_pipeline.smem.index(warpgroup), dq, outputs.scale, CONFIG)
    barrier_arrive(dq_pipeline.full.first + warpgroup, dq_pipeline.full.threads)


@gluon.jit
def compute_dq_alone(warpgroup: gl.constexpr, context, tile, tile_count, count, CONFIG: gl.constexpr):
    """As `compute_tile`, for a warpgroup whose keys are past the last one: shares of dq from the other one's keys."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    pipelines, outputs = context.pipelines, context.outputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    begin_tile(pipelines.k, pipelines.v, tile_count)
    steps = context.group * (tile.hi - tile.lo)
    for step in range(steps):
        stage = stage_of(count, DS_STAGES) * NUM_WARPGROUPS
        if step < DS_STAGES:
            ds = gl.zeros([MMA_M, BLOCK_M], outputs.ds.dtype, s_layout)
            outputs.ds.index(stage + warpgroup).store(ds)
        dq = start_dq(outputs.ds, pipelines.k, stage, warpgroup, CONFIG)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        hand_over_dq(outputs, dq, count, warpgroup, CONFIG)
        consumer_release(pipelines.rows.empty, count, CONFIG.stages)
        count += 1
    end_tile(pipelines.k, pipelines.v, tile_count)
    return count
