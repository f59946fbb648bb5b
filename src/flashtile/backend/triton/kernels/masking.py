"""The blocks that a tile visits, `[lo, full_lo, full_hi, hi)`, and the pairs that are visible in them.

Blocks in `[full_lo, full_hi)` need no masks; blocks outside `[lo, hi)` are not visited. Key `j` is visible to row `i`
iff `i + shift - left <= j <= i + shift + right`, with `shift = seqlen_k - seqlen_q` in an unsharded call.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .rng import block_origin

UNLIMITED = tl.constexpr(-(2**31))  # a comparison with it is compiled away


class BlockInfo(NamedTuple):
    """The blocks to visit, by position: masked from `lo`, full from `full_lo`, masked from `full_hi`."""

    lo: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    hi: tl.tensor


class Bounds(NamedTuple):
    """The keys that a row sees, or the rows that see a key: `lower <= position <= upper`. A pair costs one comparison,
    or two.
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
    """Start of the n-th block of those that need masks (at both ends), or of those that do not."""
    if MASKED:
        before = (blocks.full_lo - blocks.lo) // BLOCK
        return tl.where(n < before, blocks.lo + n * BLOCK, blocks.full_hi + (n - before) * BLOCK)
    else:
        return blocks.full_lo + n * BLOCK


@triton.jit
def block_list(params, b, head, number):
    """Pointer to the list of a kernel's block of a sequence and head; 0 without lists."""
    if params.lists.data is None:
        return 0
    else:
        lists = params.lists
        at = b * lists.stride_b.to(tl.int64) + head * lists.stride_h.to(tl.int64) + number * lists.stride_m.to(tl.int64)
        return lists.data + at


