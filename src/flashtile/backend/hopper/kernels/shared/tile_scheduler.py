"""Dynamic persistent tile scheduler for tiles of rows: programs take tile indices from a semaphore, longest tiles
first.

Dense tiles are ordered by groups of `l2_swizzle` heads whose keys and values fit the L2 cache together. In a group, the
tiles with the most visible keys come first, so that short ones fill the tail. Packed tiles are counted by head, then by
block, then by sequence; a program's indices only grow, so it walks along the sequences once.

One warp runs the scheduler and passes tiles to the other warps through shared memory. It fetches an index only when the
current tile is nearly done: a program that took its next tile early would keep it from one that is idle sooner.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....gpu.grouped import without
from .block_lists import BlockLists, list_of, load_entry
from .compat import Pointer, Scalar
from .masking import n_block_range
from .pages import PageTable, lacks_pages
from .pipeline import make_mbarriers, stage_of, wraps_of

QUEUE_STAGES = gl.constexpr(2)
TILE_FIELDS = gl.constexpr(12)  # of WorkTile and of backward's KeyWorkTile
REQUEST_DISTANCE = gl.constexpr(2)  # blocks before the end of a tile at which the next one is requested


class TileScheduler(NamedTuple):
    """Parameters of the tile scheduler of one launch."""

    num_tiles: Scalar  # upper bound if packed
    num_blocks: Scalar  # dense: blocks of rows of a head
    total_heads: Scalar  # dense: heads of all sequences
    l2_swizzle: Scalar  # dense: heads that share the L2 cache
    tile_count_semaphore: Pointer  # to a zero; a dense launch resets it
    num_heads: Scalar  # query heads
    group: Scalar  # query heads for each key head
    diagonal: Scalar  # added to seqlen_k - seqlen_q
    num_splits: Scalar  # dense: programs that share the keys of a tile
    lists: BlockLists  # dense, without splits: blocks of keys of each tile


class SeqlenInfo(NamedTuple):
    """Sequence lengths. If packed, seqlen_q and seqlen_k are numbers of tokens and the lengths are in memory."""

    seqlen_q: Scalar
    seqlen_k: Scalar
    cu_seqlens_q: Pointer  # [batch + 1]
    cu_seqlens_k: Pointer
    seqused_k: Pointer  # [batch]
    batch: Scalar
    page_table: PageTable  # in pages, seqlen_k is the room for a sequence's keys


PlainScheduler = without(TileScheduler, "num_splits", "lists")
UnpagedSeqlens = without(SeqlenInfo, "page_table")


class WorkTile(NamedTuple):
    """A block of rows of one head, and its blocks of keys `lo <= n < hi`; with lists, their positions."""

    b: gl.tensor  # -1: end of the queue; batch: rows outside all sequences
    head: gl.tensor
    head_k: gl.tensor
    lse_head: gl.tensor  # row of lse, [B * H, Sq] or [H, T]; with split keys [num_splits * B * H, Sq]
    first_row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    token_q: gl.tensor  # token of row 0; 0 if dense
    token_k: gl.tensor  # with lists, the list's offset; with pages, whether some do not exist
    entry: gl.tensor  # with lists, that of the first step: loaded by the consumers, it would delay each tile


class TileQueue(NamedTuple):
    """Tiles of one program in shared memory, on their way from the scheduler warp to the others."""

    data: gl.shared_memory_descriptor  # [QUEUE_STAGES * TILE_FIELDS, 1] int32
    full: gl.shared_memory_descriptor  # [QUEUE_STAGES, 1] mbarriers
    empty: gl.shared_memory_descriptor
    requested: gl.shared_memory_descriptor  # [1, 1] mbarrier: the last tile is nearly done


@gluon.jit
def make_tile_queue(READERS: gl.constexpr):
    """An empty queue; READERS partitions pop every tile."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    data = gl.allocate_shared_memory(gl.int32, [QUEUE_STAGES * TILE_FIELDS, 1], layout)
    return TileQueue(data, make_mbarriers(QUEUE_STAGES, 1), make_mbarriers(QUEUE_STAGES, READERS), make_mbarriers(1, 1))


