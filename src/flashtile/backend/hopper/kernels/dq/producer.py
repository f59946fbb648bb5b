"""The warp that copies for dq of wide heads: a tile of rows, then the keys and values that they see."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.pipeline import Ring, Slots, expect_rows, fill, load_rows
from ..shared.producer import NOTICE, ROWS, keys_at, rows_at
from ..shared.schedule import take_tile, want_tile


class RowTiles(NamedTuple):
    q: Slots  # one for each consumer
    dout: Slots
    free: gl.shared_memory_descriptor  # [CONSUMERS, 1] barriers, for both
    keys: Ring  # the n-th block's values are its item 2n, its keys item 2n + 1: these are let go last


@gluon.jit
def copy_for_rows(q_desc, k_desc, v_desc, dout_desc, inputs, queue, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that copies for dq. A tile's first values come before its rows, whose memory is free later."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_N: gl.constexpr = TILE.block_n
    SLOTS: gl.constexpr = TILE.slots
    CONSUMERS: gl.constexpr = TILE.consumers
    tile_count = 0
    count = 0
    tile = take_tile(queue, 0)
    while tile.b >= 0:
        want_tile(queue, tile.hi - tile.lo < NOTICE)
        key = (tile.hi - 1) * BLOCK_N
        for above in range(tile.lo, tile.hi):
            want_tile(queue, above == tile.hi - NOTICE)
            fill(inputs.keys, v_desc, keys_at(tile, key, PACKED), 2 * count, SLOTS, HEAD_DIM_V)
            if above == tile.lo:
                for c in gl.static_range(CONSUMERS):
                    at = rows_at(tile, tile.head, tile.first_row + c * ROWS, PACKED)
                    mbarrier.wait(inputs.free.index(c), (tile_count & 1) ^ 1)
                    expect_rows(inputs.q, q_desc, c, HEAD_DIM)
                    load_rows(inputs.q, q_desc, at, c, HEAD_DIM)
                    expect_rows(inputs.dout, dout_desc, c, HEAD_DIM_V)
                    load_rows(inputs.dout, dout_desc, at, c, HEAD_DIM_V)
            fill(inputs.keys, k_desc, keys_at(tile, key, PACKED), 2 * count + 1, SLOTS, HEAD_DIM)
            key -= BLOCK_N
            count += 1
        tile_count += 1
        tile = take_tile(queue, tile_count)
