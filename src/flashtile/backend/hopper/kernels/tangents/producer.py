"""The producer warp of the kernel of forward mode: a tile of rows, then the keys and values that it sees."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.compat import Pointer
from ..shared.coordinates import kv_coord, q_coord
from ..shared.mma import MMA_M
from ..shared.pipeline import Pipeline, SmemBuffers, acquire_and_load, expect_bytes, load_boxes
from ..shared.tile_scheduler import REQUEST_DISTANCE, pop_tile, request_tile


class InputDescriptors(NamedTuple):
    """TMA descriptors of inputs and of their tangents, which are `None` of inputs that stand still."""

    q_desc: Pointer
    k_desc: Pointer
    v_desc: Pointer
    dq_desc: Pointer
    dk_desc: Pointer
    dv_desc: Pointer


class TangentPipelines(NamedTuple):
    """Buffers between the producer warp and the consumer warpgroups."""

    q: SmemBuffers  # one for each warpgroup
    dq: SmemBuffers  # those of q again where it stands still
    rows_empty: gl.shared_memory_descriptor  # [NUM_WARPGROUPS, 1] mbarriers, for q and dq
    kv: Pipeline  # `CONFIG.loads` loads for each block: k, dk, dv and v, of which some are absent


@gluon.jit
def tangents_producer_warp(inputs, pipelines, queue, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that loads. A tile's first keys come before its rows, whose buffers are released later."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.kv_stages
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    kv = pipelines.kv
    tile_count = 0
    load = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        request_tile(queue, tile.hi - tile.lo < REQUEST_DISTANCE)
        first_key = (tile.hi - 1) * BLOCK_N
        for n in range(tile.lo, tile.hi):
            request_tile(queue, n == tile.hi - REQUEST_DISTANCE)
            coord = kv_coord(tile, first_key, PACKED)
            acquire_and_load(kv, inputs.k_desc, coord, load, STAGES, HEAD_DIM)
            if n == tile.lo:
                for warpgroup in gl.static_range(NUM_WARPGROUPS):
                    rows = q_coord(tile, tile.head, tile.first_row + warpgroup * MMA_M, PACKED)
                    mbarrier.wait(pipelines.rows_empty.index(warpgroup), (tile_count & 1) ^ 1)
                    expect_bytes(pipelines.q, inputs.q_desc, warpgroup, HEAD_DIM)
                    load_boxes(pipelines.q, inputs.q_desc, rows, warpgroup, HEAD_DIM)
                    if CONFIG.moves_q:
                        expect_bytes(pipelines.dq, inputs.dq_desc, warpgroup, HEAD_DIM)
                        load_boxes(pipelines.dq, inputs.dq_desc, rows, warpgroup, HEAD_DIM)
            load += 1
            if CONFIG.moves_k:
                acquire_and_load(kv, inputs.dk_desc, coord, load, STAGES, HEAD_DIM)
                load += 1
            if CONFIG.moves_v:
                acquire_and_load(kv, inputs.dv_desc, coord, load, STAGES, HEAD_DIM_V)
                load += 1
            if CONFIG.moves_scores:
                acquire_and_load(kv, inputs.v_desc, coord, load, STAGES, HEAD_DIM_V)
                load += 1
            first_key -= BLOCK_N
        tile_count += 1
        tile = pop_tile(queue, tile_count)
