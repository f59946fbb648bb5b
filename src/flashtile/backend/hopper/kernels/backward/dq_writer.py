"""The warps that accumulate dq in global memory, one for each consumer warpgroup.

The first block of keys for a block of rows stores, so that dq_accum need not be cleared; later blocks add, after
waiting for the first one on a dq semaphore. There is one semaphore for each warpgroup's share of a block of rows. With
`in_order`, for bitwise repeatable gradients, it counts all additions, and each block waits for its position in the
scheduler's order. With few rows and many keys, blocks of keys share `dq_parts` accumulators, each with semaphores of
its own, so that programs do not wait for each other.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ... import tile_config
from ..shared.block_lists import BlockLists, block_at, load_entry, load_rank
from ..shared.compat import thread_barrier, tma_reduce_add, tma_store
from ..shared.masking import MaskBounds, contributing_n_blocks
from ..shared.pipeline import NamedBarriers, slice_columns
from ..shared.ptx import barrier_sync, load_acquire, wait_stores_complete
from ..shared.tile_scheduler import TileQueue
from .tile_scheduler import first_m_block, next_m_block, pop_key_tile

DQ_COLUMNS = gl.constexpr(tile_config.DQ_COLUMNS)
NUM_WARPGROUPS = gl.constexpr(tile_config.NUM_WARPGROUPS)


class DqPipeline(NamedTuple):
    """Staging buffers for each warpgroup's share of dq."""

    smem: gl.shared_memory_descriptor  # [NUM_WARPGROUPS, MMA_M, DQ_COLUMNS] fp32; a share may use fewer columns
    full: NamedBarriers  # NUM_WARPGROUPS
    empty: gl.shared_memory_descriptor  # [NUM_WARPGROUPS, 1] mbarriers


class DqWriter(NamedTuple):
    """Arguments of the warps that write dq."""

    dq: gl.tensor | None  # descriptor of dq, if a single block of keys contributes to it
    accum: gl.tensor | None  # descriptor of dq_accum, else
    pipeline: DqPipeline
    queue: TileQueue
    semaphore: gl.tensor  # pointer, [blocks of rows, NUM_WARPGROUPS]
    bounds: MaskBounds
    group: gl.tensor
    padded_rows: gl.tensor
    parts: gl.tensor | None  # accumulators, if several
    part_rows: gl.tensor | None  # rows of one of them
    lists: BlockLists


@gluon.jit
def dq_writer_warp(warpgroup: gl.constexpr, writer, CONFIG: gl.constexpr):
    """The partition that stores or adds one warpgroup's shares of dq."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    dq_pipeline, queue, group, lists = writer.pipeline, writer.queue, writer.group, writer.lists
    tile_count = 0
    tile = pop_key_tile(queue, 0)
    while tile.b >= 0:
        n = tile.first_key // CONFIG.block_n
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(group * (tile.hi - tile.lo)):
            block = block_at(lists, m, load_entry(lists, tile.token_q, m))
            listed_rank = 0
            if lists.data is not None:
                listed_rank = load_rank(lists, tile.token_q, m)
            barrier_sync(dq_pipeline.full.first + warpgroup, dq_pipeline.full.threads)
            if writer.accum is None:
                coord = (tile.b, tile.head_k * group + group_head, block * BLOCK_M)
                write_share(warpgroup, writer, writer.dq, coord, True, CONFIG)
                release_staging(dq_pipeline, warpgroup)
            else:
                row = tile.padded_row + group_head * writer.padded_rows + block * BLOCK_M
                n_blocks = contributing_n_blocks(
                    writer.bounds, block * BLOCK_M, tile.shift, tile.seqlen_k, BLOCK_M, CONFIG.block_n
                )
                position = n - n_blocks.lo if CONFIG.lpt else n_blocks.hi - 1 - n
                if lists.data is not None:
                    position = listed_rank
                if writer.parts is not None:
                    row += position % writer.parts * writer.part_rows
                    position = position // writer.parts
                semaphore = writer.semaphore + row // BLOCK_M * NUM_WARPGROUPS + warpgroup
                wait_for_dq_semaphore(semaphore, position if CONFIG.in_order else gl.minimum(position, 1))
                if position == 0:
                    write_share(warpgroup, writer, writer.accum, (row,), True, CONFIG)
                else:
                    write_share(warpgroup, writer, writer.accum, (row,), False, CONFIG)
                release_staging(dq_pipeline, warpgroup)
                if CONFIG.in_order | (position == 0):
                    wait_stores_complete()
                    thread_barrier()
                    gl.atomic_add(semaphore, 1, sem="release", scope="gpu")
            m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        tile_count += 1
        tile = pop_key_tile(queue, tile_count)


@gluon.jit
def write_share(warpgroup: gl.constexpr, writer, desc, coord, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Store (FIRST) or add a share of dq; `coord` is that of the block's first row."""
    SHARE: gl.constexpr = CONFIG.dq_shares[warpgroup]
    BOX: gl.constexpr = desc.block_type.shape[-1]
    fence_async_shared()  # for the warpgroup's stores, complete since the barrier
    for n in gl.static_range(SHARE.width // BOX):
        box_coord = coord[:-1] + (coord[-1] + SHARE.row, SHARE.column + n * BOX)
        box = slice_columns(writer.pipeline.smem.index(warpgroup), n * BOX, BOX)
        if FIRST:
            tma_store(desc, box_coord, box)
        else:
            tma_reduce_add(desc, box_coord, box)


@gluon.jit
def release_staging(dq_pipeline, warpgroup: gl.constexpr):
    """Let go a staging buffer that TMA has read."""
    tma.store_wait(0)
    mbarrier.arrive(dq_pipeline.empty.index(warpgroup), count=1)


@gluon.jit
def wait_for_dq_semaphore(semaphore, position):
    """Wait until `position` blocks of keys have contributed; orders later TMA operations behind them."""
    arrived = load_acquire(semaphore)
    while arrived < position:
        arrived = load_acquire(semaphore)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [arrived], dtype=gl.int32, is_pure=False, pack=1
    )
