"""Which rows and keys a program holds, and how a tile of them is read and stored.

A sequence is described once for each program: dense, packed or paged, kernels see positions that count from 0.
Rows of any width are held in one or two chunks whose widths are powers of two (96 = 64 + 32, 192 = 128 + 64), because
that is what Triton's tensors can be; nothing is padded in memory.
"""

import inspect
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Of all kernels; what has another name is a number.
POINTERS = {
    "q", "k", "v", "out", "lse", "dout", "dlse", "row_stats", "dq", "dk", "dv", "dbias", "dslopes",
    "mask", "bias", "slopes", "sinks", "seed",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "leftpad_k",
    "partial_out", "partial_lse", "semaphores",
    "rotated_q", "k_cache", "v_cache", "new_k", "new_v", "cos", "sin", "lengths", "totals",
}  # fmt: skip


def kernel(function: Any) -> Any:
    """`triton.jit` whose numbers are plain numbers: a new length or stride never compiles a new kernel. Pointers stay
    specialised by their alignment, and what is `None` is compiled away.
    """
    numbers = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.annotation is not tl.constexpr and p.name not in POINTERS
    ]
    return triton.jit(function, do_not_specialize=numbers)


class Chunks(NamedTuple):
    """HeadRows of one tile: `[N, D]` as `a [N, D0]` and `b [N, D1]`; `b` is the number 0 where `D1` is."""

    a: tl.tensor
    b: tl.tensor


class HeadRows(NamedTuple):
    """The rows of one sequence and head in memory."""

    data: tl.tensor  # pointer to position 0
    stride: tl.tensor  # elements from row to row, int64


class WorkTile(NamedTuple):
    """One block of rows of one sequence."""

    sequence: tl.tensor
    head: tl.tensor
    start: tl.tensor  # the block's first position
    offset: tl.tensor  # token of the sequence's position 0; 0 where sequences are not packed
    seqlen: tl.tensor  # the sequence's positions


class SeqlenInfo(NamedTuple):
    """The keys of one sequence that exist: positions `begin <= j < end`."""

    offset: tl.tensor  # token of position 0
    seqlen: tl.tensor  # Sk, which positions of queries are aligned to
    begin: tl.tensor
    end: tl.tensor


class KeyValueHead(NamedTuple):
    """Keys and values of one sequence and head. In pages (PAGE_SIZE > 0), `k` and `v` point to the head in the first
    one; else the last four are the number 0.
    """

    k: HeadRows
    v: HeadRows
    range: SeqlenInfo
    table: tl.tensor  # pointer to the sequence's first entry
    num_pages: tl.tensor
    page_stride_k: tl.tensor  # elements from page to page
    page_stride_v: tl.tensor


class KeyTile(NamedTuple):
    """A block of keys: from `start` on in memory or, in pages, at `page` and `slot`; `[N]`, or numbers where the block
    lies in one page.
    """

    start: tl.tensor
    page: tl.tensor
    slot: tl.tensor
    exists: tl.tensor  # [N]


@triton.jit
def elements(stride, ALIGN: tl.constexpr):
    """A stride in elements, from units of ALIGN elements: offsets are 64-bit, and the compiler sees their alignment."""
    return stride.to(tl.int64) * ALIGN


