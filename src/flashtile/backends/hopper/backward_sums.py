"""The warp that adds what each block of keys gives to dq to its sums in memory.

Sums have one order, so that the same call gives the same bits: a block of rows has a counter of how many blocks of keys
have added to it, from the last keys to the first, and each waits for its turn. The first one writes: nothing has to be
cleared.

Hardly anybody waits. Beside a diagonal, a block of keys begins with rows that the block after it has passed before.
Elsewhere all blocks begin with the first rows, but programs that once are a step behind each other take up their next
work, and pass all rows, a step behind each other.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import tables
from .backward_schedule import take_keys
from .masking import blocks_seen
from .pipeline import results_landed
from .versions import add_box, store_box, thread_barrier

ROWS = gl.constexpr(tables.ROWS)
COLUMNS = gl.constexpr(tables.COLUMNS)
HALVES = gl.constexpr(2)  # of a block of keys, one for each computing warpgroup


class Sums(NamedTuple):
    """What the computing warpgroups hand to this one: each its half of a block's dq."""

    staged: gl.shared_memory_descriptor  # [HALVES, ROWS, COLUMNS] fp32
    full: gl.shared_memory_descriptor  # [1, 1] barrier
    empty: gl.shared_memory_descriptor  # [1, 1] barrier


@gluon.jit
def add_sums(dq_desc, sums, queue, turns, window, group, padded_rows, TILE: gl.constexpr):
    BLOCK_M: gl.constexpr = TILE.block_m
    count = 0
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        n = tile.first_key // TILE.block_n
        m = tile.lo
        row = tile.sums_row
        for _ in range(group * (tile.hi - tile.lo)):
            mbarrier.wait(sums.full.index(0), count & 1)
            at = row + m * BLOCK_M
            counter = turns + at // BLOCK_M
            seen = blocks_seen(window, m * BLOCK_M + (BLOCK_M - 1), tile.shift, tile.seqlen_k, TILE.block_n)
            turn = seen - 1 - n
            wait_for_turn(counter, turn)
            if turn == 0:
                send(dq_desc, sums, at, True, TILE)
            else:
                send(dq_desc, sums, at, False, TILE)
            results_landed()
            thread_barrier()
            gl.atomic_add(counter, 1, sem="release", scope="gpu")
            mbarrier.arrive(sums.empty.index(0), count=1)
            count += 1
            m += 1
            if m == tile.hi:  # the group's next head
                m = tile.lo
                row += padded_rows
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def send(dq_desc, sums, row, FIRST: gl.constexpr, TILE: gl.constexpr):
    """Both halves of a block: of its columns, or of its rows."""
    for half in gl.static_range(HALVES):
        if TILE.width == COLUMNS:  # noqa: SIM108
            at = (row + half * ROWS, 0)
        else:
            at = (row, half * COLUMNS)
        if FIRST:
            store_box(dq_desc, at, sums.staged.index(half))
        else:
            add_box(dq_desc, at, sums.staged.index(half))


@gluon.jit
def wait_for_turn(counter, turn):
    done = acquired(counter)
    while done < turn:
        done = acquired(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [done], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquired(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