@gluon.jit
def scheduler_warp(queue, scheduler, seqlens, bounds, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that schedules tiles of rows."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    if PACKED:
        schedule_packed_tiles(queue, scheduler, seqlens, bounds, BLOCK_M, BLOCK_N)
    else:
        schedule_dense_tiles(queue, scheduler, seqlens, bounds, BLOCK_M, BLOCK_N)


@gluon.jit
def schedule_dense_tiles(queue, scheduler, seqlens, bounds, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    tile_index = gl.program_id(0)
    count = 0
    while tile_index < scheduler.num_tiles:
        split, whole_tile = split_and_tile(tile_index, scheduler.num_splits)
        flat_head, block = head_and_block(scheduler, whole_tile)
        b, head = flat_head // scheduler.num_heads, flat_head % scheduler.num_heads
        first_row = block * BLOCK_M
        token_k, seqlen_k = key_range(seqlens, b)
        blocks = tile_n_blocks(first_row, seqlens.seqlen_q, seqlen_k, scheduler, bounds, BLOCK_M, BLOCK_N)
        lse_head, lo, hi, entry = flat_head, blocks.lo, blocks.hi, 0
        if scheduler.lists.data is not None:
            lo = 0
            token_k, hi = list_of(scheduler.lists, b, head, block)
            entry = load_entry(scheduler.lists, token_k, hi - 1)
        elif scheduler.num_splits is not None:
            lse_head += split * scheduler.total_heads
            end = gl.cdiv(seqlen_k, BLOCK_N)
            lo, hi = split_of(blocks.lo, blocks.hi, split, end, scheduler.num_splits)
        if seqlens.page_table.data is not None:
            token_k = lacks_pages(seqlens.page_table, b, lo * BLOCK_N, gl.minimum(hi * BLOCK_N, seqlen_k))
        tile = WorkTile(
            b, head, head // scheduler.group, lse_head, first_row, lo, hi,
            seqlens.seqlen_q, seqlen_k, 0, token_k, entry,
        )  # fmt: skip
        tile_index = publish_tile(queue, count, tile, scheduler, False)
        count += 1
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def schedule_packed_tiles(queue, scheduler, seqlens, bounds, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    tile_index = gl.program_id(0)
    count = 0
    b = 0
    previous_blocks = 0  # of the sequences before b
    token_q, seqlen_q = token_range(seqlens.cu_seqlens_q, 0, seqlens.batch, seqlens.seqlen_q)
    while tile_index < scheduler.num_tiles:
        block = tile_index // scheduler.num_heads
        while (block >= previous_blocks + gl.cdiv(seqlen_q, BLOCK_M)) & (b <= seqlens.batch):
            previous_blocks += gl.cdiv(seqlen_q, BLOCK_M)
            b += 1
            token_q, seqlen_q = token_range(seqlens.cu_seqlens_q, b, seqlens.batch, seqlens.seqlen_q)
        if b <= seqlens.batch:
            head = tile_index % scheduler.num_heads
            token_k, seqlen_k = key_range(seqlens, b)
            if b == seqlens.batch:
                seqlen_k = 0
            first_row = (previous_blocks + gl.cdiv(seqlen_q, BLOCK_M) - 1 - block) * BLOCK_M
            blocks = tile_n_blocks(first_row, seqlen_q, seqlen_k, scheduler, bounds, BLOCK_M, BLOCK_N)
            if seqlens.page_table.data is not None:
                stop_key = gl.minimum(blocks.hi * BLOCK_N, seqlen_k)
                token_k = lacks_pages(seqlens.page_table, b, blocks.lo * BLOCK_N, stop_key)
            tile = WorkTile(
                b, head, head // scheduler.group, head, first_row, blocks.lo, blocks.hi,
                seqlen_q, seqlen_k, token_q, token_k, 0,
            )  # fmt: skip
            tile_index = publish_tile(queue, count, tile, scheduler, True)
            count += 1
        else:
            tile_index = scheduler.num_tiles
    if count == 0:  # the other warps expect at least one tile
        push_tile(queue, count, empty_tile(seqlens.batch))
        mbarrier.wait(queue.requested.index(0), 0)
        count += 1
    push_tile(queue, count, empty_tile(-1))


@gluon.jit
def split_and_tile(tile_index, num_splits):
    """The split and the tile that an index stands for; without splits, 0 and the index itself."""
    if num_splits is None:
        return 0, tile_index
    else:
        return tile_index % num_splits, tile_index // num_splits


@gluon.jit
def split_range(lo, hi, split, num_splits):
    """One of `num_splits` nearly equal parts of `lo..hi`; may be empty."""
    return lo + (hi - lo) * split // num_splits, lo + (hi - lo) * (split + 1) // num_splits


@gluon.jit
def split_of(lo, hi, split, end, num_splits):
    """Blocks of keys of one split; without any, the block after the last key, which is fully masked."""
    first, stop = split_range(lo, hi, split, num_splits)
    empty = first == stop
    return gl.where(empty, end, first), gl.where(empty, end + 1, stop)


@gluon.jit
def empty_tile(b):
    """A tile without rows and with one block of keys. With b = -1 it ends the queue, in backward too."""
    return WorkTile(b, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0)


@gluon.jit
def token_range(cu_seqlens, b, batch, num_tokens):
    """First token and length of a packed sequence. Sequence `batch` holds the tokens outside all sequences."""
    start = gl.load(cu_seqlens + gl.minimum(b, batch))
    stop = gl.load(cu_seqlens + gl.minimum(b + 1, batch))
    start = gl.minimum(gl.maximum(start, 0), num_tokens).to(gl.int32)  # offsets may have 64 bits
    stop = gl.minimum(gl.maximum(stop, 0), num_tokens).to(gl.int32)
    if b >= batch:
        stop = num_tokens
    return start, gl.maximum(stop - start, 0)


@gluon.jit
def key_range(seqlens, b):
    """First token and number of used keys of a sequence; the token is 0 if keys are not packed."""
    token, seqlen = 0, seqlens.seqlen_k
    if seqlens.cu_seqlens_k is not None:
        token, seqlen = token_range(seqlens.cu_seqlens_k, b, seqlens.batch, seqlens.seqlen_k)
    if seqlens.seqused_k is not None:
        used = gl.load(seqlens.seqused_k + gl.minimum(b, seqlens.batch - 1))
        seqlen = gl.where(b < seqlens.batch, gl.minimum(seqlen, gl.maximum(used, 0)), seqlen).to(gl.int32)
    return token, seqlen


@gluon.jit
def tile_n_blocks(first_row, seqlen_q, seqlen_k, scheduler, bounds, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of keys of a tile of rows."""
    last_row = gl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    return n_block_range(bounds, first_row, last_row, seqlen_k - seqlen_q + scheduler.diagonal, seqlen_k, BLOCK_N)


@gluon.jit
def head_and_block(scheduler, tile_index):
    """Head, counted through all dense sequences, and block of rows, the last one first."""
    size = scheduler.l2_swizzle * scheduler.num_blocks
    first = tile_index // size * scheduler.l2_swizzle
    heads = gl.minimum(scheduler.l2_swizzle, scheduler.total_heads - first)
    rest = tile_index % size
    return first + rest % heads, scheduler.num_blocks - 1 - rest // heads


@gluon.jit
def publish_tile(queue, count, tile, scheduler, PACKED: gl.constexpr):
    """Push the program's next tile; once the tile after it is requested, fetch that one's index."""
    push_tile(queue, count, tile)
    mbarrier.wait(queue.requested.index(0), count & 1)
    tile_index = next_tile_index(scheduler)
    if not PACKED:  # noqa: SIM102 - a compile-time branch
        if tile_index == gl.num_programs(0) + scheduler.num_tiles - 1:  # the last fetch of the launch
            gl.store(scheduler.tile_count_semaphore, 0)
    return tile_index


@gluon.jit
def next_tile_index(scheduler):
    """The next index that no program has taken. Each tile fetches once."""
    return gl.num_programs(0) + gl.atomic_add(scheduler.tile_count_semaphore, 1, sem="relaxed")


@gluon.jit
def push_tile(queue, count, tile):
    """Push tile number `count` of the program: any NamedTuple of TILE_FIELDS integers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage = stage_of(count, QUEUE_STAGES)
    mbarrier.wait(queue.empty.index(stage), (wraps_of(count, QUEUE_STAGES) & 1) ^ 1)
    for field in gl.static_range(TILE_FIELDS):
        queue.data.index(stage * TILE_FIELDS + field).store(gl.full([1], tile[field], gl.int32, layout))
    mbarrier.arrive(queue.full.index(stage), count=1)


@gluon.jit
def request_tile(queue, pred):
    """Tell the scheduler warp that the next tile is needed soon; once for each tile popped."""
    mbarrier.arrive(queue.requested.index(0), count=1, pred=pred)


@gluon.jit
def pop_tile(queue, count):
    """Wait for tile number `count` of the program."""
    fields = pop_fields(queue, count)
    tile = WorkTile(
        fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8], fields[9], fields[10], fields[11],
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(stage_of(count, QUEUE_STAGES)), count=1)
    return tile


@gluon.jit
def pop_fields(queue, count):
    """Wait for the fields of tile number `count`; the caller releases the stage."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    stage = stage_of(count, QUEUE_STAGES)
    mbarrier.wait(queue.full.index(stage), wraps_of(count, QUEUE_STAGES) & 1)
    first = stage * TILE_FIELDS
    return (
        gl.max(queue.data.index(first).load(layout), 0),
        gl.max(queue.data.index(first + 1).load(layout), 0),
        gl.max(queue.data.index(first + 2).load(layout), 0),
        gl.max(queue.data.index(first + 3).load(layout), 0),
        gl.max(queue.data.index(first + 4).load(layout), 0),
        gl.max(queue.data.index(first + 5).load(layout), 0),
        gl.max(queue.data.index(first + 6).load(layout), 0),
        gl.max(queue.data.index(first + 7).load(layout), 0),
        gl.max(queue.data.index(first + 8).load(layout), 0),
        gl.max(queue.data.index(first + 9).load(layout), 0),
        gl.max(queue.data.index(first + 10).load(layout), 0),
        gl.max(queue.data.index(first + 11).load(layout), 0),
    )
