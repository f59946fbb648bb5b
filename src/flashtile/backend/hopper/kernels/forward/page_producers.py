"""The producer warps of the forward kernel for keys in pages: one for q and k, one for v.

Each loads many small boxes. Two warps share that work, because a warp that issues instructions all the time takes them
from the consumers in its quarter of the SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.pages import acquire_and_load_pages, load_parts
from ..shared.pipeline import leave_unwritten
from ..shared.tile_scheduler import REQUEST_DISTANCE, pop_tile, request_tile
from .producer import load_q


@gluon.jit
def keys_warp(q_desc, k_desc, pipelines, queue, pages, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that loads q and k. With a single stage for q, its load waits for the previous tile's scores."""
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
            parts = next_parts
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def values_warp(v_desc, pipelines, queue, pages, CONFIG: gl.constexpr):
    """The partition that loads v. Step n of the main loop needs values of block n - 1, across tile boundaries too."""
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    leave_unwritten(pipelines.v, HEAD_DIM_V)  # the first step has none
    tile_count = 0
    count = 1
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        parts = load_parts(pages, tile, tile.hi - 1, CONFIG)
        for step in range(tile.hi - tile.lo):
            next_parts = load_parts(pages, tile, tile.hi - 2 - step, CONFIG)
            acquire_and_load_pages(pipelines.v, v_desc, tile.head_k, parts, count, HEAD_DIM_V, CONFIG)
            parts = next_parts
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)
