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
from ..shared.compat import thread_barrier, tma_reduce_add, tma_store
from ..shared.masking import contributing_n_blocks
from ..shared.pipeline import NamedBarriers, barrier_sync, slice_columns, wait_stores_complete
from .tile_scheduler import first_m_block, next_m_block, pop_key_tile

MMA_M = gl.constexpr(tables.MMA_M)
DQ_COLUMNS = gl.constexpr(tables.DQ_COLUMNS)
NUM_WARPGROUPS = gl.constexpr(tables.NUM_WARPGROUPS)


class DqPipeline(NamedTuple):
    """What a computing warpgroup hands over: its share of a block's dq."""

    smem: gl.shared_memory_descriptor  # [HALVES, ROWS, COLUMNS] fp32, of which a share may leave columns free
    full: NamedBarriers  # HALVES
    empty: gl.shared_memory_descriptor  # [HALVES, 1] barriers


@gluon.jit
def dq_writer_warp(
    warpgroup: gl.constexpr, dq_accum_desc, dq_pipeline, queue, dq_semaphore, bounds, group, padded_rows,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = CONFIG.block_m
    tile_count = 0
    tile = pop_key_tile(queue, 0)
    while tile.b >= 0:
        n = tile.first_key // CONFIG.block_n
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(group * (tile.hi - tile.lo)):
            barrier_sync(dq_pipeline.full.first + warpgroup, dq_pipeline.full.threads)
            row = tile.padded_row + group_head * padded_rows + m * BLOCK_M
            semaphore = dq_semaphore + row // BLOCK_M * NUM_WARPGROUPS + warpgroup
            n_blocks = contributing_n_blocks(bounds, m * BLOCK_M, tile.shift, tile.seqlen_k, BLOCK_M, CONFIG.block_n)
            position = n - n_blocks.lo if CONFIG.lpt else n_blocks.hi - 1 - n
            wait_for_dq_semaphore(semaphore, position if CONFIG.in_order else gl.minimum(position, 1))
            fence_async_shared()  # for the warpgroup's stores: they are done when it comes to the barrier
            if position == 0:
                write_share(warpgroup, dq_accum_desc, dq_pipeline, row, True, CONFIG)
            else:
                write_share(warpgroup, dq_accum_desc, dq_pipeline, row, False, CONFIG)
            tma.store_wait(0)  # the copy engine has read them
            mbarrier.arrive(dq_pipeline.empty.index(warpgroup), count=1)
            if CONFIG.in_order | (position == 0):
                wait_stores_complete()
                thread_barrier()
                gl.atomic_add(semaphore, 1, sem="release", scope="gpu")
            m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        tile_count += 1
        tile = pop_key_tile(queue, tile_count)


@gluon.jit
def swizzled(dq):
    """`[ROWS, 64 or 32]` in another order, in which they are added up: `rows.in_order` brings them back.

    A thread has pairs `e` of columns, 8 apart. Here it has four numbers side by side, and eight threads have the 128
    bytes that shared memory takes at once, so that no two write to the same bank. These bytes are a row of 32 columns,
    or half of one of 64, of which the halves `h` lie in two panels.
    """
    w_h_g2_g0_j2_j1_t_e = gl.reshape(dq, [4, 2, 4, 2, dq.shape[1] // 16, 2, 4, 2])
    return gl.reshape(gl.permute(w_h_g2_g0_j2_j1_t_e, [0, 2, 4, 1, 3, 6, 5, 7]), dq.shape)


@gluon.jit
def unswizzled(x, layout: gl.constexpr):
    """The order of before, for a warpgroup that reads what another one has stored."""
    w_g2_j2_h_g0_t_j1_e = gl.reshape(x, [4, 4, x.shape[1] // 16, 2, 2, 4, 2, 2])
    result = gl.reshape(gl.permute(w_g2_j2_h_g0_t_j1_e, [0, 3, 1, 4, 2, 6, 5, 7]), x.shape)
    return gl.convert_layout(result, layout, assert_trivial=True)


@gluon.jit
def write_share(warpgroup: gl.constexpr, dq_accum_desc, dq_pipeline, row, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """A share of a block."""
    BOX: gl.constexpr = dq_accum_desc.block_type.shape[-1]
    for n in gl.static_range(CONFIG.dq_shares[warpgroup].width // BOX):
        coord = (row + CONFIG.dq_shares[warpgroup].row, CONFIG.dq_shares[warpgroup].column + n * BOX)
        box = slice_columns(dq_pipeline.smem.index(warpgroup), n * BOX, BOX)
        if FIRST:
            tma_store(dq_accum_desc, coord, box)
        else:
            tma_reduce_add(dq_accum_desc, coord, box)


@gluon.jit
def wait_for_dq_semaphore(semaphore, position):
    arrived = load_acquire(semaphore)
    while arrived < position:
        arrived = load_acquire(semaphore)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [arrived], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_acquire(semaphore):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [semaphore.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
