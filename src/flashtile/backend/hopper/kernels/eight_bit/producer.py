"""The producer warp: TMA loads of q, k and v in 8 bits."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..forward.producer import load_q
from ..shared.block_lists import block_at, first_entry, load_entry
from ..shared.coordinates import RAGGED_EXTENT, kv_coord
from ..shared.pages import acquire_and_load_pages, load_part, load_parts
from ..shared.pipeline import Pipeline, SmemBuffers, acquire_and_load, producer_acquire, stage_of
from ..shared.ptx import from_lane
from ..shared.tile_scheduler import REQUEST_DISTANCE, pop_tile, request_tile


class EightBitPipelines(NamedTuple):
    """Buffers between the producer warp, the warpgroup that transposes values, and the consumers."""

    q: SmemBuffers
    q_empty: gl.shared_memory_descriptor  # [buffers, 1] mbarriers
    k: Pipeline
    v: Pipeline  # as they lie in memory
    v_transposed: Pipeline  # values [features, keys]


@gluon.jit
def producer_warp(q_desc, k_desc, v_desc, pipelines, queue, lists, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that loads q, k and v: blocks of keys of a tile, the last one first."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.stages
    V_STAGES: gl.constexpr = CONFIG.v_stages
    tile_count = 0
    count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        blocks = tile.hi - tile.lo
        entry = first_entry(lists, tile)
        for step in range(blocks):
            request_tile(queue, step == gl.maximum(blocks - REQUEST_DISTANCE, 0))
            next_entry = load_entry(lists, tile.token_k, tile.hi - 2 - step)
            coord = kv_coord(tile, block_at(lists, tile.hi - 1 - step, entry) * BLOCK_N, PACKED)
            acquire_and_load(pipelines.k, k_desc, coord, count, STAGES, HEAD_DIM)
            if step == 0:
                load_q(q_desc, pipelines, tile, tile_count, CONFIG, PACKED)
            acquire_and_load(pipelines.v, v_desc, coord, count, V_STAGES, HEAD_DIM_V)
            if lists.data is not None:
                entry = next_entry
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def pages_warp(q_desc, k_desc, v_desc, pipelines, queue, pages, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """As `producer_warp`, for keys in pages. In 16 bits two warps load them; here one more would leave all threads
    fewer registers.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    tile_count = 0
    count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        blocks = tile.hi - tile.lo
        parts = load_parts(pages, tile, tile.hi - 1, CONFIG)
        for step in range(blocks):
            request_tile(queue, step == gl.maximum(blocks - REQUEST_DISTANCE, 0))
            next_parts = load_parts(pages, tile, tile.hi - 2 - step, CONFIG)
            acquire_and_load_pages(pipelines.k, k_desc, tile.head_k, parts, count, HEAD_DIM, CONFIG)
            if step == 0:
                load_q(q_desc, pipelines, tile, tile_count, CONFIG, PACKED)
            acquire_and_load_values(pipelines.v, v_desc, tile.head_k, parts, count, CONFIG)
            parts = next_parts
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def acquire_and_load_values(v, v_desc, head, parts, count, CONFIG: gl.constexpr):
    """As `pages.acquire_and_load_pages`, for values, which have stages of their own."""
    STAGES: gl.constexpr = CONFIG.v_stages
    PARTS: gl.constexpr = CONFIG.page_parts
    WIDTH: gl.constexpr = CONFIG.head_dim_v
    BOXES: gl.constexpr = PARTS * (WIDTH.smem_width // v_desc.block_type.shape[-1])
    stage = stage_of(count, STAGES)
    full = v.full.index(stage)
    producer_acquire(v.empty, count, STAGES)
    mbarrier.expect(full, BOXES * v_desc.block_type.nbytes)
    for part in range(PARTS):
        stop, row = parts.stop, parts.row
        if PARTS > 1:
            stop, row = from_lane(stop, part), from_lane(row, part)
        coord = (RAGGED_EXTENT, stop, head, row, 0)
        load_part(v.data, full, v_desc, coord, stage, part, 0, len(WIDTH.chunks), STAGES, WIDTH, PARTS)
