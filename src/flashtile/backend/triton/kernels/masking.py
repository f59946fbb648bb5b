"""Which blocks a tile visits and which pairs in it are visible: `[lo, full_lo, full_hi, hi)`.

Blocks of `[full_lo, full_hi)` run without any mask code, blocks outside `[lo, hi)` are not visited. Key `j` is visible
to row `i` iff `i + shift - left <= j <= i + shift + right`, with `shift = seqlen_k - seqlen_q` in an unsharded call.
"""

from typing import NamedTuple

import triton
import triton.language as tl

UNLIMITED = tl.constexpr(-(2**31))  # a comparison with it is compiled away


class WindowSize(NamedTuple):
    """The sides of the window, `None` where unlimited."""

    left: tl.tensor | None
    right: tl.tensor | None
    top_left: tl.tensor | None  # shift of the bound `j <= i + shift` of top-left causal


class BlockInfo(NamedTuple):
    """Positions at which the blocks to visit begin: masked from `lo`, whole from `full_lo`, masked from `full_hi`."""

    lo: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    hi: tl.tensor


class Bounds(NamedTuple):
    """The keys that a row sees or the rows that see a key, `lower <= position <= upper`. All that depends on one of
    the two is in its bounds, so that a pair costs one comparison, or two.
    """

    lower: tl.tensor
    upper: tl.tensor


@triton.jit
def num_blocks(blocks, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED:
        return (blocks.full_lo - blocks.lo + blocks.hi - blocks.full_hi) // BLOCK
    else:
        return (blocks.full_hi - blocks.full_lo) // BLOCK


@triton.jit
def nth_block(blocks, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Where the n-th block begins, of those that need masks (at both ends) or of those that do not."""
    if MASKED:
        before = (blocks.full_lo - blocks.lo) // BLOCK
        return tl.where(n < before, blocks.lo + n * BLOCK, blocks.full_hi + (n - before) * BLOCK)
    else:
        return blocks.full_lo + n * BLOCK


@triton.jit
def all_masked(blocks):
    return BlockInfo(blocks.lo, blocks.hi, blocks.hi, blocks.hi)


@triton.jit
def to_blocks(lo, full_lo, full_hi, hi, origin, BLOCK: tl.constexpr):
    """Positions to boundaries of blocks that start at `origin`: what is not whole is masked."""
    hi = tl.maximum(hi, lo)
    first = (lo - origin) // BLOCK
    last = tl.cdiv(hi - origin, BLOCK)
    last = tl.where(hi > lo, last, first)
    whole_first = tl.minimum(tl.cdiv(tl.maximum(full_lo, lo) - origin, BLOCK), last)
    whole_last = tl.maximum((tl.minimum(full_hi, hi) - origin) // BLOCK, whole_first)
    return BlockInfo(
        origin + first * BLOCK, origin + whole_first * BLOCK, origin + whole_last * BLOCK, origin + last * BLOCK
    )


@triton.jit
def key_blocks(window, first_row, last_row, shift, begin, end, origin, BLOCK: tl.constexpr):
    """Key blocks for the rows `first_row..last_row`, of the keys `begin <= j < end`."""
    lo, full_lo, full_hi, hi = begin, begin, end, end
    if window.left is not None:
        lo = tl.maximum(lo, first_row + shift - window.left)
        full_lo = tl.maximum(full_lo, last_row + shift - window.left)
    if window.right is not None:
        full_hi = tl.minimum(full_hi, first_row + shift + window.right + 1)
        hi = tl.minimum(hi, last_row + shift + window.right + 1)
    if window.top_left is not None:
        full_hi = tl.minimum(full_hi, first_row + window.top_left + 1)
        hi = tl.minimum(hi, last_row + window.top_left + 1)
    return to_blocks(lo, full_lo, full_hi, hi, origin, BLOCK)


@triton.jit
def row_blocks(window, first_key, last_key, shift, num_rows, BLOCK: tl.constexpr):
    """Row blocks for the keys `first_key..last_key`: the inverse of `key_blocks`."""
    lo, full_lo, full_hi, hi = 0, 0, num_rows, num_rows
    if window.left is not None:
        full_hi = tl.minimum(full_hi, first_key - shift + window.left + 1)
        hi = tl.minimum(hi, last_key - shift + window.left + 1)
    if window.right is not None:
        lo = tl.maximum(lo, first_key - shift - window.right)
        full_lo = tl.maximum(full_lo, last_key - shift - window.right)
    if window.top_left is not None:
        lo = tl.maximum(lo, first_key - window.top_left)
        full_lo = tl.maximum(full_lo, last_key - window.top_left)
    return to_blocks(lo, full_lo, full_hi, hi, 0, BLOCK)


@triton.jit
def key_bounds(window, rows, shift, seqlen_k, PADDED: tl.constexpr):
    """The keys that each row sees, of those that exist; with PADDED, blocks may begin before the first."""
    lower, upper = UNLIMITED, seqlen_k.end - 1
    if PADDED:
        lower = seqlen_k.begin
    if window.left is not None:
        lower = tl.maximum(rows + (shift - window.left), lower)
    if window.right is not None:
        upper = tl.minimum(rows + (shift + window.right), upper)
    if window.top_left is not None:
        upper = tl.minimum(rows + window.top_left, upper)
    return Bounds(lower, upper)


@triton.jit
def row_bounds(window, keys, shift, holds, num_rows):
    """The rows that see each key: none see one that does not exist (`holds`, of the shape of `keys`)."""
    lower, upper = UNLIMITED, tl.where(holds, num_rows - 1, -1)
    if window.left is not None:
        upper = tl.minimum(keys + (window.left - shift), upper)
    if window.right is not None:
        lower = tl.maximum(keys - (shift + window.right), lower)
    if window.top_left is not None:
        lower = tl.maximum(keys - window.top_left, lower)
    return Bounds(lower, upper)


@triton.jit
def within(bounds, positions):
    """Bool `[M, N]` for bounds `[M, 1]` and positions `[1, N]`, or transposed."""
    return (positions >= bounds.lower) & (positions <= bounds.upper)


@triton.jit
def visible_keys(bounds, keys, exists, RANGE: tl.constexpr):
    """As `within`, with RANGE: the keys of one page are a range. Of several, some in between may not exist."""
    if RANGE:
        return within(bounds, keys)
    else:
        return within(bounds, keys) & exists
