"""The warp that copies for the backward pass: a block of keys, then all rows that see it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.pipeline import Gates, Ring, Slots, barriers, fill, load_rows, new_memories, slot_of, wait_free
from ..shared.producer import NOTICE, ROWS, keys_at, rows_at
from ..shared.schedule import want_tile
from ..shared.versions import load_box
from .schedule import first_rows, next_rows, take_keys


class RowRing(NamedTuple):
    """Blocks of rows on their way to the warpgroups that compute. q comes with one number of each row, dout with the
    other; readers let go of all four at once.
    """

    q: Slots
    dout: Slots
    start: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32: what makes log-probabilities of scores
    delta: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32, negated
    gates: Gates


class Sources(NamedTuple):
    """Descriptors of what is copied."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    start: gl.tensor
    delta: gl.tensor


class BackwardInputs(NamedTuple):
    rows: RowRing
    k: Ring  # a slot for each 64 keys of a block
    v: Ring


@gluon.jit
def new_rows(sources, gates, TILE: gl.constexpr):
    STAGES: gl.constexpr = TILE.stages
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    numbers: gl.constexpr = [STAGES] + sources.start.block_type.shape
    q = new_memories(sources.q, STAGES, HEAD_DIM)
    dout = new_memories(sources.dout, STAGES, HEAD_DIM_V)
    start = gl.allocate_shared_memory(gl.float32, numbers, sources.start.layout)
    delta = gl.allocate_shared_memory(gl.float32, numbers, sources.start.layout)
    return RowRing(Slots(q, barriers(STAGES, 1)), Slots(dout, barriers(STAGES, 1)), start, delta, gates)


@gluon.jit
def copy_backward(sources, inputs, queue, group, padded_rows, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that copies."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    STAGES: gl.constexpr = TILE.stages
    rows = inputs.rows
    tile_count = 0
    count = 0  # of blocks of rows
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        steps = group * (tile.hi - tile.lo)
        want_tile(queue, steps < NOTICE)
        if steps == 0:
            copy_keys(inputs.k, sources.k, tile, tile_count, BLOCK_N, HEAD_DIM, PACKED)
            copy_keys(inputs.v, sources.v, tile, tile_count, BLOCK_N, HEAD_DIM_V, PACKED)
        m, member = first_rows(tile, TILE.downwards), 0
        left = steps
        while left > 0:
            want_tile(queue, left == NOTICE)
            slot = slot_of(count, STAGES)
            at = rows_at(tile, tile.head_k * group + member, m * BLOCK_M, PACKED)
            numbers_at = ((tile.sums_row + member * padded_rows) // BLOCK_M + m, 0)
            wait_free(rows.gates, count, STAGES)
            load_rows_and_numbers(rows.q, rows.start, sources.q, sources.start, at, numbers_at, slot, HEAD_DIM)
            if left == steps:
                copy_keys(inputs.k, sources.k, tile, tile_count, BLOCK_N, HEAD_DIM, PACKED)
            load_rows_and_numbers(rows.dout, rows.delta, sources.dout, sources.delta, at, numbers_at, slot, HEAD_DIM_V)
            if left == steps:
                copy_keys(inputs.v, sources.v, tile, tile_count, BLOCK_N, HEAD_DIM_V, PACKED)
            count += 1
            left -= 1
            m, member = next_rows(m, member, tile, group, TILE.downwards)
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def load_rows_and_numbers(slots, numbers, desc, numbers_desc, at, numbers_at, slot, HEAD_DIM: gl.constexpr):
    """Start the copies of a block of rows, and of one number of each, to a slot that is free."""
    full = slots.full.index(slot)
    mbarrier.expect(full, HEAD_DIM.boxes * desc.block_type.nbytes + numbers_desc.block_type.nbytes)
    load_rows(slots, desc, at, slot, HEAD_DIM)
    load_box(numbers_desc, numbers_at, full, numbers.index(slot))


@gluon.jit
def copy_keys(
    ring, desc, tile, tile_count, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = BLOCK_N // ROWS
    for part in gl.static_range(PARTS):
        at = keys_at(tile, tile.first_key + part * ROWS, PACKED)
        fill(ring, desc, at, tile_count * PARTS + part, PARTS, HEAD_DIM)
