"""Which blocks a tile visits and which pairs in them are visible: `[lo, full_lo, full_hi, hi)`.

Blocks of `[full_lo, full_hi)` run without any mask code, blocks outside `[lo, hi)` are not visited. Key `j` is visible
to row `i` iff `i + shift - left <= j <= i + shift + right`, with `shift = seqlen_k - seqlen_q` in an unsharded call.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import bits_below


class Window(NamedTuple):
    """The sides of the window, `None` where unlimited."""

    left: gl.tensor | None
    right: gl.tensor | None
    top_left: gl.tensor | None  # shift of the bound `j <= i + shift` of top-left causal


class Blocks(NamedTuple):
    """Numbers of blocks of keys, or of rows."""

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor


@gluon.jit
def key_blocks(window, first_row, last_row, shift, seqlen_k, BLOCK_N: gl.constexpr):
    """Key blocks for the rows `first_row..last_row`. There is at least one, wholly hidden where no key is visible: it
    leaves rows as they began.
    """
    lo, full_lo, full_hi, hi = 0, 0, seqlen_k, seqlen_k
    if window.left is not None:
        lo = gl.maximum(lo, first_row + shift - window.left)
        full_lo = gl.maximum(full_lo, last_row + shift - window.left)
    if window.right is not None:
        full_hi = gl.minimum(full_hi, first_row + shift + window.right + 1)
        hi = gl.minimum(hi, last_row + shift + window.right + 1)
    if window.top_left is not None:
        full_hi = gl.minimum(full_hi, first_row + window.top_left + 1)
        hi = gl.minimum(hi, last_row + window.top_left + 1)
    lo = gl.minimum(lo, gl.maximum(seqlen_k - 1, 0))
    first = lo // BLOCK_N
    last = gl.maximum(gl.cdiv(gl.maximum(hi, 0), BLOCK_N), first + 1)
    whole_first = gl.minimum(gl.cdiv(gl.maximum(full_lo, 0), BLOCK_N), last)
    whole_last = gl.minimum(gl.maximum(gl.maximum(full_hi, 0) // BLOCK_N, whole_first), last)
    return Blocks(first, whole_first, whole_last, last)


@gluon.jit
def row_blocks(window, first_key, last_key, shift, seqlen_q, BLOCK_M: gl.constexpr):
    """Blocks of rows that see keys of `first_key..last_key`: the inverse of `key_blocks`, but that there may be none. A
    block that the last row cuts is masked.
    """
    lo, full_lo, full_hi, hi = 0, 0, seqlen_q, seqlen_q
    if window.left is not None:
        full_hi = gl.minimum(full_hi, first_key - shift + window.left + 1)
        hi = gl.minimum(hi, last_key - shift + window.left + 1)
    if window.right is not None:
        lo = gl.maximum(lo, first_key - shift - window.right)
        full_lo = gl.maximum(full_lo, last_key - shift - window.right)
    if window.top_left is not None:
        lo = gl.maximum(lo, first_key - window.top_left)
        full_lo = gl.maximum(full_lo, last_key - window.top_left)
    first = lo // BLOCK_M
    last = gl.cdiv(gl.maximum(hi, 0), BLOCK_M)
    return Blocks(first, gl.cdiv(full_lo, BLOCK_M), gl.maximum(full_hi, 0) // BLOCK_M, gl.maximum(last, first))


@gluon.jit
def blocks_seen(window, first_row, shift, seqlen_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The blocks of keys to which `row_blocks` gives the block of rows that begins with `first_row`."""
    first_key, keys = 0, seqlen_k
    if window.left is not None:
        first_key = gl.maximum(first_row + shift - window.left, 0)
    if window.right is not None:
        keys = gl.minimum(keys, first_row + BLOCK_M + shift + window.right)
    if window.top_left is not None:
        keys = gl.minimum(keys, first_row + BLOCK_M + window.top_left)
    lo, hi = first_key // BLOCK_N, gl.cdiv(gl.maximum(keys, 0), BLOCK_N)
    return Blocks(lo, lo, hi, hi)


@gluon.jit
def keys_seen(x, window, first_row, first_key, shift, seqlen_k):
    """Which pairs of `x [M, N]` are visible, of rows and keys from the first ones on; as bits."""
    rows = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    stop = gl.full_like(rows, 0) + seqlen_k
    if window.right is not None:
        stop = gl.minimum(stop, rows + (shift + window.right + 1))
    if window.top_left is not None:
        stop = gl.minimum(stop, rows + (window.top_left + 1))
    seen = bits_below(stop - first_key, x)
    if window.left is not None:
        seen = seen & ~bits_below(rows + (shift - window.left - first_key), x)
    return seen


@gluon.jit
def rows_seen(x, window, first_key, first_row, shift, seqlen_q, seqlen_k):
    """The same of `x [N, M]`: keys stand first."""
    keys = first_key + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    stop = gl.full_like(keys, 0) + seqlen_q
    if window.left is not None:
        stop = gl.minimum(stop, keys - (shift - window.left - 1))
    seen = bits_below(gl.where(keys < seqlen_k, stop - first_row, 0), x)
    if window.right is not None:
        seen = seen & ~bits_below(keys - (shift + window.right + first_row), x)
    if window.top_left is not None:
        seen = seen & ~bits_below(keys - (window.top_left + first_row), x)
    return seen
