"""The producer warp of the backward kernels: a block of keys, then all blocks of rows that see it."""

from typing import NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.bias_tiles import load_bias_tile
from ..shared.block_lists import block_at, first_entry, load_entry
from ..shared.compat import tma_load
from ..shared.coordinates import key_coord, q_coord
from ..shared.mma import MMA_M
from ..shared.pipeline import (
    NamedBarriers,
    Pipeline,
    SmemBuffers,
    acquire_and_load,
    allocate_chunks,
    expect_bytes,
    load_boxes,
    make_mbarriers,
    producer_acquire,
    stage_of,
)
from ..shared.tile_scheduler import REQUEST_DISTANCE, request_tile
from .tile_scheduler import first_m_block, key_head, next_m_block, pop_key_tile


class RowPipeline(NamedTuple):
    """Blocks of rows. q arrives with neg_lse, dout with neg_delta; consumers release all four at once."""

    q: SmemBuffers
    dout: SmemBuffers
    neg_lse: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32, or more (`stat_of`)
    neg_delta: gl.shared_memory_descriptor
    empty: NamedBarriers


class BackwardDescriptors(NamedTuple):
    """TMA descriptors of the inputs."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    neg_lse: gl.tensor
    neg_delta: gl.tensor
    bias: gl.tensor | None


class BackwardPipelines(NamedTuple):
    """Pipelines between the producer warp and the consumer warpgroups."""

    rows: RowPipeline
    k: Pipeline  # a stage for each 64 keys of a block
    v: Pipeline
    bias: tuple  # its tiles, or nothing (`bias_tiles`)


@gluon.jit
def make_row_pipeline(descs, empty, CONFIG: gl.constexpr):
    """A pipeline of blocks of rows."""
    STAGES: gl.constexpr = CONFIG.stages
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    stat_shape: gl.constexpr = [STAGES * stat_stride(CONFIG.block_m)] + descs.neg_lse.block_type.shape
    q = allocate_chunks(descs.q, STAGES, HEAD_DIM)
    dout = allocate_chunks(descs.dout, STAGES, HEAD_DIM_V)
    neg_lse = gl.allocate_shared_memory(gl.float32, stat_shape, descs.neg_lse.layout)
    neg_delta = gl.allocate_shared_memory(gl.float32, stat_shape, descs.neg_lse.layout)
    return RowPipeline(
        SmemBuffers(q, make_mbarriers(STAGES, 1)),
        SmemBuffers(dout, make_mbarriers(STAGES, 1)),
        neg_lse,
        neg_delta,
        empty,
    )


@gluon.jit
def backward_producer_warp(
    descs, pipelines, queue, group, padded_rows, splits, params, lists, CONFIG: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The partition that loads keys, values and blocks of rows, and tiles of a bias."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.stages
    rows = pipelines.rows
    tile_count = 0
    count = 0  # blocks of rows
    tile = pop_key_tile(queue, 0)
    while tile.b >= 0:
        steps = group * (tile.hi - tile.lo)
        request_tile(queue, steps < REQUEST_DISTANCE)
        if pipelines.k is None:
            load_keys_as_rows(descs, rows, tile, splits, count, PACKED, CONFIG)
            count += 1
        elif steps == 0:
            load_keys(pipelines.k, descs.k, tile, splits, tile_count, BLOCK_N, HEAD_DIM, PACKED)
            if pipelines.v is not None:
                load_keys(pipelines.v, descs.v, tile, splits, tile_count, BLOCK_N, HEAD_DIM_V, PACKED)
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        entry = first_entry(lists, tile)
        steps_left = steps
        while steps_left > 0:
            request_tile(queue, steps_left == REQUEST_DISTANCE)
            stage = stage_of(count, STAGES)
            block = block_at(lists, m, entry)
            coord = q_coord(tile, tile.head_k * group + group_head, block * BLOCK_M, PACKED)
            stat_coord = ((tile.padded_row + group_head * padded_rows) // BLOCK_M + block, 0)
            producer_acquire(rows.empty, count, STAGES)
            load_rows_and_stat(rows.q, rows.neg_lse, descs.q, descs.neg_lse, coord, stat_coord, stage, HEAD_DIM)
            if pipelines.k is not None and steps_left == steps:
                load_keys(pipelines.k, descs.k, tile, splits, tile_count, BLOCK_N, HEAD_DIM, PACKED)
            load_rows_and_stat(
                rows.dout, rows.neg_delta, descs.dout, descs.neg_delta, coord, stat_coord, stage, HEAD_DIM_V
            )
            if pipelines.v is not None and steps_left == steps:
                load_keys(pipelines.v, descs.v, tile, splits, tile_count, BLOCK_N, HEAD_DIM_V, PACKED)
            load_bias(descs.bias, pipelines.bias, params, tile, group, group_head, block, count, CONFIG)
            count += 1
            steps_left -= 1
            m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
            if lists.data is not None:
                entry = load_entry(lists, tile.token_q, m)
        tile_count += 1
        tile = pop_key_tile(queue, tile_count)


@gluon.jit
def load_bias(bias_desc, tiles, params, tile, group, group_head, block, count, CONFIG: gl.constexpr):
    """Load the bias of a block of rows, MMA_M keys for each consumer warpgroup; nothing where there are no tiles."""
    PARTS: gl.constexpr = CONFIG.block_n // MMA_M
    if bias_desc is not None:
        sequence, head = gl.minimum(tile.b, params.batch - 1), tile.head_k * group + group_head
        for part in gl.static_range(PARTS):
            load_bias_tile(
                bias_desc, tiles[0], params.pairs.bias, sequence, head, block * CONFIG.block_m,
                tile.first_key + part * MMA_M, count, part, PARTS, CONFIG,
            )  # fmt: skip


@gluon.jit
def load_rows_and_stat(buffers, row_stat, desc, row_stat_desc, coord, stat_coord, stage, HEAD_DIM: gl.constexpr):
    """Start the loads of a block of rows and of one statistic of its rows to an empty stage."""
    full = buffers.full.index(stage)
    mbarrier.expect(full, HEAD_DIM.num_boxes * desc.block_type.nbytes + row_stat_desc.block_type.nbytes)
    load_boxes(buffers, desc, coord, stage, HEAD_DIM)
    tma_load(row_stat_desc, stat_coord, full, stat_of(row_stat, stage))


@constexpr_function
def stat_stride(rows):
    """Blocks of a statistic from stage to stage: TMA writes to multiples of 128 bytes."""
    return max(1, 32 // rows)


@gluon.jit
def stat_of(stats, stage):
    """The statistic of a stage."""
    return stats.index(stage * stat_stride(stats.shape[-1]))


@gluon.jit
def load_keys_as_rows(descs, rows, tile, splits, count, PACKED: gl.constexpr, CONFIG: gl.constexpr):
    """Load k and v to a stage of rows."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    stage = stage_of(count, CONFIG.stages)
    coord = key_coord(tile, key_head(tile, splits), tile.first_key, PACKED)
    producer_acquire(rows.empty, count, CONFIG.stages)
    expect_bytes(rows.q, descs.k, stage, HEAD_DIM)
    load_boxes(rows.q, descs.k, coord, stage, HEAD_DIM)
    expect_bytes(rows.dout, descs.v, stage, HEAD_DIM_V)
    load_boxes(rows.dout, descs.v, coord, stage, HEAD_DIM_V)


@gluon.jit
def load_keys(
    pipeline, desc, tile, splits, tile_count, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Load k or v of a block of keys, MMA_M keys for each stage."""
    PARTS: gl.constexpr = BLOCK_N // MMA_M
    for part in gl.static_range(PARTS):
        coord = key_coord(tile, key_head(tile, splits), tile.first_key + part * MMA_M, PACKED)
        acquire_and_load(pipeline, desc, coord, tile_count * PARTS + part, PARTS, HEAD_DIM)
