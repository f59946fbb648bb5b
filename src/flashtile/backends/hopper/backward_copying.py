"""The warp that copies for the backward pass: a block of keys, then all rows that see it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_schedule import first_rows, next_rows, take_keys
from .backward_sums import HALVES
from .copying import NOTICE, ROWS, keys_at, rows_at
from .pipeline import Gates, Ring, barriers, fill, wait_free
from .schedule import want_tile
from .versions import load_box


class RowRing(NamedTuple):
    """Blocks of rows on their way to the warpgroups that compute. q comes with one number of each row, dout with the
    other; readers let go of all four at once.
    """

    q: gl.shared_memory_descriptor  # [STAGES, *box]
    dout: gl.shared_memory_descriptor  # [STAGES, *box]
    start: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32: what makes log-probabilities of scores
    delta: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M] fp32, negated
    q_full: gl.shared_memory_descriptor  # [STAGES, 1] barriers
    dout_full: gl.shared_memory_descriptor
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
    k: Ring  # HALVES slots
    v: Ring


@gluon.jit
def new_rows(q_desc, numbers_desc, STAGES: gl.constexpr, gates):
    q = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    start = gl.allocate_shared_memory(gl.float32, [STAGES] + numbers_desc.block_type.shape, numbers_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES] + numbers_desc.block_type.shape, numbers_desc.layout)
    return RowRing(q, dout, start, delta, barriers(STAGES, 1), barriers(STAGES, 1), gates)


@gluon.jit
def copy_backward(sources, inputs, queue, group, padded_rows, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that copies."""
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    rows = inputs.rows
    tile_count = 0
    count = 0  # of blocks of rows
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        steps = group * (tile.hi - tile.lo)
        want_tile(queue, steps < NOTICE)
        if steps == 0:
            copy_keys(inputs.k, sources.k, tile, tile_count, TILE, PACKED)
            copy_keys(inputs.v, sources.v, tile, tile_count, TILE, PACKED)
        m, member = first_rows(tile, TILE.downwards), 0
        left = steps
        while left > 0:
            want_tile(queue, left == NOTICE)
            slot = count % STAGES
            at = rows_at(tile, tile.head_k * group + member, m * BLOCK_M, PACKED)
            numbers_at = ((tile.sums_row + member * padded_rows) // BLOCK_M + m, 0)
            wait_free(rows.gates, count, STAGES)
            mbarrier.expect(rows.q_full.index(slot), sources.q.block_type.nbytes + BLOCK_M * 4)
            load_box(sources.q, at, rows.q_full.index(slot), rows.q.index(slot))
            load_box(sources.start, numbers_at, rows.q_full.index(slot), rows.start.index(slot))
            if left == steps:
                copy_keys(inputs.k, sources.k, tile, tile_count, TILE, PACKED)
            mbarrier.expect(rows.dout_full.index(slot), sources.q.block_type.nbytes + BLOCK_M * 4)
            load_box(sources.dout, at, rows.dout_full.index(slot), rows.dout.index(slot))
            load_box(sources.delta, numbers_at, rows.dout_full.index(slot), rows.delta.index(slot))
            if left == steps:
                copy_keys(inputs.v, sources.v, tile, tile_count, TILE, PACKED)
            count += 1
            left -= 1
            m, member = next_rows(m, member, tile, group, TILE.downwards)
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def copy_keys(ring, desc, tile, tile_count, TILE: gl.constexpr, PACKED: gl.constexpr):
    HEAD_DIM: gl.constexpr = TILE.head_dim
    for half in gl.static_range(HALVES):
        at = keys_at(tile, tile.first_key + half * ROWS, PACKED)
        fill(ring, desc, at, tile_count * HALVES + half, HALVES, HEAD_DIM)
