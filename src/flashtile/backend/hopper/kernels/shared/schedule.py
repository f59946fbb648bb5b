"""Which tile of rows a program computes next: persistent programs take numbers from a counter, longest work first.

Tiles are counted in sections of heads whose keys and values fit the L2 cache together. Within a section, the tiles with
the most keys to see come first, so that short ones fill the end. One warp does all of this while the others work, and
puts what it finds into shared memory. It asks late: a program that took its next tile early would keep it from one that
is done earlier.

Packed sequences have as many tiles as their lengths ask for. Numbers count through heads, then through the blocks of a
sequence, then through sequences; the numbers of a program only grow, so that it walks along the sequences once.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .masking import key_blocks
from .pipeline import barriers, round_of, slot_of

SLOTS = gl.constexpr(2)  # of the queue
FIELDS = gl.constexpr(11)


class Work(NamedTuple):
    """The tiles of one launch."""

    count: gl.tensor  # at most, where sequences are packed
    blocks: gl.tensor  # dense: of rows, for each head
    all_heads: gl.tensor  # dense: of all sequences
    section: gl.tensor  # dense: heads that are worked on together
    counter: gl.tensor  # pointer to a zero, which a dense launch leaves as it was
    num_heads: gl.tensor  # query heads
    group: gl.tensor  # of them that share a key head
    diagonal: gl.tensor  # what is added to seqlen_k - seqlen_q


class Sequences(NamedTuple):
    """Lengths of dense sequences; or pointers to those of packed ones, and how many tokens there are in all."""

    q: gl.tensor
    k: gl.tensor
    cu_q: gl.tensor | None  # [batch + 1]
    cu_k: gl.tensor | None
    used_k: gl.tensor | None  # [batch]
    batch: gl.tensor


class Tile(NamedTuple):
    """A block of rows of one head, and its blocks of keys `lo <= n < hi`."""

    b: gl.tensor  # -1: there is none left; the number of sequences: its rows belong to none
    head: gl.tensor
    head_k: gl.tensor
    lse_head: gl.tensor  # the row of lse, which is [B * H, Sq] or [H, T]
    first_row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    token_q: gl.tensor  # of row 0; 0 where sequences are not packed
    token_k: gl.tensor


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
def schedule(queue, work, sequences, window, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that schedules."""
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    if PACKED:
        schedule_packed(queue, work, sequences, window, BLOCK_M, BLOCK_N)
    else:
        schedule_dense(queue, work, sequences, window, BLOCK_M, BLOCK_N)


