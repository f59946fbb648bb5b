"""Kernels that list the blocks which a mask and the window show (`shared.block_lists`). Whether a mask function shows a
block follows from intervals of positions (`backend.gpu.visibility`); a mask that is a tensor is read once.
"""

import triton.language as tl
from triton import jit

from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.masking import MaskBounds
from .shared.padded_rows import RowTensor
from .shared.pairs import PairTensor
from .shared.score_mod import PairInputs

LANES = tl.constexpr(32)  # threads of a warp
HIDDEN, FULL = tl.constexpr(0), tl.constexpr(2)  # as in `expression.blocks`; PARTIAL is 1
KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)  # of minimum and maximum


@triton_kernel
def mask_states_kernel(
    mask: RowTensor, states: Pointer, num_heads: Scalar, num_rows: Scalar, num_words: Scalar, row_blocks: Scalar,
    key_blocks: Scalar, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
):  # fmt: skip
    """Store the states of BLOCKS blocks of a mask, in uint8 `[B, H, row_blocks, key_blocks]`. A word is ALL_VISIBLE if
    the mask shows all of its pairs, and 0 if none.
    """
    programs = tl.cdiv(key_blocks, BLOCKS)  # of a block of rows
    row_block, first_block = tl.program_id(0) // programs, tl.program_id(0) % programs * BLOCKS
    b, head = row_block // row_blocks // num_heads, row_block // row_blocks % num_heads
    rows = row_block % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    words = first_block * BLOCK_WORDS + tl.arange(0, BLOCKS * BLOCK_WORDS)[None, :]
    exists = (rows < num_rows) & (words < num_words)
    data = mask.data + b.to(tl.int64) * mask.stride_b + head.to(tl.int64) * mask.stride_h
    x = tl.load(data + rows.to(tl.int64) * mask.stride_m + words, mask=exists, other=0)
    hides, shows = exists & (x != ALL_VISIBLE), x != 0
    some_hidden = tl.max(tl.reshape(tl.max(hides.to(tl.int32), axis=0), [BLOCKS, BLOCK_WORDS]), axis=1)
    some_visible = tl.max(tl.reshape(tl.max(shows.to(tl.int32), axis=0), [BLOCKS, BLOCK_WORDS]), axis=1)
    block = first_block + tl.arange(0, BLOCKS)
    at = states + row_block.to(tl.int64) * key_blocks + block
    tl.store(at, some_visible * (FULL - some_hidden), mask=block < key_blocks)


@triton_kernel
def key_summaries_kernel(
    summaries: Pointer, seqlen_k: Scalar, num_blocks: Scalar, inputs: PairInputs, CONFIG: tl.constexpr
):  # fmt: skip
    """Store what visibility takes of each block of keys, int64 `[B, CONFIG.summaries, num_blocks]`."""
    BLOCKS: tl.constexpr = CONFIG.blocks
    NUMBERS: tl.constexpr = CONFIG.summaries
    programs = tl.cdiv(num_blocks, BLOCKS)
    b, first = tl.program_id(0) // programs, tl.program_id(0) % programs * BLOCKS
    n = first + tl.arange(0, BLOCKS)
    keys = inputs.j0 + key_positions(n, seqlen_k, CONFIG)
    no_rows = tl.arange(0, 1)
    found = CONFIG.score_mod.function(b + inputs.b0, inputs.h0, no_rows, keys, inputs.captured)
    for i in tl.static_range(NUMBERS):
        tl.store(summaries + (b * NUMBERS + i) * num_blocks + n, found[i], mask=n < num_blocks)


