"""Which block of keys a program of the backward pass computes next.

Blocks are counted through the heads of a section first, those of packed sequences through all heads. A program waits
for no work but such that has been taken before its own (`backward_sums`), so that waiting never goes in a circle.

Upwards, blocks of keys are taken from the last to the first and rows passed from the first to the last: beside a
diagonal, a block begins with rows that the one after it has passed before, and nobody waits, but the longest work comes
last. Downwards, it is the other way round: the longest work comes first, and each block has to come a step after the
one before, which is shorter by a diagonal's blocks of rows; if these are two or more, programs that are a step apart
once stay so.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
    token_range,
)


class KeyTileScheduler(NamedTuple):
    """The blocks of keys of one launch."""

    num_tiles: gl.tensor  # at most, where sequences are packed
    num_blocks: gl.tensor  # dense: of keys, for each head
    total_heads: gl.tensor  # dense: of keys, of all sequences
    l2_swizzle: gl.tensor  # dense: heads that are worked on together
    semaphore: gl.tensor  # pointer to a zero, which a dense launch leaves as it was
    num_heads_k: gl.tensor
    group: gl.tensor  # of query heads that share a key head
    padded_rows: gl.tensor  # for each query head in the buffer of sums
    diagonal: gl.tensor  # what is added to seqlen_k - seqlen_q


class KeyWorkTile(NamedTuple):
    """A block of keys of one head, and the blocks of rows `lo <= m < hi` that see it."""

    b: gl.tensor  # -1: there is none left
    head_k: gl.tensor
    first_key: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    padded_row: gl.tensor  # row 0 of the group's first head, in what has padded rows
    shift: gl.tensor  # aligns rows with keys: the diagonal is `key = row + shift`
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    token_q: gl.tensor  # of row 0; 0 where sequences are not packed
    token_k: gl.tensor


@gluon.jit
def key_scheduler_warp(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The warp that schedules."""
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
        flat_head, block = key_head_and_block(scheduler, tile_index, CONFIG.lpt)
        b, head = flat_head // scheduler.num_heads_k, flat_head % scheduler.num_heads_k
        first_key = block * BLOCK_N
        last_key = gl.minimum(first_key + BLOCK_N, seqlens.seqlen_k) - 1
        m_blocks = m_block_range(bounds, first_key, last_key, shift, seqlens.seqlen_q, BLOCK_M)
        padded_row = flat_head * scheduler.group * scheduler.padded_rows
        tile = KeyWorkTile(
            b, head, first_key, m_blocks.lo, m_blocks.hi, padded_row, shift, seqlens.seqlen_q, seqlens.seqlen_k, 0, 0
        )
        tile_index = publish_tile(queue, count, tile, scheduler, False)
        count += 1
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def schedule_packed_key_tiles(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr):
    """Keys that belong to no sequence are a sequence that no row sees."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    tile_index = gl.program_id(0)
    count = 0
    b = 0
    previous_blocks = 0  # blocks of the sequences before
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
            # As in `rows`: each sequence begins with a block of rows.
            padded_row = head * scheduler.group * scheduler.padded_rows + (token_q // BLOCK_M + b) * BLOCK_M
            tile = KeyWorkTile(
                b, head, first_key, m_blocks.lo, m_blocks.hi, padded_row, shift, seqlen_q, seqlen_k, token_q, token_k
            )  # fmt: skip
            tile_index = publish_tile(queue, count, tile, scheduler, True)
            count += 1
        else:
            tile_index = scheduler.num_tiles
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def key_head_and_block(scheduler, tile_index, LPT: gl.constexpr):
    """Head, counted through all sequences, and block."""
    flat_head, block = head_and_block(scheduler, tile_index)
    if LPT:
        block = scheduler.num_blocks - 1 - block
    return flat_head, block


@gluon.jit
def first_m_block(tile, LPT: gl.constexpr):
    """The block of rows that a block of keys begins with."""
    if LPT:
        return tile.hi - 1
    else:
        return tile.lo


@gluon.jit
def next_m_block(m, group_head, tile, group, LPT: gl.constexpr):
    """The block of rows after m, and of which member of the group of heads. The same rows of all members come first:
    passing a head's rows before the next one's would make short blocks of keys wait for long ones at each head.
    """
    next_head = group_head + 1
    wraps = next_head == group
    if LPT:
        return gl.where(wraps, m - 1, m), gl.where(wraps, 0, next_head)
    else:
        return gl.where(wraps, m + 1, m), gl.where(wraps, 0, next_head)


@gluon.jit
def pop_key_tile(queue, count):
    fields = pop_fields(queue, count)
    tile = KeyWorkTile(
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8], fields[9], fields[10],
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(stage_of(count, QUEUE_STAGES)), count=1)
    return tile
