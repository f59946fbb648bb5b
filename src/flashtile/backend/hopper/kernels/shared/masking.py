"""Block ranges of a tile and masks of a block: `[lo, full_lo, full_hi, hi)`.

Blocks outside `[lo, hi)` are skipped; blocks in `[full_lo, full_hi)` run without mask code. Key `j` is visible to row
`i` iff `i + shift - left <= j <= i + shift + right`, where `shift = seqlen_k - seqlen_q` in an unsharded call.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import bits_below
from .compat import Scalar


class MaskBounds(NamedTuple):
    """Sides of the sliding window, `None` where unlimited."""

    window_left: Scalar
    window_right: Scalar
    top_left: Scalar  # top-left causal: key <= row + top_left


class BlockRange(NamedTuple):
    """A range of blocks of keys (n) or of rows (m), and its part without masks."""

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor


@gluon.jit
def n_block_range(bounds, first_row, last_row, shift, seqlen_k, BLOCK_N: gl.constexpr):
    """Blocks of keys for the rows `first_row..last_row`.

    There is at least one. Where no key is visible it is fully masked, which leaves the softmax state unchanged.
    """
    lo, full_lo, full_hi, hi = 0, 0, seqlen_k, seqlen_k
    if bounds.window_left is not None:
        lo = gl.maximum(lo, first_row + shift - bounds.window_left)
        full_lo = gl.maximum(full_lo, last_row + shift - bounds.window_left)
    if bounds.window_right is not None:
        full_hi = gl.minimum(full_hi, first_row + shift + bounds.window_right + 1)
        hi = gl.minimum(hi, last_row + shift + bounds.window_right + 1)
    if bounds.top_left is not None:
        full_hi = gl.minimum(full_hi, first_row + bounds.top_left + 1)
        hi = gl.minimum(hi, last_row + bounds.top_left + 1)
    lo = gl.minimum(lo, gl.maximum(seqlen_k - 1, 0))
    first = lo // BLOCK_N
    last = gl.maximum(gl.cdiv(gl.maximum(hi, 0), BLOCK_N), first + 1)
    full_first = gl.minimum(gl.cdiv(gl.maximum(full_lo, 0), BLOCK_N), last)
    full_last = gl.minimum(gl.maximum(gl.maximum(full_hi, 0) // BLOCK_N, full_first), last)
    return BlockRange(first, full_first, full_last, last)


@gluon.jit
def m_block_range(bounds, first_key, last_key, shift, seqlen_q, BLOCK_M: gl.constexpr):
    """Blocks of rows that see keys of `first_key..last_key`; may be empty. The inverse of `n_block_range`.

    A block that contains the sequence's end is masked.
    """
    lo, full_lo, full_hi, hi = 0, 0, seqlen_q, seqlen_q
    if bounds.window_left is not None:
        full_hi = gl.minimum(full_hi, first_key - shift + bounds.window_left + 1)
        hi = gl.minimum(hi, last_key - shift + bounds.window_left + 1)
    if bounds.window_right is not None:
        lo = gl.maximum(lo, first_key - shift - bounds.window_right)
        full_lo = gl.maximum(full_lo, last_key - shift - bounds.window_right)
    if bounds.top_left is not None:
        lo = gl.maximum(lo, first_key - bounds.top_left)
        full_lo = gl.maximum(full_lo, last_key - bounds.top_left)
    first = lo // BLOCK_M
    last = gl.cdiv(gl.maximum(hi, 0), BLOCK_M)
    return BlockRange(first, gl.cdiv(full_lo, BLOCK_M), gl.maximum(full_hi, 0) // BLOCK_M, gl.maximum(last, first))


@gluon.jit
def contributing_n_blocks(bounds, first_row, shift, seqlen_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of keys whose `m_block_range` contains the block of rows that starts at `first_row`."""
    first_key, keys = 0, seqlen_k
    if bounds.window_left is not None:
        first_key = gl.maximum(first_row + shift - bounds.window_left, 0)
    if bounds.window_right is not None:
        keys = gl.minimum(keys, first_row + BLOCK_M + shift + bounds.window_right)
    if bounds.top_left is not None:
        keys = gl.minimum(keys, first_row + BLOCK_M + bounds.top_left)
    lo, hi = first_key // BLOCK_N, gl.cdiv(gl.maximum(keys, 0), BLOCK_N)
    return BlockRange(lo, lo, hi, hi)


@gluon.jit
def visible_keys(x, bounds, first_row, first_key, shift, seqlen_k):
    """Mask bits of `x [M, N]`, whose first row and key are given."""
    rows = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    stop = gl.full_like(rows, 0) + seqlen_k
    if bounds.window_right is not None:
        stop = gl.minimum(stop, rows + (shift + bounds.window_right + 1))
    if bounds.top_left is not None:
        stop = gl.minimum(stop, rows + (bounds.top_left + 1))
    visible = bits_below(stop - first_key, x)
    if bounds.window_left is not None:
        visible = visible & ~bits_below(rows + (shift - bounds.window_left - first_key), x)
    return visible


@gluon.jit
def visible_rows(x, bounds, first_key, first_row, shift, seqlen_q, seqlen_k):
    """Mask bits of the transposed block `x [N, M]`."""
    keys = first_key + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    stop = gl.full_like(keys, 0) + seqlen_q
    if bounds.window_left is not None:
        stop = gl.minimum(stop, keys - (shift - bounds.window_left - 1))
    visible = bits_below(gl.where(keys < seqlen_k, stop - first_row, 0), x)
    if bounds.window_right is not None:
        visible = visible & ~bits_below(keys - (shift + bounds.window_right + first_row), x)
    if bounds.top_left is not None:
        visible = visible & ~bits_below(keys - (bounds.top_left + first_row), x)
    return visible