@triton.jit
def work_tile(
    program, num_tiles, num_heads, cu_seqlens, batch, total, origin, PACK_GQA: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The block of rows that a program owns; blocks start at `origin <= 0`, each position has `PACK_GQA` rows. Programs
    count through blocks, then heads, then (dense) sequences, so that those that run together share keys.

    Packed: `num_tiles` counts the blocks of all sequences; after the last sequence come the tokens that belong to none,
    as one more sequence. Past all of them, `length` is 0. The last rows of a causal sequence see the most keys: they go
    first, so that short work fills the end.
    """
    tile, head = program % num_tiles, program // num_tiles
    if cu_seqlens is None:
        return WorkTile(head // num_heads, head % num_heads, origin + (num_tiles - 1 - tile) * BLOCK, 0, total)
    else:
        n = tl.arange(0, BLOCK_B)
        start = tl.load(cu_seqlens + n, mask=n <= batch, other=total).to(tl.int32)
        stop = tl.load(cu_seqlens + n + 1, mask=n < batch, other=total).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), total)
        length = tl.maximum(tl.minimum(stop, total) - start, 0)
        blocks = tl.where((n <= batch) & (length > 0), tl.cdiv(length * PACK_GQA - origin, BLOCK), 0)
        sequence = tl.sum((tl.cumsum(blocks, 0) <= tile).to(tl.int32), 0)
        own = n == sequence  # nowhere, past the last block
        before = tl.sum(tl.where(n < sequence, blocks, 0), 0)
        count = tl.sum(tl.where(own, blocks, 0), 0)
        length = tl.sum(tl.where(own, length, 0), 0)
        first = tl.sum(tl.where(own, start, 0), 0)
        block = tl.maximum(count - 1 - (tile - before), 0)
        return WorkTile(sequence, head, origin + block * BLOCK, first, length)


@triton.jit
def query_seqlen(sequence, cu_seqlens, batch, total):
    """First token and length of a sequence; past the last one, nothing."""
    if cu_seqlens is None:
        return 0, total
    else:
        exists = sequence < batch
        start = tl.load(cu_seqlens + sequence, mask=exists, other=0).to(tl.int32)
        stop = tl.load(cu_seqlens + sequence + 1, mask=exists, other=0).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), total)
        return start, tl.where(exists, tl.maximum(stop - start, 0), 0)


@triton.jit
def key_seqlen(sequence, cu_seqlens, seqused, leftpad, batch, total, longest, PAGED: tl.constexpr):
    """The keys of a sequence. `total` bounds what can be read: tokens, or positions that a page table has room for."""
    exists = sequence < batch
    if PAGED:
        first = 0
        length = tl.maximum(tl.load(seqused + sequence, mask=exists, other=0).to(tl.int32), 0)
        end = tl.minimum(length, total)
    else:
        first, length = query_seqlen(sequence, cu_seqlens, batch, total)
        if seqused is not None:
            length = tl.minimum(tl.load(seqused + sequence, mask=exists, other=0).to(tl.int32), length)
        end = tl.minimum(length, total - first)
    begin = 0
    if leftpad is not None:
        begin = tl.maximum(tl.load(leftpad + sequence, mask=exists, other=0).to(tl.int32), 0)
    return SeqlenInfo(first, length, begin, tl.minimum(end, longest))


@triton.jit
def one_page(table, num_pages, seqlen_k):
    """A table of one column, as a dense cache has it: where the sequence lies as a whole, and its keys. An entry
    outside the pages holds none.
    """
    page = tl.load(table, mask=seqlen_k.seqlen > 0, other=-1)  # without sequences there is no table
    exists = (page >= 0) & (page < num_pages)
    end = tl.where(exists, seqlen_k.end, 0)
    return tl.where(exists, page, 0).to(tl.int64), SeqlenInfo(seqlen_k.offset, seqlen_k.seqlen, seqlen_k.begin, end)


@triton.jit
def key_value_head(
    k, v, b, seqlen_k, page_table, num_pages, stride_k_b, stride_k_n, stride_v_b, stride_v_n, stride_table_b,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`k` and `v` point to the head in the first sequence or page. PAGE_SIZE is 0 without pages, and for a page table
    of one column.
    """
    if PAGE_SIZE > 0:
        table = page_table + b * elements(stride_table_b, 1)
        return KeyValueHead(
            HeadRows(k, stride_k_n), HeadRows(v, stride_v_n), seqlen_k, table, num_pages, stride_k_b, stride_v_b
        )
    else:
        page = b
        if page_table is not None:
            page, seqlen_k = one_page(page_table + b * elements(stride_table_b, 1), num_pages, seqlen_k)
        k_rows = HeadRows(k + page * stride_k_b + seqlen_k.offset * stride_k_n, stride_k_n)
        v_rows = HeadRows(v + page * stride_v_b + seqlen_k.offset * stride_v_n, stride_v_n)
        return KeyValueHead(k_rows, v_rows, seqlen_k, 0, 0, 0, 0)


@triton.jit
def key_tile(kv, start, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """The keys from position `start` on. Entries of a page table that point outside the pages hold no keys."""
    position = start + tl.arange(0, N)
    exists = (position >= kv.range.begin) & (position < kv.range.end)
    if PAGE_SIZE == 0:
        return KeyTile(start, 0, 0, exists)
    elif PAGE_SIZE % N == 0:
        nearest = tl.maximum(tl.minimum(start, kv.range.end - 1), 0)
        page = tl.load(kv.table + nearest // PAGE_SIZE)
        end = tl.where((page >= 0) & (page < kv.num_pages), kv.range.end, 0)
        page = tl.where(end > 0, page, 0)
        return KeyTile(start, page.to(tl.int64), start % PAGE_SIZE, exists & (position < end))
    else:
        page = tl.load(kv.table + position // PAGE_SIZE, mask=exists, other=-1)
        in_pages = (page >= 0) & (page < kv.num_pages)
        return KeyTile(start, tl.where(in_pages, page, 0).to(tl.int64), position % PAGE_SIZE, exists & in_pages)


@triton.jit
def key_pointers(x, page_stride, tile, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """Pointers `[N, 1]` to a block of rows of k or v."""
    if PAGE_SIZE == 0:
        return row_pointers(x, tile.start, N)
    elif PAGE_SIZE % N == 0:
        return row_pointers(HeadRows(x.data + tile.page * page_stride, x.stride), tile.slot, N)
    else:
        return (x.data + (tile.page * page_stride + tile.slot * x.stride))[:, None]


@triton.jit
def load_k(kv, tile, exists, PAGE_SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
           D1: tl.constexpr):  # fmt: skip
    return load_rows(key_pointers(kv.k, kv.page_stride_k, tile, PAGE_SIZE, N), exists, D, D0, D1)  # [N, D]


@triton.jit
def load_v(kv, tile, exists, PAGE_SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
           D1: tl.constexpr):  # fmt: skip
    return load_rows(key_pointers(kv.v, kv.page_stride_v, tile, PAGE_SIZE, N), exists, D, D0, D1)  # [N, Dv]


@triton.jit
def row_pointers(x, first, N: tl.constexpr):
    """Pointers `[N, 1]` to the rows from position `first` on: a scalar that moves and offsets that do not."""
    return (x.data + first * x.stride) + tl.arange(0, N)[:, None] * x.stride


@triton.jit
def load_chunk(pointers, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Features `FIRST` to `FIRST + WIDTH` of rows `[N, 1]`; what is past `D` or does not exist is 0."""
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    if FIRST + WIDTH > D:
        if exists is None:
            return tl.load(pointers + d, mask=d < D, other=0.0)
        else:
            return tl.load(pointers + d, mask=exists[:, None] & (d < D), other=0.0)
    elif exists is None:
        return tl.load(pointers + d)
    else:
        return tl.load(pointers + d, mask=exists[:, None], other=0.0)


@triton.jit
def load_rows(pointers, exists, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """`[N, D]`; `exists [N]` is `None` where every row does."""
    if D1 == 0:
        return Chunks(load_chunk(pointers, exists, 0, D0, D), 0.0)
    else:
        return Chunks(load_chunk(pointers, exists, 0, D0, D), load_chunk(pointers, exists, D0, D1, D))


@triton.jit
def load_row_stats(pointers, exists):
    """Two numbers of each row, fp32 `[M]`: lse as a base-2 logarithm and delta. They lie kv by kv and are read as
    one integer, for the layout in which a tile wants them makes each thread read many. HeadRows that do not exist get
    infinity, which makes their probabilities 0; `exists` is `None` where every row does.
    """
    pair = tl.load(pointers) if exists is None else tl.load(pointers, mask=exists, other=0x7F800000)
    low, high = (pair & 0xFFFFFFFF).to(tl.int32), (pair >> 32).to(tl.int32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def store_chunk(pointers, x, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers + d, x.to(pointers.dtype.element_ty), mask=exists[:, None] & (d < D))


@triton.jit
def store_rows(pointers, x, exists, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    store_chunk(pointers, x.a, exists, 0, D0, D)
    if D1 > 0:
        store_chunk(pointers, x.b, exists, D0, D1, D)
