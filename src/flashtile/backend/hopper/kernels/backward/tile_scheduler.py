"""Tile scheduler of the backward pass, for blocks of keys.

Dense blocks are ordered by groups of `l2_swizzle` heads, packed ones by head. A program only waits for the dq of blocks
that were taken before its own (`dq_writer`), so waiting never deadlocks.

There are two orders. Without LPT, blocks of keys are taken from last to first and rows visited from first to last: next
to a diagonal, a block starts with rows that the following block has already passed, so no program waits, but the
longest block comes last. With LPT (longest processing time first) both orders are reversed: the longest block comes
first, and each block has to run one step behind the previous one, which is shorter by the diagonal's blocks of rows. If
these are two or more, programs that are one step apart stay so.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.block_lists import BlockLists, list_of, load_entry
from ..shared.compat import Pointer, Scalar
from ..shared.masking import m_block_range
from ..shared.pipeline import stage_of
from ..shared.tile_scheduler import (
    QUEUE_STAGES,
    empty_tile,
    head_and_block,
    key_range,
    pop_fields,
    publish_tile,
    push_tile,
    split_and_tile,
    split_range,
    token_range,
)


class RowChunk(NamedTuple):
    """Dense: blocks of rows `lo <= m < hi` that a launch visits; `None` for all."""

    chunk_lo: Scalar
    chunk_hi: Scalar


class LastWave(NamedTuple):
    """Dense: the first tile of a launch, and the first head of dk and dv, to which the parts of the rows add; `None` if
    a launch begins with tile 0.
    """

    first_tile: Scalar
    first_head: Scalar


class TileSplits(NamedTuple):
    """Dense: programs that share a block of keys. With parts of the rows, each has dk and dv of its own; with parts of
    the heads alone, all add to the same.
    """

    head_splits: Scalar  # parts of the group of query heads; `None` if no programs share a block
    row_splits: Scalar  # parts of the rows, for each of them
    wave: LastWave


class KeyTileScheduler(NamedTuple):
    """Parameters of the tile scheduler of one launch."""

    num_tiles: Scalar  # upper bound if packed
    num_blocks: Scalar  # dense: blocks of keys of a head
    total_heads: Scalar  # dense: key heads of all sequences, or the parts of their groups
    l2_swizzle: Scalar  # dense: those that share the L2 cache
    tile_count_semaphore: Pointer  # to a zero; a dense launch resets it
    num_heads_k: Scalar
    group: Scalar  # query heads for each key head, or of a part of them
    padded_rows: Scalar  # of a query head, in dq_accum and the row statistics
    diagonal: Scalar  # added to seqlen_k - seqlen_q
    splits: TileSplits
    chunk: RowChunk
    lists: BlockLists  # dense: blocks of rows of each tile


class KeyWorkTile(NamedTuple):
    """A block of keys of one head, and the blocks of rows `lo <= m < hi` that see it; with lists, their positions."""

    b: gl.tensor  # -1: end of the queue
    head_k: gl.tensor  # with splits, the part of its group (`key_head`)
    first_key: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    padded_row: gl.tensor  # padded row of row 0 of the first query head
    shift: gl.tensor  # the diagonal is `key = row + shift`
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    token_q: gl.tensor  # token of row 0; 0 if dense; with lists, the list's offset
    token_k: gl.tensor  # dense: the split, or in a last wave the head of dk and dv
    entry: gl.tensor  # with lists, that of the first step


@gluon.jit
def key_scheduler_warp(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that schedules blocks of keys."""
    if PACKED:
        schedule_packed_key_tiles(queue, scheduler, seqlens, bounds, CONFIG)
    else:
        schedule_dense_key_tiles(queue, scheduler, seqlens, bounds, CONFIG)


