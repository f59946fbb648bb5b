"""Keys and values of one sequence and head, and loads of their tiles: dense, packed, or from pages."""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import HeadRows, elements, load_columns, load_rows, row_pointers
from .sequences import SeqlenInfo


class KeyValueHead(NamedTuple):
    """Keys and values of one sequence and head. In pages (PAGE_SIZE > 0), `k` and `v` point to the head in the first
    one; otherwise the last four are the number 0.
    """

    k: HeadRows
    v: HeadRows
    seqlen: SeqlenInfo
    table: tl.tensor  # pointer to the sequence's first entry
    num_pages: tl.tensor
    page_stride_k: tl.tensor  # from page to page, in units of KEY_ALIGN elements
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
def key_value_head(k, v, lengths, b, head, seqlen, CONFIG: tl.constexpr):
    """Keys and values of a sequence and key head."""
    ALIGN: tl.constexpr = CONFIG.KEY_ALIGN
    k_head, v_head = k.data + head * elements(k.stride_h, ALIGN), v.data + head * elements(v.stride_h, ALIGN)
    stride_k_b, stride_k_n = elements(k.stride_b, ALIGN), elements(k.stride_n, ALIGN)
    stride_v_b, stride_v_n = elements(v.stride_b, ALIGN), elements(v.stride_n, ALIGN)
    if CONFIG.PAGE_SIZE > 0:
        table = lengths.page_table.data + b * elements(lengths.page_table.stride_b, 1)
        k_rows, v_rows = HeadRows(k_head, stride_k_n), HeadRows(v_head, stride_v_n)
        return KeyValueHead(k_rows, v_rows, seqlen, table, lengths.num_pages, k.stride_b, v.stride_b)
    else:
        page = b
        if lengths.page_table.data is not None:
            table = lengths.page_table.data + b * elements(lengths.page_table.stride_b, 1)
            page, seqlen = only_page(table, lengths, seqlen, b, CONFIG)
        k_rows = HeadRows(k_head + page * stride_k_b + seqlen.offset * stride_k_n, stride_k_n)
        v_rows = HeadRows(v_head + page * stride_v_b + seqlen.offset * stride_v_n, stride_v_n)
        return KeyValueHead(k_rows, v_rows, seqlen, 0, 0, 0, 0)


@triton.jit
def only_page(table, lengths, seqlen, b, CONFIG: tl.constexpr):
    """The page of a sequence whose page table has one column, as that of a dense cache, and the keys there: none if the
    entry is outside the pages. The table is read without waiting for the lengths, unless its entries are in order.
    """
    own = (b < lengths.batch) & (lengths.total_k > 0)
    page = b if CONFIG.IN_ORDER else tl.load(table, mask=own, other=-1)
    exists = (page >= 0) & (page < lengths.num_pages)
    end = tl.where(exists, seqlen.end, 0)
    return tl.where(exists, page, 0).to(tl.int64), SeqlenInfo(seqlen.offset, seqlen.seqlen, seqlen.begin, end)


@triton.jit
def key_tile(kv, start, CONFIG: tl.constexpr):
    """The block of keys from position `start` on."""
    pages = 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, start, CONFIG)
    return tile_in_pages(kv, start, pages, CONFIG)


@triton.jit
def in_range(x, n):
    """Whether `0 <= x < n`, by one comparison."""
    UNSIGNED: tl.constexpr = tl.uint64 if x.dtype == tl.int64 else tl.uint32
    return x.to(UNSIGNED, bitcast=True) < n.to(UNSIGNED)


