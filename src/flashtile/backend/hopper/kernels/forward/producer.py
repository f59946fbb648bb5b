"""The producer warp of the forward kernel: TMA loads of q, k and v."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.bias_tiles import load_bias_tile
from ..shared.block_lists import block_at, first_entry, load_entry
from ..shared.coordinates import kv_coord, q_coord
from ..shared.mma import MMA_M
from ..shared.pipeline import (
    Pipeline,
    SmemBuffers,
    acquire_and_load,
    expect_bytes,
    leave_unwritten,
    load_boxes,
    stage_of,
    wraps_of,
)
from ..shared.tile_scheduler import REQUEST_DISTANCE, pop_tile, request_tile
from .key_order import block_of_step, first_block


class ForwardPipelines(NamedTuple):
    """Buffers between the producer warp and the consumer warpgroups."""

    q: SmemBuffers  # q_stages for each warpgroup
    q_empty: gl.shared_memory_descriptor  # [buffers, 1] mbarriers: there are too few named barriers
    k: Pipeline
    v: Pipeline
    bias: tuple  # its tiles, or nothing (`bias_tiles`)


@gluon.jit
def producer_warp(
    q_desc, k_desc, v_desc, bias_desc, pipelines, queue, params, lists, CONFIG: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """The partition that loads q, k and v, and tiles of a bias.

    Step n of the main loop needs block n of keys and the values of block n - 1, across tile boundaries too. With a
    single stage for q, the previous tile holds it until its last scores are computed; the values do not wait for that.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.stages
    EARLY_Q: gl.constexpr = CONFIG.q_stages > 1
    k, v, inputs = pipelines.k, pipelines.v, params.inputs
    tile_count = 0
    count = 0  # steps of the main loop
    leave_unwritten(v, HEAD_DIM_V)  # the first step has no previous values
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        first = first_block(tile, inputs, CONFIG)
        first_key = block_at(lists, first, first_entry(lists, tile)) * BLOCK_N
        next_entry = load_entry(lists, tile.token_k, tile.hi - 2)
        if tile_count == 0:
            acquire_and_load(k, k_desc, kv_coord(tile, first_key, PACKED), 0, STAGES, HEAD_DIM)
            load_q(q_desc, pipelines, tile, 0, CONFIG, PACKED)
            load_bias(bias_desc, pipelines, params, tile, first_key, 0, CONFIG)
        request_tile(queue, tile.hi - tile.lo <= REQUEST_DISTANCE)
        for step in range(1, tile.hi - tile.lo):
            count += 1
            request_tile(queue, step == tile.hi - tile.lo - REQUEST_DISTANCE)
            next_key = block_at(lists, block_of_step(tile.hi - 1 - step, first, tile, CONFIG), next_entry) * BLOCK_N
            if lists.data is not None:
                next_entry = load_entry(lists, tile.token_k, tile.hi - 2 - step)
            acquire_and_load(k, k_desc, kv_coord(tile, next_key, PACKED), count, STAGES, HEAD_DIM)
            acquire_and_load(v, v_desc, kv_coord(tile, first_key, PACKED), count, STAGES, HEAD_DIM_V)
            load_bias(bias_desc, pipelines, params, tile, next_key, count, CONFIG)
            first_key = next_key
        previous = tile
        tile_count += 1
        count += 1
        tile = pop_tile(queue, tile_count)
        if tile.b >= 0:
            next_key = block_at(lists, first_block(tile, inputs, CONFIG), first_entry(lists, tile)) * BLOCK_N
            acquire_and_load(k, k_desc, kv_coord(tile, next_key, PACKED), count, STAGES, HEAD_DIM)
            if EARLY_Q:
                load_q(q_desc, pipelines, tile, tile_count, CONFIG, PACKED)
        acquire_and_load(v, v_desc, kv_coord(previous, first_key, PACKED), count, STAGES, HEAD_DIM_V)
        if not EARLY_Q:  # noqa: SIM102 - a compile-time branch
            if tile.b >= 0:
                load_q(q_desc, pipelines, tile, tile_count, CONFIG, PACKED)
        if bias_desc is not None:  # noqa: SIM102 - a compile-time branch
            if tile.b >= 0:
                next_key = block_at(lists, first_block(tile, inputs, CONFIG), first_entry(lists, tile)) * BLOCK_N
                load_bias(bias_desc, pipelines, params, tile, next_key, count, CONFIG)


@gluon.jit
def load_q(q_desc, pipelines, tile, tile_count, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """Load the tile's q, one box for each consumer warpgroup."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    for warpgroup in gl.static_range(NUM_WARPGROUPS):
        stage = q_stage(tile_count, warpgroup, CONFIG)
        mbarrier.wait(pipelines.q_empty.index(stage), (wraps_of(tile_count, Q_STAGES) & 1) ^ 1)
        expect_bytes(pipelines.q, q_desc, stage, HEAD_DIM)
        coord = q_coord(tile, tile.head, tile.first_row + warpgroup * MMA_M, PACKED)
        load_boxes(pipelines.q, q_desc, coord, stage, HEAD_DIM)


@gluon.jit
def load_bias(bias_desc, pipelines, params, tile, first_key, count, CONFIG: gl.constexpr):
    """Load the bias of a step, one tile for each consumer warpgroup; nothing where there are no tiles."""
    NUM_WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    if bias_desc is not None:
        sequence = gl.minimum(tile.b, params.batch - 1)
        for warpgroup in gl.static_range(NUM_WARPGROUPS):
            load_bias_tile(
                bias_desc, pipelines.bias[0], params.pairs.bias, sequence, tile.head,
                tile.first_row + warpgroup * MMA_M, first_key, count, warpgroup, NUM_WARPGROUPS, CONFIG,
            )  # fmt: skip


@gluon.jit
def q_stage(tile_count, warpgroup, CONFIG: gl.constexpr):
    """Buffer of q for a warpgroup's tile."""
    return stage_of(tile_count, CONFIG.q_stages) * CONFIG.num_warpgroups + warpgroup
