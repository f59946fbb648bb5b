"""Which key blocks a tile of rows visits and which pairs in them are visible: `[lo, full_lo, full_hi, hi)`.

Blocks of `[full_lo, full_hi)` run without any mask code, blocks outside `[lo, hi)` are not visited. Key `j` is visible
to row `i` iff `i + shift - left <= j <= i + shift + right`, with `shift = seqlen_k - seqlen_q` in an unsharded call.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Window(NamedTuple):
    """The sides of the window, `None` where unlimited."""

    left: gl.tensor | None
    right: gl.tensor | None
    top_left: gl.tensor | None  # shift of the bound `j <= i + shift` of top-left causal


class Blocks(NamedTuple):
    """Numbers of key blocks."""

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
def visible(window, rows, keys, shift, seqlen_k):
    """Bool `[M, N]` for rows `[M]` and keys `[N]`, each in its slice of the scores' layout."""
    i, j = gl.expand_dims(rows, 1), gl.expand_dims(keys, 0)
    shown = j < seqlen_k
    if window.left is not None:
        shown = shown & (j >= i + (shift - window.left))
    if window.right is not None:
        shown = shown & (j <= i + (shift + window.right))
    if window.top_left is not None:
        shown = shown & (j <= i + window.top_left)
    return shown