@gluon.jit
def schedule_dense_key_tiles(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr):
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    tile_index = gl.program_id(0)
    count = 0
    shift = seqlens.seqlen_k - seqlens.seqlen_q + scheduler.diagonal
    while tile_index < scheduler.num_tiles:
        row_split, whole_tile = split_and_tile(tile_index, scheduler.splits.row_splits)
        if scheduler.splits.wave.first_tile is not None:
            whole_tile += scheduler.splits.wave.first_tile
        flat_head, block = key_head_and_block(scheduler, whole_tile, CONFIG.lpt)
        head_splits = 1
        if scheduler.splits.head_splits is not None:
            head_splits = scheduler.splits.head_splits
        heads = scheduler.num_heads_k * head_splits
        b, head = flat_head // heads, flat_head % heads
        first_key = block * BLOCK_N
        last_key = gl.minimum(first_key + BLOCK_N, seqlens.seqlen_k) - 1
        m_blocks = m_block_range(bounds, first_key, last_key, shift, seqlens.seqlen_q, BLOCK_M)
        lo, hi, list_offset = m_blocks.lo, m_blocks.hi, 0
        if scheduler.lists.data is not None:
            lo = 0
            list_offset, hi = list_of(scheduler.lists, b, head // head_splits, block)
        if scheduler.chunk.chunk_lo is not None:
            lo = gl.maximum(lo, scheduler.chunk.chunk_lo)
            hi = gl.maximum(lo, gl.minimum(hi, scheduler.chunk.chunk_hi))
        split = head % head_splits
        if scheduler.splits.row_splits is not None:
            lo, hi = split_range(lo, hi, row_split, scheduler.splits.row_splits)
            split = split * scheduler.splits.row_splits + row_split
        if scheduler.splits.wave.first_head is not None:
            split = flat_head - scheduler.splits.wave.first_head
        padded_row = flat_head * scheduler.group * scheduler.padded_rows
        entry = load_entry(scheduler.lists, list_offset, hi - 1 if CONFIG.lpt else lo)
        tile = KeyWorkTile(
            b, head, first_key, lo, hi, padded_row, shift, seqlens.seqlen_q, seqlens.seqlen_k, list_offset, split, entry
        )  # fmt: skip
        tile_index = publish_tile(queue, count, tile, scheduler, False)
        count += 1
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def schedule_packed_key_tiles(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr):
    """Keys outside all sequences count as one more sequence, which no row sees."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STATS_ROWS: gl.constexpr = CONFIG.stats_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    tile_index = gl.program_id(0)
    count = 0
    b = 0
    previous_blocks = 0  # of the sequences before b
    token_k, seqlen_k = key_range(seqlens, 0)
    while tile_index < scheduler.num_tiles:
        block = tile_index // scheduler.num_heads_k
        while (block >= previous_blocks + gl.cdiv(seqlen_k, BLOCK_N)) & (b <= seqlens.batch):
            previous_blocks += gl.cdiv(seqlen_k, BLOCK_N)
            b += 1
            token_k, seqlen_k = key_range(seqlens, b)
        if b <= seqlens.batch:
            head = tile_index % scheduler.num_heads_k
            token_q, seqlen_q = token_range(seqlens.cu_seqlens_q, b, seqlens.batch, seqlens.seqlen_q)
            if b == seqlens.batch:
                seqlen_q = 0
            block -= previous_blocks
            if not CONFIG.lpt:
                block = gl.cdiv(seqlen_k, BLOCK_N) - 1 - block
            first_key = block * BLOCK_N
            last_key = gl.minimum(first_key + BLOCK_N, seqlen_k) - 1
            shift = seqlen_k - seqlen_q + scheduler.diagonal
            m_blocks = m_block_range(bounds, first_key, last_key, shift, seqlen_q, BLOCK_M)
            # Each sequence begins with a block of its own (`padded_rows`).
            padded_row = head * scheduler.group * scheduler.padded_rows + (token_q // STATS_ROWS + b) * STATS_ROWS
            tile = KeyWorkTile(
                b, head, first_key, m_blocks.lo, m_blocks.hi, padded_row, shift, seqlen_q, seqlen_k, token_q, token_k,
                0,
            )  # fmt: skip
            tile_index = publish_tile(queue, count, tile, scheduler, True)
            count += 1
        else:
            tile_index = scheduler.num_tiles
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def key_head(tile, splits):
    """The key head of a tile."""
    if splits.head_splits is None:
        return tile.head_k
    else:
        return tile.head_k // splits.head_splits


@gluon.jit
def key_head_and_block(scheduler, tile_index, LPT: gl.constexpr):
    """Head, counted through all sequences, and block of keys."""
    flat_head, block = head_and_block(scheduler, tile_index)
    if LPT:
        block = scheduler.num_blocks - 1 - block
    return flat_head, block


@gluon.jit
def first_m_block(tile, LPT: gl.constexpr):
    """The first block of rows that a block of keys visits."""
    if LPT:
        return tile.hi - 1
    else:
        return tile.lo


@gluon.jit
def next_m_block(m, group_head, tile, group, LPT: gl.constexpr):
    """The block of rows after m, and the query head of the group.

    Heads of the group are the inner loop. As the outer loop, they would make short blocks of keys wait for long ones at
    each head.
    """
    next_head = group_head + 1
    wraps = next_head == group
    if LPT:
        return gl.where(wraps, m - 1, m), gl.where(wraps, 0, next_head)
    else:
        return gl.where(wraps, m + 1, m), gl.where(wraps, 0, next_head)


@gluon.jit
def pop_key_tile(queue, count):
    """Wait for tile number `count` of the program."""
    fields = pop_fields(queue, count)
    tile = KeyWorkTile(
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8], fields[9], fields[10], fields[11],
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(stage_of(count, QUEUE_STAGES)), count=1)
    return tile