@triton.jit
def load_pages(kv, start, CONFIG: tl.constexpr):
    """Entries of the page table for the block of keys from position `start` on: one where the block lies in one page,
    one for each page where it begins with a page, else `[N]`.
    """
    PAGE_SIZE: tl.constexpr = CONFIG.PAGE_SIZE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    if PAGE_SIZE % BLOCK_N == 0:
        nearest = tl.maximum(tl.minimum(start, kv.seqlen.end - 1), 0)
        page = tl.load(kv.table + nearest // PAGE_SIZE)
    else:
        if BLOCK_N % PAGE_SIZE == 0:
            n = start // PAGE_SIZE + tl.arange(0, BLOCK_N // PAGE_SIZE)
            exists = n * PAGE_SIZE < kv.seqlen.end
        else:
            n = (start + tl.arange(0, BLOCK_N)) // PAGE_SIZE
            exists = keys_exist(start + tl.arange(0, BLOCK_N), kv.seqlen.begin, kv.seqlen.end)
        page = tl.load(kv.table + n, mask=exists, other=-1)
    if page.dtype == tl.int64:
        page = tl.where(in_range(page, kv.num_pages), page, -1).to(tl.int32)
    return page


@triton.jit
def of_keys(x, CONFIG: tl.constexpr):
    """Values of the keys of a block, `[N]`, from those of its pages."""
    PAGES: tl.constexpr = x.shape[0]
    if PAGES == CONFIG.BLOCK_N:
        return x
    else:
        return tl.broadcast_to(x[:, None], [PAGES, CONFIG.BLOCK_N // PAGES]).reshape([CONFIG.BLOCK_N])


@triton.jit
def keys_exist(position, begin, end):
    return in_range(position - begin, tl.maximum(end - begin, 0))


@triton.jit
def tile_in_pages(kv, start, page, CONFIG: tl.constexpr):
    """The block of keys from position `start` on, whose pages are given. Pages that do not exist hold no keys."""
    PAGE_SIZE: tl.constexpr = CONFIG.PAGE_SIZE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    position = start + tl.arange(0, BLOCK_N)
    begin, end = kv.seqlen.begin, kv.seqlen.end
    if PAGE_SIZE == 0:
        return KeyTile(start, 0, 0, keys_exist(position, begin, end))
    elif PAGE_SIZE % BLOCK_N == 0:
        end = tl.where(in_range(page, kv.num_pages), end, begin)
        return KeyTile(start, page, start % PAGE_SIZE, keys_exist(position, begin, end))
    else:
        slot = (tl.arange(0, BLOCK_N) if BLOCK_N % PAGE_SIZE == 0 else position) % PAGE_SIZE
        exists = keys_exist(position, begin, end) & in_range(of_keys(page, CONFIG), kv.num_pages)
        return KeyTile(start, page, slot, exists)


@triton.jit
def key_pointers(x, page_stride, tile, CONFIG: tl.constexpr, AXIS: tl.constexpr = 1):
    """Pointers `[N, 1]`, or `[1, N]` for AXIS 0, to a block of rows of k or v. Those of pages that do not exist are
    arbitrary.
    """
    if CONFIG.PAGE_SIZE == 0:
        return row_pointers(x, tile.start, CONFIG.BLOCK_N, AXIS)
    else:
        page = tile.page.to(tl.uint32, bitcast=True).to(tl.int64) * page_stride.to(tl.int64)
        if CONFIG.PAGE_SIZE % CONFIG.BLOCK_N == 0:
            return row_pointers(HeadRows(x.data + page * CONFIG.KEY_ALIGN, x.stride), tile.slot, CONFIG.BLOCK_N, AXIS)
        else:
            return tl.expand_dims((x.data + tile.slot * x.stride) + of_keys(page, CONFIG) * CONFIG.KEY_ALIGN, AXIS)


@triton.jit
def load_k(kv, tile, exists, CONFIG: tl.constexpr):
    D: tl.constexpr = CONFIG.HEAD_DIM
    return load_rows(key_pointers(kv.k, kv.page_stride_k, tile, CONFIG), exists, D)  # [N, D]


@triton.jit
def load_v(kv, tile, exists, CONFIG: tl.constexpr):
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    return load_rows(key_pointers(kv.v, kv.page_stride_v, tile, CONFIG), exists, DV)  # [N, Dv]


@triton.jit
def load_v_columns(kv, tile, exists, CONFIG: tl.constexpr):
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    return load_columns(key_pointers(kv.v, kv.page_stride_v, tile, CONFIG, AXIS=0), exists, DV)  # [Dv, N]
