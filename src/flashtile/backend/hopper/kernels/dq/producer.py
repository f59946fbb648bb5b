"""The producer warp of the dq kernel: a tile of rows, then the keys and values that it sees."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.coordinates import kv_coord, q_coord
from ..shared.mma import MMA_M
from ..shared.pipeline import Pipeline, SmemBuffers, acquire_and_load, expect_bytes, load_boxes
from ..shared.tile_scheduler import REQUEST_DISTANCE, pop_tile, request_tile


class DqPipelines(NamedTuple):
    """Buffers between the producer warp and the consumer warpgroups."""

    q: SmemBuffers  # one for each group of rows
    dout: SmemBuffers
    rows_empty: gl.shared_memory_descriptor  # [ROW_GROUPS, 1] mbarriers, for q and dout
    kv: Pipeline  # block n: v in load 2n, k in load 2n + 1, as k is released last


@gluon.jit
def dq_producer_warp(q_desc, k_desc, v_desc, dout_desc, pipelines, queue, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that loads. A tile's first values come before its rows, whose buffers are released later."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    KV_STAGES: gl.constexpr = CONFIG.kv_stages
    ROW_GROUPS: gl.constexpr = CONFIG.row_groups
    tile_count = 0
    count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        request_tile(queue, tile.hi - tile.lo < REQUEST_DISTANCE)
        first_key = (tile.hi - 1) * BLOCK_N
        for n in range(tile.lo, tile.hi):
            request_tile(queue, n == tile.hi - REQUEST_DISTANCE)
            acquire_and_load(pipelines.kv, v_desc, kv_coord(tile, first_key, PACKED), 2 * count, KV_STAGES, HEAD_DIM_V)
            if n == tile.lo:
                for group in gl.static_range(ROW_GROUPS):
                    coord = q_coord(tile, tile.head, tile.first_row + group * MMA_M, PACKED)
                    mbarrier.wait(pipelines.rows_empty.index(group), (tile_count & 1) ^ 1)
                    expect_bytes(pipelines.q, q_desc, group, HEAD_DIM)
                    load_boxes(pipelines.q, q_desc, coord, group, HEAD_DIM)
                    expect_bytes(pipelines.dout, dout_desc, group, HEAD_DIM_V)
                    load_boxes(pipelines.dout, dout_desc, coord, group, HEAD_DIM_V)
            acquire_and_load(
                pipelines.kv, k_desc, kv_coord(tile, first_key, PACKED), 2 * count + 1, KV_STAGES, HEAD_DIM
            )
            first_key -= BLOCK_N
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)
