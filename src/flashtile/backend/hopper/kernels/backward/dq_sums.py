"""The warps that add what each block of keys gives to dq to its sums in memory, one for each computing warpgroup.

The first block of keys that is taken for a block of rows writes, so that nothing has to be cleared, and the others wait
until it has: a warpgroup's share of a block of rows has a counter. Where the same call has to give the same bits
(`ordered`), it counts all that have added, and each waits for its turn: the order is that in which blocks are taken.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ... import tables
from ..shared.masking import blocks_seen
from ..shared.pipeline import Gates, columns_of, results_landed, wait_at
from ..shared.versions import add_box, store_box, thread_barrier
from .schedule import first_rows, next_rows, take_keys

ROWS = gl.constexpr(tables.ROWS)
COLUMNS = gl.constexpr(tables.COLUMNS)
HALVES = gl.constexpr(tables.HALVES)


class Sums(NamedTuple):
    """What a computing warpgroup hands over: its share of a block's dq."""

    staged: gl.shared_memory_descriptor  # [HALVES, ROWS, COLUMNS] fp32, of which a share may leave columns free
    full: Gates  # HALVES
    empty: gl.shared_memory_descriptor  # [HALVES, 1] barriers


@gluon.jit
def add_sums(half: gl.constexpr, dq_desc, sums, queue, turns, window, group, padded_rows, TILE: gl.constexpr):
    BLOCK_M: gl.constexpr = TILE.block_m
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        n = tile.first_key // TILE.block_n
        m, member = first_rows(tile, TILE.downwards), 0
        for _ in range(group * (tile.hi - tile.lo)):
            wait_at(sums.full.first + half, sums.full.threads)
            at = tile.sums_row + member * padded_rows + m * BLOCK_M
            counter = turns + at // BLOCK_M * HALVES + half
            seen = blocks_seen(window, m * BLOCK_M, tile.shift, tile.seqlen_k, BLOCK_M, TILE.block_n)
            turn = n - seen.lo if TILE.downwards else seen.hi - 1 - n
            wait_for_turn(counter, turn if TILE.ordered else gl.minimum(turn, 1))
            fence_async_shared()  # for the warpgroup's stores: they are done when it comes to the barrier
            if turn == 0:
                send(half, dq_desc, sums, at, True, TILE)
            else:
                send(half, dq_desc, sums, at, False, TILE)
            tma.store_wait(0)  # the copy engine has read them
            mbarrier.arrive(sums.empty.index(half), count=1)
            if TILE.ordered | (turn == 0):
                results_landed()
                thread_barrier()
                gl.atomic_add(counter, 1, sem="release", scope="gpu")
            m, member = next_rows(m, member, tile, group, TILE.downwards)
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def scrambled(dq):
    """`[ROWS, 64 or 32]` in another order, in which they are added up: `rows.in_order` brings them back.

    A thread has pairs `e` of columns, 8 apart. Here it has four numbers side by side, and eight threads have the 128
    bytes that shared memory takes at once, so that no two write to the same bank. These bytes are a row of 32 columns,
    or half of one of 64, of which the halves `h` lie in two panels.
    """
    w_h_g2_g0_j2_j1_t_e = gl.reshape(dq, [4, 2, 4, 2, dq.shape[1] // 16, 2, 4, 2])
    return gl.reshape(gl.permute(w_h_g2_g0_j2_j1_t_e, [0, 2, 4, 1, 3, 6, 5, 7]), dq.shape)


@gluon.jit
def unscrambled(x, layout: gl.constexpr):
    """The order of before, for a warpgroup that reads what another one has stored."""
    w_g2_j2_h_g0_t_j1_e = gl.reshape(x, [4, 4, x.shape[1] // 16, 2, 2, 4, 2, 2])
    found = gl.reshape(gl.permute(w_g2_j2_h_g0_t_j1_e, [0, 3, 1, 4, 2, 6, 5, 7]), x.shape)
    return gl.convert_layout(found, layout, assert_trivial=True)


@gluon.jit
def send(half: gl.constexpr, dq_desc, sums, row, FIRST: gl.constexpr, TILE: gl.constexpr):
    """A share of a block."""
    BOX: gl.constexpr = dq_desc.block_type.shape[-1]
    for n in gl.static_range(TILE.shares[half].width // BOX):
        at = (row + TILE.shares[half].row, TILE.shares[half].column + n * BOX)
        box = columns_of(sums.staged.index(half), n * BOX, BOX)
        if FIRST:
            store_box(dq_desc, at, box)
        else:
            add_box(dq_desc, at, box)


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
