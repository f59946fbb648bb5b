"""What the warps that copy do in the backward pass of wide heads."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_schedule import first_rows, next_rows, take_keys
from .copying import NOTICE, ROWS, keys_at, rows_at
from .pipeline import Gates, Ring, Slots, expect_rows, fill, load_rows, new_slots, wait_free
from .schedule import take_tile, want_tile
from .versions import load_box


class RowTiles(NamedTuple):
    """For dq: a tile of rows, and the keys and values that pass by."""

    q: Slots  # one for each consumer
    dout: Slots
    free: gl.shared_memory_descriptor  # [CONSUMERS, 1] barriers, for both
    keys: Ring  # the n-th block's values are its item 2n, its keys item 2n + 1: these are let go last


class RowRing(NamedTuple):
    """For dk and dv: blocks of rows that pass by. Readers let go of all that is in a slot at once."""

    q: Slots
    dout: Slots
    start: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32: what makes log-probabilities of scores; with q
    delta: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32, negated; with dout
    gates: Gates


class KeyTiles(NamedTuple):
    """For dk and dv: a block of keys, and the rows that pass by."""

    k: Ring  # one slot
    v: Ring
    rows: RowRing


@gluon.jit
def new_row_ring(sources, gates, TILE: gl.constexpr):
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    STAGES: gl.constexpr = TILE.stages
    numbers: gl.constexpr = [STAGES] + sources.start.block_type.shape
    return RowRing(
        new_slots(sources.q, STAGES, HEAD_DIM),
        new_slots(sources.dout, STAGES, HEAD_DIM_V),
        gl.allocate_shared_memory(gl.float32, numbers, sources.start.layout),
        gl.allocate_shared_memory(gl.float32, numbers, sources.delta.layout),
        gates,
    )


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


@gluon.jit
def copy_for_keys(sources, inputs, queue, group, padded_rows, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that copies for dk and dv."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    rows = inputs.rows
    tile_count = 0
    count = 0  # of blocks of rows
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        steps = group * (tile.hi - tile.lo)
        want_tile(queue, steps < NOTICE)
        keys = keys_at(tile, tile.first_key, PACKED)
        if steps == 0:
            fill(inputs.k, sources.k, keys, tile_count, 1, HEAD_DIM)
            fill(inputs.v, sources.v, keys, tile_count, 1, HEAD_DIM_V)
        m, member = first_rows(tile, TILE.downwards), 0
        left = steps
        while left > 0:
            want_tile(queue, left == NOTICE)
            slot = count % STAGES
            at = rows_at(tile, tile.head_k * group + member, m * BLOCK_M, PACKED)
            numbers_at = ((tile.sums_row + member * padded_rows) // BLOCK_M + m, 0)
            wait_free(rows.gates, count, STAGES)
            mbarrier.expect(rows.q.full.index(slot), HEAD_DIM.boxes * sources.q.block_type.nbytes + BLOCK_M * 4)
            load_rows(rows.q, sources.q, at, slot, HEAD_DIM)
            load_box(sources.start, numbers_at, rows.q.full.index(slot), rows.start.index(slot))
            if left == steps:
                fill(inputs.k, sources.k, keys, tile_count, 1, HEAD_DIM)
            mbarrier.expect(rows.dout.full.index(slot), HEAD_DIM_V.boxes * sources.dout.block_type.nbytes + BLOCK_M * 4)
            load_rows(rows.dout, sources.dout, at, slot, HEAD_DIM_V)
            load_box(sources.delta, numbers_at, rows.dout.full.index(slot), rows.delta.index(slot))
            if left == steps:
                fill(inputs.v, sources.v, keys, tile_count, 1, HEAD_DIM_V)
            count += 1
            left -= 1
            m, member = next_rows(m, member, tile, group, TILE.downwards)
        tile_count += 1
        tile = take_keys(queue, tile_count)