@triton.jit
def num_visits(blocks, listed, params, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of visited blocks that need masks, or of those that need none."""
    if params.lists.data is None:
        return num_blocks(blocks, MASKED, BLOCK)
    elif MASKED:
        return tl.load(listed)
    else:
        return tl.load(listed + 1)


@triton.jit
def first_visit(listed, params, MASKED: tl.constexpr):
    """Pointer to the first of these blocks in the list."""
    if params.lists.data is None:
        return 0
    elif MASKED:
        return listed + 2
    else:
        return listed + 2 + tl.load(listed)


@triton.jit
def nth_visit(blocks, first, n, params, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Start of the n-th of these blocks."""
    if params.lists.data is None:
        return nth_block(blocks, n, MASKED, BLOCK)
    else:
        return tl.load(first + n) * BLOCK


@triton.jit
def all_masked(blocks):
    return BlockInfo(blocks.lo, blocks.hi, blocks.hi, blocks.hi)


@triton.jit
def to_blocks(lo, full_lo, full_hi, hi, origin, BLOCK: tl.constexpr):
    """Round positions to blocks that start at `origin`: a block that is partly visible is masked."""
    hi = tl.maximum(hi, lo)
    first = (lo - origin) // BLOCK
    last = tl.cdiv(hi - origin, BLOCK)
    last = tl.where(hi > lo, last, first)
    full_first = tl.minimum(tl.cdiv(tl.maximum(full_lo, lo) - origin, BLOCK), last)
    full_last = tl.maximum((tl.minimum(full_hi, hi) - origin) // BLOCK, full_first)
    return BlockInfo(
        origin + first * BLOCK, origin + full_first * BLOCK, origin + full_last * BLOCK, origin + last * BLOCK
    )


@triton.jit
def first_of_chunk(window, position):
    """The first key of the chunk of a position, which counts as the keys do. Positions before all keys have a chunk
    before them: division rounds toward 0.
    """
    position += window.chunk_origin
    chunk = tl.where(position < 0, -1, position // window.attention_chunk)
    return chunk * window.attention_chunk - window.chunk_origin


@triton.jit
def key_blocks(params, first_row, last_row, shift, seqlen_k, BLOCK: tl.constexpr):
    """Key blocks for the rows `first_row..last_row`."""
    window = params.window
    lo, full_lo, full_hi, hi = seqlen_k.begin, seqlen_k.begin, seqlen_k.end, seqlen_k.end
    if window.window_left is not None:
        lo = tl.maximum(lo, first_row + shift - window.window_left)
        full_lo = tl.maximum(full_lo, last_row + shift - window.window_left)
    if window.window_right is not None:
        full_hi = tl.minimum(full_hi, first_row + shift + window.window_right + 1)
        hi = tl.minimum(hi, last_row + shift + window.window_right + 1)
    if window.top_left is not None:
        full_hi = tl.minimum(full_hi, first_row + window.top_left + 1)
        hi = tl.minimum(hi, last_row + window.top_left + 1)
    if window.attention_chunk is not None:
        first, last = first_of_chunk(window, first_row + shift), first_of_chunk(window, last_row + shift)
        lo, full_lo = tl.maximum(lo, first), tl.maximum(full_lo, last)
        full_hi = tl.minimum(full_hi, first + window.attention_chunk)
        hi = tl.minimum(hi, last + window.attention_chunk)
    return to_blocks(lo, full_lo, full_hi, hi, block_origin(params.dropout), BLOCK)


@triton.jit
def row_blocks(window, first_key, last_key, shift, num_rows, BLOCK: tl.constexpr):
    """Row blocks for the keys `first_key..last_key`: the inverse of `key_blocks`."""
    lo, full_lo, full_hi, hi = 0, 0, num_rows, num_rows
    if window.window_left is not None:
        full_hi = tl.minimum(full_hi, first_key - shift + window.window_left + 1)
        hi = tl.minimum(hi, last_key - shift + window.window_left + 1)
    if window.window_right is not None:
        lo = tl.maximum(lo, first_key - shift - window.window_right)
        full_lo = tl.maximum(full_lo, last_key - shift - window.window_right)
    if window.top_left is not None:
        lo = tl.maximum(lo, first_key - window.top_left)
        full_lo = tl.maximum(full_lo, last_key - window.top_left)
    if window.attention_chunk is not None:
        first, last = first_of_chunk(window, first_key) - shift, first_of_chunk(window, last_key) - shift
        lo, full_lo = tl.maximum(lo, first), tl.maximum(full_lo, last)
        full_hi = tl.minimum(full_hi, first + window.attention_chunk)
        hi = tl.minimum(hi, last + window.attention_chunk)
    return to_blocks(lo, full_lo, full_hi, hi, 0, BLOCK)


@triton.jit
def key_bounds(params, rows, shift, seqlen_k):
    """The keys that each row sees, of those that exist. With left padding or dropout, blocks begin before the first."""
    window = params.window
    lower, upper = UNLIMITED, seqlen_k.end - 1
    if params.lengths.leftpad_k is not None or params.dropout.threshold is not None:
        lower = seqlen_k.begin
    if window.window_left is not None:
        lower = tl.maximum(rows + (shift - window.window_left), lower)
    if window.window_right is not None:
        upper = tl.minimum(rows + (shift + window.window_right), upper)
    if window.top_left is not None:
        upper = tl.minimum(rows + window.top_left, upper)
    if window.attention_chunk is not None:
        first = first_of_chunk(window, rows + shift)
        lower = tl.maximum(first, lower)
        upper = tl.minimum(first + (window.attention_chunk - 1), upper)
    return Bounds(lower, upper)


@triton.jit
def row_bounds(window, keys, shift, exists, num_rows):
    """The rows that see each key: none if it does not exist."""
    lower, upper = UNLIMITED, tl.where(exists, num_rows - 1, -1)
    if window.window_left is not None:
        upper = tl.minimum(keys + (window.window_left - shift), upper)
    if window.window_right is not None:
        lower = tl.maximum(keys - (shift + window.window_right), lower)
    if window.top_left is not None:
        lower = tl.maximum(keys - window.top_left, lower)
    if window.attention_chunk is not None:
        first = first_of_chunk(window, keys) - shift
        lower = tl.maximum(first, lower)
        upper = tl.minimum(first + (window.attention_chunk - 1), upper)
    return Bounds(lower, upper)


@triton.jit
def within(bounds, positions):
    """Bool `[M, N]` for bounds `[M, 1]` and positions `[1, N]`, or transposed."""
    return (positions >= bounds.lower) & (positions <= bounds.upper)


@triton.jit
def visible_keys(bounds, keys, exists, RANGE: tl.constexpr):
    """As `within` if the keys that exist are a range, which bounds hold. Some pages in between may not exist."""
    if RANGE:
        return within(bounds, keys)
    else:
        return within(bounds, keys) & exists


@triton.jit
def mask_edges(t, value, bounds, blocks, start, params, info, rows, keys, exists, RANGE: tl.constexpr):
    """As `mask_fill` in a loop over all blocks, at keys from `start` on: without masks where all pairs are visible."""
    if RANGE and params.scores.mask.data is None and params.scores.mask_mod is None:
        if (start < blocks.full_lo) | (start >= blocks.full_hi):
            t = mask_fill(t, value, bounds, params, info, rows, keys, exists, True, RANGE)
        return t
    else:
        return mask_fill(t, value, bounds, params, info, rows, keys, exists, True, RANGE)


@triton.jit
def mask_fill(t, value, bounds, params, info, rows, keys, exists, MASKED: tl.constexpr, RANGE: tl.constexpr):
    """`t [M, N]` where a pair is visible, else `value`. `exists [1, N]` is `None` where every key does."""
    visible = visible_keys(bounds, keys, exists, RANGE) if MASKED else exists
    if params.scores.mask.data is not None and (MASKED or params.lists.data is None):
        in_mask = scores.load_mask(params, info, rows, keys, exists)
        visible = in_mask if visible is None else visible & in_mask
    if params.scores.mask_mod is not None and (MASKED or params.lists.data is None):
        shown = scores.visible_by_function(params, info, rows, keys)
        visible = shown if visible is None else visible & shown
    if visible is None:
        return t
    else:
        return tl.where(visible, t, value)
