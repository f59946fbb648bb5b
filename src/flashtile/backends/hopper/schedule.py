"""Which tile of rows a program computes next: persistent programs take numbers from a counter, longest work first.

Tiles are counted in sections of heads whose keys and values fit the L2 cache together. Within a section, the tiles with
the most keys to see come first, so that short ones fill the end. One warp does all of this while the others work, and
puts what it finds into shared memory. It asks late: a program that took its next tile early would keep it from one that
is done earlier.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .masking import key_blocks
from .pipeline import barriers

SLOTS = gl.constexpr(2)  # of the queue
FIELDS = gl.constexpr(7)


class Work(NamedTuple):
    """The tiles of one launch."""

    count: gl.tensor
    blocks: gl.tensor  # of rows, for each head
    heads: gl.tensor  # of all sequences
    section: gl.tensor  # heads that are worked on together
    counter: gl.tensor  # pointer to a zero, which the launch leaves as it was


class Lengths(NamedTuple):
    num_heads: gl.tensor  # query heads
    group: gl.tensor  # of them that share a key head
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    shift: gl.tensor  # seqlen_k - seqlen_q, in an unsharded call


class Tile(NamedTuple):
    """A block of rows of one head, and its blocks of keys `lo <= n < hi`."""

    b: gl.tensor  # -1: there is none left
    head: gl.tensor
    head_k: gl.tensor
    any_head: gl.tensor  # the head, counted through all sequences
    first_row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor


class Queue(NamedTuple):
    """The tiles of one program, on their way from the scheduling warp to the others."""

    data: gl.shared_memory_descriptor  # [SLOTS * FIELDS, 1] int32
    full: gl.shared_memory_descriptor  # [SLOTS, 1] barriers
    empty: gl.shared_memory_descriptor
    wanted: gl.shared_memory_descriptor  # [1, 1] barrier: the last tile is nearly done


@gluon.jit
def new_queue(READERS: gl.constexpr):
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    data = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], shared)
    return Queue(data, barriers(SLOTS, 1), barriers(SLOTS, READERS), barriers(1, 1))


@gluon.jit
def schedule(queue, work, lengths, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The warp that schedules."""
    n = gl.program_id(0)
    put = 0
    while n < work.count:
        any_head, block = position_of(work, n)
        b, head = any_head // lengths.num_heads, any_head % lengths.num_heads
        first_row = block * BLOCK_M
        last_row = gl.minimum(first_row + BLOCK_M, lengths.seqlen_q) - 1
        blocks = key_blocks(window, first_row, last_row, lengths.shift, lengths.seqlen_k, BLOCK_N)
        put_tile(queue, put, Tile(b, head, head // lengths.group, any_head, first_row, blocks.lo, blocks.hi))
        mbarrier.wait(queue.wanted.index(0), put & 1)
        put += 1
        n = next_number(work)
    put_tile(queue, put, Tile(-1, 0, 0, 0, 0, 0, 1))


@gluon.jit
def position_of(work, n):
    """Head, counted through all sequences, and block of rows."""
    size = work.section * work.blocks
    first = n // size * work.section
    heads = gl.minimum(work.section, work.heads - first)
    rest = n % size
    return first + rest % heads, work.blocks - 1 - rest // heads


@gluon.jit
def next_number(work):
    """The next tile that no other program has. Each tile asks once, so that the last one to ask knows it."""
    asked = gl.atomic_add(work.counter, 1, sem="relaxed")
    if asked == work.count - 1:
        gl.store(work.counter, 0)
    return gl.num_programs(0) + asked


@gluon.jit
def put_tile(queue, n, tile):
    """The n-th tile of the program."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = n % SLOTS
    mbarrier.wait(queue.empty.index(slot), (n // SLOTS & 1) ^ 1)
    for field in gl.static_range(FIELDS):
        queue.data.index(slot * FIELDS + field).store(gl.full([1], tile[field], gl.int32, one))
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def want_tile(queue, pred):
    """Say that the next tile will soon be needed, once for each tile that was taken."""
    mbarrier.arrive(queue.wanted.index(0), count=1, pred=pred)


@gluon.jit
def take_tile(queue, n):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = n % SLOTS
    mbarrier.wait(queue.full.index(slot), n // SLOTS & 1)
    first = slot * FIELDS
    tile = Tile(
        gl.max(queue.data.index(first).load(one), 0),
        gl.max(queue.data.index(first + 1).load(one), 0),
        gl.max(queue.data.index(first + 2).load(one), 0),
        gl.max(queue.data.index(first + 3).load(one), 0),
        gl.max(queue.data.index(first + 4).load(one), 0),
        gl.max(queue.data.index(first + 5).load(one), 0),
        gl.max(queue.data.index(first + 6).load(one), 0),
    )
    mbarrier.arrive(queue.empty.index(slot), count=1)
    return tile
