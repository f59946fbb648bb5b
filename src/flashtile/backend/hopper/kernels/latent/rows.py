"""Tiles of latent attention: 64 rows of all query heads and queries of a sequence, and some of its pairs of blocks."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.compat import Pointer, Scalar
from ..shared.coordinates import ragged_coord
from ..shared.mma import MMA_M
from ..shared.pages import PageTable, column_and_row, entries


class LatentRows(NamedTuple):
    """Rows of a sequence: row r is query `r // query_step % seqlen_q` of head `r // head_step % num_heads`."""

    seqlen_q: Scalar
    num_heads: Scalar
    query_step: Scalar
    head_step: Scalar
    num_blocks: Scalar  # tiles of a sequence
    num_splits: Scalar  # programs that share the keys of a tile


class LatentKeys(NamedTuple):
    """Rows of the cache, in pages."""

    seqlen_k: Scalar  # room for a sequence's keys
    seqused_k: Pointer  # [batch]
    batch: Scalar
    window_right: Scalar  # `None`: every query sees all keys
    diagonal: Scalar  # added to seqlen_k - seqlen_q
    page_table: PageTable


class LatentTile(NamedTuple):
    """A program's tile; pairs of blocks `lo <= n < hi`, of which there may be none."""

    b: gl.tensor
    split: gl.tensor
    first_row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    seqlen_k: gl.tensor


@gluon.jit
def tile_of_program(rows, keys, CONFIG: gl.constexpr):
    """Tiles of the same rows of the cache are neighbors: they read them at the same time."""
    n = gl.program_id(0)
    first_row = n % rows.num_blocks * MMA_M
    n = n // rows.num_blocks
    b, split = n % keys.batch, n // keys.batch
    seqlen_k = gl.minimum(gl.load(keys.seqused_k + b), keys.seqlen_k)
    visible = seqlen_k
    if keys.window_right is not None:
        visible = gl.minimum(visible, seqlen_k + keys.diagonal + keys.window_right)
    pairs = gl.cdiv(gl.maximum(visible, 0), CONFIG.block_n)
    lo, hi = 0, pairs
    if rows.num_splits is not None:
        lo = split * pairs // rows.num_splits
        hi = (split + 1) * pairs // rows.num_splits
    return LatentTile(b, split, first_row, lo, hi, seqlen_k)


@gluon.jit
def query_of(rows, row):
    return row // rows.query_step % rows.seqlen_q


@gluon.jit
def head_of(rows, row):
    return row // rows.head_step % rows.num_heads


@gluon.jit
def queries_of(rows, tile, layout: gl.constexpr):
    """`[MMA_M]`: the query of each row."""
    return query_of(rows, tile.first_row + gl.arange(0, MMA_M, layout))


@gluon.jit
def visible_stop(rows, keys, tile, query):
    """The key before which a query's keys end; the first query's is the least."""
    stop = tile.seqlen_k + query * 0
    if keys.window_right is not None:
        stop = gl.minimum(stop, tile.seqlen_k - rows.seqlen_q + keys.diagonal + keys.window_right + 1 + query)
    return stop


@gluon.jit
def page_of(keys, tile, block, CONFIG: gl.constexpr):
    """The page of a block of keys; -1 if it does not exist."""
    key = block * MMA_M
    column, _ = column_and_row(keys.page_table, key, CONFIG)
    page = entries(keys.page_table, tile.b, column, key < keys.seqlen_k)  # without waiting for the number of keys
    return gl.where(key < tile.seqlen_k, page, -1)


@gluon.jit
def block_coord(keys, tile, block, page, CONFIG: gl.constexpr):
    """TMA coordinates of a block of keys: rows past its end, and those of no page, are 0."""
    pages, key = keys.page_table, block * MMA_M
    _, row = column_and_row(pages, key, CONFIG)
    length = gl.where(page < 0, 0, gl.minimum(tile.seqlen_k - (key - row), pages.page_size))
    return ragged_coord(0, row, gl.maximum(page, 0) * pages.rows_of_page, length)
