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

from ..shared.masking import row_blocks
from ..shared.pipeline import slot_of
from ..shared.schedule import SLOTS, hand_over, keys_of, position_of, put_fields, span_of, taken, without_rows


class KeyWork(NamedTuple):
    """The blocks of keys of one launch."""

    count: gl.tensor  # at most, where sequences are packed
    blocks: gl.tensor  # dense: of keys, for each head
    all_heads: gl.tensor  # dense: of keys, of all sequences
    section: gl.tensor  # dense: heads that are worked on together
    counter: gl.tensor  # pointer to a zero, which a dense launch leaves as it was
    num_heads_k: gl.tensor
    group: gl.tensor  # of query heads that share a key head
    padded_rows: gl.tensor  # for each query head in the buffer of sums
    diagonal: gl.tensor  # what is added to seqlen_k - seqlen_q


class KeyTile(NamedTuple):
    """A block of keys of one head, and the blocks of rows `lo <= m < hi` that see it."""

    b: gl.tensor  # -1: there is none left
    head_k: gl.tensor
    first_key: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    sums_row: gl.tensor  # row 0 of the group's first head, in what has padded rows
    shift: gl.tensor  # aligns rows with keys: the diagonal is `key = row + shift`
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    token_q: gl.tensor  # of row 0; 0 where sequences are not packed
    token_k: gl.tensor


@gluon.jit
def schedule_keys(queue, work, sequences, window, TILE: gl.constexpr, PACKED: gl.constexpr):
    """The warp that schedules."""
    if PACKED:
        schedule_packed_keys(queue, work, sequences, window, TILE)
    else:
        schedule_dense_keys(queue, work, sequences, window, TILE)


@gluon.jit
def schedule_dense_keys(queue, work, sequences, window, TILE: gl.constexpr):
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    n = gl.program_id(0)
    put = 0
    shift = sequences.k - sequences.q + work.diagonal
    while n < work.count:
        any_head, block = place_of(work, n, TILE.downwards)
        b, head = any_head // work.num_heads_k, any_head % work.num_heads_k
        first_key = block * BLOCK_N
        last_key = gl.minimum(first_key + BLOCK_N, sequences.k) - 1
        rows = row_blocks(window, first_key, last_key, shift, sequences.q, BLOCK_M)
        sums_row = any_head * work.group * work.padded_rows
        tile = KeyTile(b, head, first_key, rows.lo, rows.hi, sums_row, shift, sequences.q, sequences.k, 0, 0)
        n = hand_over(queue, put, tile, work, False)
        put += 1
    put_fields(queue, put, without_rows(-1))


@gluon.jit
def schedule_packed_keys(queue, work, sequences, window, TILE: gl.constexpr):
    """Keys that belong to no sequence are a sequence that no row sees."""
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    n = gl.program_id(0)
    put = 0
    b = 0
    before = 0  # blocks of the sequences before
    token_k, seqlen_k = keys_of(sequences, 0)
    while n < work.count:
        block = n // work.num_heads_k
        while (block >= before + gl.cdiv(seqlen_k, BLOCK_N)) & (b <= sequences.batch):
            before += gl.cdiv(seqlen_k, BLOCK_N)
            b += 1
            token_k, seqlen_k = keys_of(sequences, b)
        if b <= sequences.batch:
            head = n % work.num_heads_k
            token_q, seqlen_q = span_of(sequences.cu_q, b, sequences.batch, sequences.q)
            if b == sequences.batch:
                seqlen_q = 0
            block -= before
            if not TILE.downwards:
                block = gl.cdiv(seqlen_k, BLOCK_N) - 1 - block
            first_key = block * BLOCK_N
            last_key = gl.minimum(first_key + BLOCK_N, seqlen_k) - 1
            shift = seqlen_k - seqlen_q + work.diagonal
            rows = row_blocks(window, first_key, last_key, shift, seqlen_q, BLOCK_M)
            # As in `rows`: each sequence begins with a block of rows.
            sums_row = head * work.group * work.padded_rows + (token_q // BLOCK_M + b) * BLOCK_M
            tile = KeyTile(
                b, head, first_key, rows.lo, rows.hi, sums_row, shift, seqlen_q, seqlen_k, token_q, token_k
            )  # fmt: skip
            n = hand_over(queue, put, tile, work, True)
            put += 1
        else:
            n = work.count
    put_fields(queue, put, without_rows(-1))


@gluon.jit
def place_of(work, n, DOWNWARDS: gl.constexpr):
    """Head, counted through all sequences, and block."""
    any_head, block = position_of(work, n)
    if DOWNWARDS:
        block = work.blocks - 1 - block
    return any_head, block


@gluon.jit
def first_rows(tile, DOWNWARDS: gl.constexpr):
    """The block of rows that a block of keys begins with."""
    if DOWNWARDS:
        return tile.hi - 1
    else:
        return tile.lo


@gluon.jit
def next_rows(m, member, tile, group, DOWNWARDS: gl.constexpr):
    """The block of rows after m, and of which member of the group of heads. The same rows of all members come first:
    passing a head's rows before the next one's would make short blocks of keys wait for long ones at each head.
    """
    after = member + 1
    done = after == group
    if DOWNWARDS:
        return gl.where(done, m - 1, m), gl.where(done, 0, after)
    else:
        return gl.where(done, m + 1, m), gl.where(done, 0, after)


@gluon.jit
def take_keys(queue, n):
    found = taken(queue, n)
    tile = KeyTile(
        found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], found[8], found[9], found[10]
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(slot_of(n, SLOTS)), count=1)
    return tile