@gluon.jit
def schedule_dense(queue, work, sequences, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    n = gl.program_id(0)
    put = 0
    while n < work.count:
        any_head, block = position_of(work, n)
        b, head = any_head // work.num_heads, any_head % work.num_heads
        first_row = block * BLOCK_M
        blocks = blocks_of(first_row, sequences.q, sequences.k, work, window, BLOCK_M, BLOCK_N)
        tile = Tile(
            b, head, head // work.group, any_head, first_row, blocks.lo, blocks.hi, sequences.q, sequences.k, 0, 0
        )  # fmt: skip
        n = hand_over(queue, put, tile, work, False)
        put += 1
    put_fields(queue, put, without_rows(-1))


@gluon.jit
def schedule_packed(queue, work, sequences, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    n = gl.program_id(0)
    put = 0
    b = 0
    before = 0  # blocks of the sequences before
    token_q, seqlen_q = span_of(sequences.cu_q, 0, sequences.batch, sequences.q)
    while n < work.count:
        block = n // work.num_heads
        while (block >= before + gl.cdiv(seqlen_q, BLOCK_M)) & (b <= sequences.batch):
            before += gl.cdiv(seqlen_q, BLOCK_M)
            b += 1
            token_q, seqlen_q = span_of(sequences.cu_q, b, sequences.batch, sequences.q)
        if b <= sequences.batch:
            head = n % work.num_heads
            token_k, seqlen_k = keys_of(sequences, b)
            if b == sequences.batch:
                seqlen_k = 0
            first_row = (before + gl.cdiv(seqlen_q, BLOCK_M) - 1 - block) * BLOCK_M
            blocks = blocks_of(first_row, seqlen_q, seqlen_k, work, window, BLOCK_M, BLOCK_N)
            tile = Tile(
                b, head, head // work.group, head, first_row, blocks.lo, blocks.hi, seqlen_q, seqlen_k, token_q, token_k
            )  # fmt: skip
            n = hand_over(queue, put, tile, work, True)
            put += 1
        else:
            n = work.count
    if put == 0:  # the others count on one tile: this one has no rows
        put_fields(queue, put, without_rows(sequences.batch))
        mbarrier.wait(queue.wanted.index(0), 0)
        put += 1
    put_fields(queue, put, without_rows(-1))


@gluon.jit
def without_rows(b):
    """A tile that no row is in, with one block of keys. With b of -1 it ends the queue, the backward pass's too."""
    return Tile(b, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0)


@gluon.jit
def span_of(cu_seqlens, b, batch, total):
    """First token and length of a packed sequence. After the last one come the tokens that belong to none."""
    start = gl.load(cu_seqlens + gl.minimum(b, batch))
    stop = gl.load(cu_seqlens + gl.minimum(b + 1, batch))
    start = gl.minimum(gl.maximum(start, 0), total)
    stop = gl.minimum(stop, total)
    if b >= batch:
        stop = total
    return start, gl.maximum(stop - start, 0)


@gluon.jit
def keys_of(sequences, b):
    """First token and length of a packed sequence's keys, as far as they are used."""
    token, seqlen = span_of(sequences.cu_k, b, sequences.batch, sequences.k)
    if sequences.used_k is not None:
        used = gl.load(sequences.used_k + gl.minimum(b, sequences.batch - 1))
        seqlen = gl.where(b < sequences.batch, gl.minimum(seqlen, gl.maximum(used, 0)), seqlen)
    return token, seqlen


@gluon.jit
def blocks_of(first_row, seqlen_q, seqlen_k, work, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    last_row = gl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    return key_blocks(window, first_row, last_row, seqlen_k - seqlen_q + work.diagonal, seqlen_k, BLOCK_N)


@gluon.jit
def position_of(work, n):
    """Head, counted through all dense sequences, and block: of rows, from the last one on."""
    size = work.section * work.blocks
    first = n // size * work.section
    heads = gl.minimum(work.section, work.all_heads - first)
    rest = n % size
    return first + rest % heads, work.blocks - 1 - rest // heads


@gluon.jit
def hand_over(queue, put, tile, work, PACKED: gl.constexpr):
    """Put the program's next tile into the queue and, when the one after it is wanted, take that one's number."""
    put_fields(queue, put, tile)
    mbarrier.wait(queue.wanted.index(0), put & 1)
    n = next_number(work)
    if not PACKED:  # noqa: SIM102 - decided when the kernel is compiled
        if n == gl.num_programs(0) + work.count - 1:  # the last to ask
            gl.store(work.counter, 0)
    return n


@gluon.jit
def next_number(work):
    """The next tile that no other program has. Each tile asks once."""
    return gl.num_programs(0) + gl.atomic_add(work.counter, 1, sem="relaxed")


@gluon.jit
def put_fields(queue, n, tile):
    """The n-th tile of the program, whatever its FIELDS mean."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = slot_of(n, SLOTS)
    mbarrier.wait(queue.empty.index(slot), (round_of(n, SLOTS) & 1) ^ 1)
    for field in gl.static_range(FIELDS):
        queue.data.index(slot * FIELDS + field).store(gl.full([1], tile[field], gl.int32, one))
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def want_tile(queue, pred):
    """Say that the next tile will soon be needed, once for each tile that was taken."""
    mbarrier.arrive(queue.wanted.index(0), count=1, pred=pred)


@gluon.jit
def take_tile(queue, n):
    found = taken(queue, n)
    tile = Tile(
        found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], found[8], found[9], found[10]
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(slot_of(n, SLOTS)), count=1)
    return tile


@gluon.jit
def taken(queue, n):
    """The n-th tile's fields, of which the queue's slot is still to be let go."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = slot_of(n, SLOTS)
    mbarrier.wait(queue.full.index(slot), round_of(n, SLOTS) & 1)
    first = slot * FIELDS
    return (
        gl.max(queue.data.index(first).load(one), 0),
        gl.max(queue.data.index(first + 1).load(one), 0),
        gl.max(queue.data.index(first + 2).load(one), 0),
        gl.max(queue.data.index(first + 3).load(one), 0),
        gl.max(queue.data.index(first + 4).load(one), 0),
        gl.max(queue.data.index(first + 5).load(one), 0),
        gl.max(queue.data.index(first + 6).load(one), 0),
        gl.max(queue.data.index(first + 7).load(one), 0),
        gl.max(queue.data.index(first + 8).load(one), 0),
        gl.max(queue.data.index(first + 9).load(one), 0),
        gl.max(queue.data.index(first + 10).load(one), 0),
    )
