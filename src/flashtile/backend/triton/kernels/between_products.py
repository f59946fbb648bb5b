"""Probabilities and gradients of scores, between matrix products that PyTorch computes. A program has a row.

With `PARTS` they are stored in bfloat16 parts (`signed_split`), else in the dtype of their memory and laid out as the
scores, whose memory they may have. A row has `NUM_BLOCKS` blocks of `WIDTH` keys, a power of two.
"""

import triton
import triton.language as tl

from .kernel import Pointer, Scalar, kernel
from .products import MAX_FLOAT
from .rows import elements, load_row_stats
from .signed_split import store_parts
from .softmax import INFINITY, LN2

UNIT = tl.constexpr(16)  # of strides in elements


@triton.jit
def subtrahend(m):
    """A finite number near a maximum of scores."""
    return tl.minimum(tl.maximum(m, -MAX_FLOAT), MAX_FLOAT)


@kernel
def softmax_kernel(
    s: Pointer, p: Pointer, lse: Pointer, divisors: Pointer, factor: Scalar, rows: Scalar, keys: Scalar,
    stride_s: Scalar, padded_keys: Scalar, first: Scalar, stride_lse: Scalar, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the probabilities of scores `[heads, rows, keys]` and `lse`; parts are `[heads, rows, chunks, 3, CHUNK]`.
    `factor` makes base-2 logarithms of scores. With `divisors`, which are stored, probabilities have yet to be divided.
    """
    at = tl.program_id(0).to(tl.int64)
    row = first + at // rows * stride_lse + at % rows
    m, l = -INFINITY, 0.0  # noqa: E741
    for n in tl.static_range(NUM_BLOCKS):
        key = n * WIDTH + tl.arange(0, WIDTH)
        x = tl.load(s + at * elements(stride_s, UNIT) + key, mask=key < stride_s * UNIT, other=0.0)  # whole vectors
        # As in `softmax`: the subtrahend is finite and whole, and NaN reaches the sum.
        row_max = tl.maximum(m, tl.ceil(tl.max(tl.where(key < keys, x * factor, -INFINITY), 0)))
        shift = subtrahend(row_max)
        p_i = tl.where(key < keys, tl.exp2(x * factor - shift), 0.0)
        l = l * tl.exp2(subtrahend(m) - shift) + tl.sum(p_i, 0)  # noqa: E741
        m = row_max
    divisor = tl.where(l == INFINITY, float("nan"), tl.where(l == 0, 1.0, l))
    tl.store(lse + row, (m + tl.log2(tl.where(l == 0, 1.0, l))) * LN2)
    weight = 1.0 / divisor
    if divisors is not None:
        tl.store(divisors + row, divisor)
        weight = 1.0
    for n in tl.static_range(NUM_BLOCKS):
        key = n * WIDTH + tl.arange(0, WIDTH)
        if NUM_BLOCKS > 1:
            x = tl.load(s + at * elements(stride_s, UNIT) + key, mask=key < stride_s * UNIT, other=0.0)
            p_i = tl.where(key < keys, tl.exp2(x * factor - subtrahend(m)), 0.0)
        if PARTS:
            p_rows = p + at * (3 * elements(padded_keys, UNIT)) + key // CHUNK * (3 * CHUNK) + key % CHUNK
            store_parts(p_rows, CHUNK, p_i * weight, key < padded_keys * UNIT)
        else:
            tl.store(p + at * elements(stride_s, UNIT) + key, p_i * weight, mask=key < stride_s * UNIT)


@kernel
def gradient_kernel(
    s: Pointer, dp: Pointer, row_stats: Pointer, p_t: Pointer, ds_t: Pointer, ds: Pointer, factor: Scalar,
    rows: Scalar, padded_rows: Scalar, keys: Scalar, stride_s: Scalar, padded_keys: Scalar, first: Scalar,
    stride_row_stats: Scalar, ROW_CHUNK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store probabilities and gradients of scores `[heads, rows, keys]`: in parts for sums over rows `p_t` and `ds_t`,
    `[heads, chunks, 3, ROW_CHUNK, keys]` with zeros past the last row, and `ds`, as `softmax_kernel` stores
    probabilities. Those that are `None` are left out. Without `PARTS` there are `p_t` and `ds`.
    """
    head, row = (tl.program_id(0) // padded_rows).to(tl.int64), tl.program_id(0) % padded_rows
    lse_i, delta_i = load_row_stats(row_stats + first + head * stride_row_stats + row, row < rows)
    for n in tl.static_range(NUM_BLOCKS):
        key = n * WIDTH + tl.arange(0, WIDTH)
        exists = key < tl.where(row < rows, keys, 0)
        at = (head * rows + row) * elements(stride_s, UNIT) + key
        within = key < tl.where(row < rows, stride_s * UNIT, 0)  # whole vectors
        p_i = tl.exp2(tl.load(s + at, mask=within, other=0.0) * factor - lse_i)
        ds_i = p_i * (tl.load(dp + at, mask=within, other=0.0) - delta_i)
        p_i, ds_i = tl.where(exists, p_i, 0.0), tl.where(exists, ds_i, 0.0)
        if not PARTS:
            tl.store(p_t + at, p_i, mask=within)
            tl.store(ds + at, ds_i, mask=within)
        else:
            chunk = head * padded_rows + row // ROW_CHUNK * ROW_CHUNK
            to = (chunk * 3 + row % ROW_CHUNK) * elements(stride_s, UNIT) + key
            step = ROW_CHUNK * elements(stride_s, UNIT)
            if p_t is not None:
                store_parts(p_t + to, step, p_i, key < stride_s * UNIT)
            if ds_t is not None:
                store_parts(ds_t + to, step, ds_i, key < stride_s * UNIT)
            if ds is not None:
                to = (head * rows + row) * (3 * elements(padded_keys, UNIT)) + key // CHUNK * (3 * CHUNK) + key % CHUNK
                store_parts(ds + to, CHUNK, ds_i, key < tl.where(row < rows, padded_keys * UNIT, 0))
