"""The warp that copies q, k and v into shared memory, and where boxes lie in the tensors.

Coordinates of dense tensors are `(sequence, head, row, feature)`. Those of packed ones make a box end with its sequence
(`descriptors.packed_boxes`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ... import tables
from .pipeline import Ring, Slots, expect_rows, fill, load_rows, round_of, slot_of
from .schedule import take_tile, want_tile

ROWS = gl.constexpr(tables.ROWS)  # of one warpgroup
NOTICE = gl.constexpr(2)  # blocks of keys before the end of a tile, the next one is asked for
END = gl.constexpr(tables.END)


class Inputs(NamedTuple):
    """What the copying warp hands to the computing ones."""

    q: Slots  # `tiles_of_q` slots for each consumer
    q_free: gl.shared_memory_descriptor  # [slots, 1] barriers: there are more slots than gates
    k: Ring
    v: Ring


@gluon.jit
def copy(q_desc, k_desc, v_desc, inputs, queue, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that copies, for the n-th step the n-th keys and the values of the block before, over the edges of tiles
    too. Where q has one slot, it is the last tile's until that one's last scores: values do not wait for it.
    """
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_N: gl.constexpr = TILE.block_n
    STAGES: gl.constexpr = TILE.stages
    EARLY_Q: gl.constexpr = TILE.tiles_of_q > 1
    k, v = inputs.k, inputs.v
    tile_count = 0
    n = 0  # steps
    mbarrier.arrive(v.full.index(0), count=1)  # no block comes before the first one: its slot stays as it is
    tile = take_tile(queue, 0)
    while tile.b >= 0:
        key = (tile.hi - 1) * BLOCK_N
        if tile_count == 0:
            fill(k, k_desc, keys_at(tile, key, PACKED), 0, STAGES, HEAD_DIM)
            copy_q(q_desc, inputs, tile, 0, TILE, PACKED)
        want_tile(queue, tile.hi - tile.lo <= NOTICE)
        for above in range(tile.lo + 1, tile.hi):
            n += 1
            want_tile(queue, above == tile.hi - NOTICE)
            fill(k, k_desc, keys_at(tile, key - BLOCK_N, PACKED), n, STAGES, HEAD_DIM)
            fill(v, v_desc, keys_at(tile, key, PACKED), n, STAGES, HEAD_DIM_V)
            key -= BLOCK_N
        last = tile
        tile_count += 1
        n += 1
        tile = take_tile(queue, tile_count)
        if tile.b >= 0:
            fill(k, k_desc, keys_at(tile, (tile.hi - 1) * BLOCK_N, PACKED), n, STAGES, HEAD_DIM)
            if EARLY_Q:
                copy_q(q_desc, inputs, tile, tile_count, TILE, PACKED)
        fill(v, v_desc, keys_at(last, key, PACKED), n, STAGES, HEAD_DIM_V)
        if not EARLY_Q:  # noqa: SIM102  # decided when the kernel is compiled
            if tile.b >= 0:
                copy_q(q_desc, inputs, tile, tile_count, TILE, PACKED)


@gluon.jit
def copy_q(q_desc, inputs, tile, tile_count, TILE: gl.constexpr, PACKED: gl.constexpr):
    HEAD_DIM: gl.constexpr = TILE.head_dim
    CONSUMERS: gl.constexpr = TILE.consumers
    TILES: gl.constexpr = TILE.tiles_of_q
    for c in gl.static_range(CONSUMERS):
        slot = q_slot(tile_count, c, TILE)
        mbarrier.wait(inputs.q_free.index(slot), (round_of(tile_count, TILES) & 1) ^ 1)
        expect_rows(inputs.q, q_desc, slot, HEAD_DIM)
        at = rows_at(tile, tile.head, tile.first_row + c * ROWS, PACKED)
        load_rows(inputs.q, q_desc, at, slot, HEAD_DIM)


@gluon.jit
def rows_at(tile, head, row, PACKED: gl.constexpr):
    """Coordinates of a box of q, out or dout."""
    if PACKED:
        return packed(head, row, tile.token_q, tile.seqlen_q)
    else:
        return (tile.b, head, row, 0)


@gluon.jit
def keys_at(tile, key, PACKED: gl.constexpr):
    """Coordinates of a box of k, v, dk or dv."""
    if PACKED:
        return packed(tile.head_k, key, tile.token_k, tile.seqlen_k)
    else:
        return (tile.b, tile.head_k, key, 0)


@gluon.jit
def packed(head, row, token, seqlen):
    """Rows past the sequence's last one have fourth coordinates of END and more, which lie outside."""
    return (END, token + seqlen, head, END - seqlen + row, 0)


@gluon.jit
def q_slot(tile_count, consumer, TILE: gl.constexpr):
    return slot_of(tile_count, TILE.tiles_of_q) * TILE.consumers + consumer
