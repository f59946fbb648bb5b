"""Which rows a program owns, and where the sequences' queries and keys are: dense, packed or paged."""

from typing import NamedTuple

import triton
import triton.language as tl


class WorkTile(NamedTuple):
    """The block of rows of one sequence and head that a program owns."""

    sequence: tl.tensor  # the number of sequences for packed tokens that belong to none
    head: tl.tensor
    start: tl.tensor  # the block's first row
    offset: tl.tensor  # token of the sequence's position 0; 0 where sequences are not packed
    seqlen: tl.tensor  # 0 past the last block


class SeqlenInfo(NamedTuple):
    """The keys of one sequence that exist: positions `begin <= j < end`."""

    offset: tl.tensor  # token of position 0
    seqlen: tl.tensor  # Sk, with which queries are aligned
    begin: tl.tensor
    end: tl.tensor


@triton.jit
def work_tile(
    program, num_tiles, num_heads, cu_seqlens, seqused, batch, total, origin, PACK_GQA: tl.constexpr,
    BLOCK: tl.constexpr, n, SHORT: tl.constexpr = False, FIRST_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Find the block of rows of a program. Blocks start at `origin <= 0`; each position has `PACK_GQA` rows. `n` counts
    from 0 to a power of two above the number of packed sequences.

    Programs count through blocks, then heads, then dense sequences: those that run together share keys. The last rows
    of a causal sequence see the most keys and go first, so that short work fills the end; with `FIRST_FIRST` the first
    keys, which most rows see.

    Packed: `num_tiles` counts the blocks of all sequences. Tokens that belong to no sequence are one more sequence.
    `SHORT` programs skip divisions by 1; branches cost others registers (Triton 3.6).
    """
    if SHORT:
        tile, head = 0, program
        if num_tiles > 1:
            tile, head = program % num_tiles, program // num_tiles
    else:
        tile, head = program % num_tiles, program // num_tiles
    if cu_seqlens is None:
        block = tile if FIRST_FIRST else num_tiles - 1 - tile
        return WorkTile(head // num_heads, head % num_heads, origin + block * BLOCK, 0, total)
    else:
        start = tl.load(cu_seqlens + n, mask=n <= batch, other=total).to(tl.int32)
        stop = tl.load(cu_seqlens + n + 1, mask=n < batch, other=total).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), total)
        seqlen = tl.maximum(tl.minimum(stop, total) - start, 0)
        if seqused is not None:  # the tokens of no sequence are all in use
            used = tl.load(seqused + n, mask=n < batch, other=total).to(tl.int32)
            seqlen = tl.minimum(seqlen, tl.maximum(used, 0))
        blocks = tl.where((n <= batch) & (seqlen > 0), tl.cdiv(seqlen * PACK_GQA - origin, BLOCK), 0)
        sequence = tl.sum((tl.cumsum(blocks, 0) <= tile).to(tl.int32), 0)
        own = n == sequence  # false everywhere past the last block
        before = tl.sum(tl.where(n < sequence, blocks, 0), 0)
        count = tl.sum(tl.where(own, blocks, 0), 0)
        seqlen = tl.sum(tl.where(own, seqlen, 0), 0)
        offset = tl.sum(tl.where(own, start, 0), 0)
        block = tile - before if FIRST_FIRST else tl.maximum(count - 1 - (tile - before), 0)
        return WorkTile(sequence, head, origin + block * BLOCK, offset, seqlen)


@triton.jit
def in_turns(program, num_tiles, heads_at_once):
    """The program's number where groups of `heads_at_once` heads, which divides the number of heads, take turns: their
    first blocks run first, then their second blocks. The longest blocks of a causal call are then not the last to
    start, and few blocks of a head still run together.
    """
    if heads_at_once is None:
        return program
    else:
        group = num_tiles * heads_at_once
        head = program // group * heads_at_once + program % group % heads_at_once
        return head * num_tiles + program % group // heads_at_once


@triton.jit
def query_tile(
    lengths, program, num_heads, PACK_GQA: tl.constexpr, BLOCK: tl.constexpr, n,
    SHORT: tl.constexpr = False,
):  # fmt: skip
    """Find the block of query rows of a program."""
    return work_tile(
        program, lengths.num_tiles, num_heads, lengths.cu_seqlens_q, lengths.seqused_q, lengths.batch, lengths.total_q,
        0, PACK_GQA, BLOCK, n, SHORT,
    )  # fmt: skip


@triton.jit
def offset_and_seqlen(sequence, cu_seqlens, batch, total):
    """First token and length of a sequence; length 0 past the last one."""
    if cu_seqlens is None:
        return 0, total
    else:
        exists = sequence < batch
        start = tl.load(cu_seqlens + sequence, mask=exists, other=0).to(tl.int32)
        stop = tl.load(cu_seqlens + sequence + 1, mask=exists, other=0).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), total)
        return start, tl.where(exists, tl.maximum(tl.minimum(stop, total) - start, 0), 0)


@triton.jit
def query_seqlen(lengths, sequence):
    """First token and length of a sequence's queries."""
    offset, seqlen = offset_and_seqlen(sequence, lengths.cu_seqlens_q, lengths.batch, lengths.total_q)
    if lengths.seqused_q is not None:
        used = tl.load(lengths.seqused_q + sequence, mask=sequence < lengths.batch, other=0).to(tl.int32)
        seqlen = tl.minimum(seqlen, tl.maximum(used, 0))
    return offset, seqlen


@triton.jit
def key_seqlen(lengths, sequence):
    """The keys of a sequence, within what memory holds: tokens, or positions of a page table."""
    exists = sequence < lengths.batch
    if lengths.page_table.data is not None:
        offset = 0
        seqlen = tl.maximum(tl.load(lengths.seqused_k + sequence, mask=exists, other=0).to(tl.int32), 0)
        end = tl.minimum(seqlen, lengths.total_k)
    else:
        offset, seqlen = offset_and_seqlen(sequence, lengths.cu_seqlens_k, lengths.batch, lengths.total_k)
        if lengths.seqused_k is not None:
            seqlen = tl.minimum(tl.load(lengths.seqused_k + sequence, mask=exists, other=0).to(tl.int32), seqlen)
        end = tl.minimum(seqlen, lengths.total_k - offset)
    begin = 0
    if lengths.leftpad_k is not None:
        begin = tl.maximum(tl.load(lengths.leftpad_k + sequence, mask=exists, other=0).to(tl.int32), 0)
    return SeqlenInfo(offset, seqlen, begin, tl.minimum(end, lengths.max_seqlen_k))