@jit
def key_positions(n, seqlen_k, CONFIG: tl.constexpr):
    """The keys `[LANES, BLOCKS, N / LANES]` of blocks; the last key again past it.

    With strides that it does not know, Triton spreads a warp over the first axis, and warps over the second: a warp
    loads adjacent elements, and has all of a block's.
    """
    BLOCK_N: tl.constexpr = CONFIG.block_n
    lane, rest = tl.arange(0, LANES)[:, None, None], tl.arange(0, BLOCK_N // LANES)[None, None, :]
    return tl.minimum(n[None, :, None] * BLOCK_N + (rest * LANES + lane), seqlen_k - 1)


@triton_kernel
def visible_blocks_kernel(
    lists: Pointer, states: PairTensor, summaries: Pointer, queue: Pointer, queue_size: Pointer, num_lists: Scalar,
    num_heads: Scalar, group: Scalar, seqlen_q: Scalar, seqlen_k: Scalar, num_blocks: Scalar, bounds: MaskBounds,
    diagonal: Scalar, inputs: PairInputs, CONFIG: tl.constexpr,
):  # fmt: skip
    """The blocks of keys of one block of rows: its list, with one block after the last key if it sees none. The mask is
    a function, or `states` has the states of parts of its blocks. `summaries` are those of `key_summaries_kernel`.

    With CONFIG.table, instead for each block of keys `4 * count + 2 * partial + visible`, where count is that of
    visible blocks up to this one, and then the count of all. `num_heads` are those of lists, of `group` heads each: a
    block that heads of a group see in other ways is partly visible.
    """
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCKS: tl.constexpr = CONFIG.blocks
    ROW_PARTS: tl.constexpr = CONFIG.row_parts
    KEY_PARTS: tl.constexpr = CONFIG.key_parts
    number, list_head = tl.program_id(0) % num_lists, tl.program_id(0) // num_lists
    b, first_head = list_head // num_heads, list_head % num_heads * group
    first_row, last_row = number * BLOCK_M, tl.minimum((number + 1) * BLOCK_M, seqlen_q) - 1
    shift = seqlen_k - seqlen_q + diagonal
    out = lists + tl.program_id(0).to(tl.int64) * (num_blocks + 1 if CONFIG.table else num_blocks + 2)
    before = 0
    for first in range(0, num_blocks, BLOCKS):
        n = first + tl.arange(0, BLOCKS)
        full, seen = n >= 0, n < 0
        if states.data is None:
            rows = inputs.i0 + tl.minimum(first_row + tl.arange(0, CONFIG.row_positions), last_row)
            if CONFIG.summaries > 0:
                keys = (summaries + b * (CONFIG.summaries * num_blocks) + n, num_blocks, n < num_blocks)
            else:
                keys = inputs.j0 + key_positions(n, seqlen_k, CONFIG)
            for head in range(group):
                always, ever = CONFIG.score_mod.function(
                    b + inputs.b0, first_head + head + inputs.h0, rows, keys, inputs.captured
                )
                full, seen = full & always, seen | ever
        else:
            for head in range(group):
                of_head = states.data + (b * states.stride_b + (first_head + head) * states.stride_h)
                for part_m in tl.static_range(ROW_PARTS):
                    of_rows = of_head + (number * ROW_PARTS + part_m) * states.stride_m
                    for part_n in tl.static_range(KEY_PARTS):
                        exists = n * BLOCK_N + part_n * (BLOCK_N // KEY_PARTS) < seqlen_k
                        exists &= first_row + part_m * (BLOCK_M // ROW_PARTS) < seqlen_q
                        at = of_rows + (n * KEY_PARTS + part_n) * states.stride_n
                        state = tl.load(at, mask=exists, other=HIDDEN)
                        full, seen = full & ((state == FULL) | ~exists), seen | (state != HIDDEN)
        visible = seen & (n < num_blocks)
        if bounds.window_left is not None:
            visible &= tl.minimum((n + 1) * BLOCK_N, seqlen_k) > first_row + shift - bounds.window_left
        if bounds.window_right is not None:
            visible &= n * BLOCK_N <= last_row + shift + bounds.window_right
        if bounds.top_left is not None:
            visible &= n * BLOCK_N <= last_row + bounds.top_left
        count = before + tl.cumsum(visible.to(tl.int32), 0)
        partial = tl.where(full, 0, 1)
        if CONFIG.table:
            tl.store(out + n, 4 * count + tl.where(visible, 2 * partial + 1, 0), mask=n < num_blocks)
        else:
            tl.store(out + count, 2 * n + partial, mask=visible)
            if queue is not None:
                place = tl.program_id(0) * (num_blocks + 2) + count
                add_to_queue(queue, queue_size, place, 2 * n + partial, visible & (partial != 0))
        before += tl.sum(visible.to(tl.int32), 0)
    if CONFIG.table:
        tl.store(out + num_blocks, before)
    else:
        tl.store(out, tl.maximum(before, 1))
        tl.store(out + 1, 2 * num_blocks + 1, mask=before == 0)


@jit
def add_to_queue(queue, queue_size, place, entry, chosen):
    """Append entries of lists and their offsets: those of which `pair_bits_kernel` makes bits."""
    own = chosen.to(tl.int32)
    first = tl.atomic_add(queue_size, tl.sum(own, 0), sem="relaxed")
    tl.store(queue + (first + tl.cumsum(own, 0) - 1), (entry.to(tl.int64) << 32) | place, mask=chosen)


@triton_kernel
def key_lists_kernel(
    table: Pointer, lists: Pointer, ranks: Scalar, queue: Pointer, queue_size: Pointer, num_rows: Scalar,
    num_keys: Scalar, FIRST_KEY_FIRST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The blocks of rows of one block of keys, from the table of `visible_blocks_kernel`, and their ranks, `ranks`
    elements after their entries.
    """
    n, list_head = tl.program_id(0) % num_keys, tl.program_id(0) // num_keys
    out = lists + tl.program_id(0).to(tl.int64) * (num_rows + 2)
    before = 0
    for first in range(0, num_rows, BLOCKS):
        m = first + tl.arange(0, BLOCKS)
        row = table + (list_head.to(tl.int64) * num_rows + m) * (num_keys + 1)
        x = tl.load(row + n, mask=m < num_rows, other=0)
        all_keys = tl.load(row + num_keys, mask=m < num_rows, other=0)
        visible = (x & 1) != 0
        count = before + tl.cumsum(x & 1, 0)
        at, partial = out + count, (x >> 1) & 1
        tl.store(at, 2 * m + partial, mask=visible)
        if queue is not None:
            place = tl.program_id(0) * (num_rows + 2) + count
            add_to_queue(queue, queue_size, place, 2 * m + partial, visible & (partial != 0))
        rank = (x >> 2) - 1 if FIRST_KEY_FIRST else all_keys - (x >> 2)
        tl.store(at + ranks, rank, mask=visible)
        before += tl.sum(x & 1, 0)
    tl.store(out, before)


@jit
def inside(index, size):
    """Whether `0 <= index < size`."""
    return (index >= 0) & (index < size)


@jit
def floordiv(x, y, NONNEGATIVE: tl.constexpr):
    """Integer division that rounds down; Triton's rounds toward zero."""
    quotient = x // y
    rest = x - quotient * y
    return tl.where((rest != 0) & ((rest ^ y) < 0), quotient - 1, quotient)


@jit
def mod(x, y, NONNEGATIVE: tl.constexpr):
    """The remainder of `floordiv`, which has the divisor's sign."""
    rest = x % y
    return tl.where((rest != 0) & ((rest ^ y) < 0), rest + y, rest)


@jit
def least(x):
    """The minimum of rows `[M]`, or of each block of keys `[LANES, BLOCKS, N / LANES]`."""
    if len(x.shape) == 3:
        x = tl.min(x, axis=2)
    return tl.min(x, axis=0)


@jit
def largest(x):
    """As `least`, the maximum."""
    if len(x.shape) == 3:
        x = tl.max(x, axis=2)
    return tl.max(x, axis=0)


@jit
def least_real(x):
    """As `least`, NaN if any element is."""
    return tl.where(largest((x != x).to(tl.int32)) != 0, float("nan"), least(x))


@jit
def largest_real(x):
    """As `largest`, NaN if any element is."""
    return tl.where(largest((x != x).to(tl.int32)) != 0, float("nan"), largest(x))
