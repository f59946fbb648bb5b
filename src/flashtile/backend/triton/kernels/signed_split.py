"""Operands of matrix products that PyTorch computes: float32 numbers in bfloat16 parts, and what lies between products.

`x = hi + mid + low` as in `split`, but no sum of a product's parts can be checked before it is complete. So all parts
have the sign of `x`, are 0 only if `x` is, and are `x` itself if it is not finite: then all products of parts of two
numbers are infinities of one sign, or NaN, where the product of the numbers is.

A product over `n` is `[hi, mid, low] @ [low, mid, hi]` over `3 * n`, `[hi, mid] @ [mid, hi]` over `2 * n` and
`[hi] @ [hi]`: parts of one operand are stored in the order of the other's, reversed.
"""

import triton
import triton.language as tl

from .kernel import Pointer, Scalar, kernel
from .parameters import QueryTensor
from .products import MAX_FLOAT
from .rows import elements, head_pointer, load_row_stats
from .softmax import INFINITY, LN2
from .split import UPPER, Split, upper_half

UNIT = tl.constexpr(16)  # of strides in elements
SIGN, EXPONENT, NAN = tl.constexpr(-(2**31)), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)  # bits
LEAST = tl.constexpr(0x00800000)  # the smallest normal number


@triton.jit
def signed_split(x):
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN)
    rest = x - (bits & UPPER).to(tl.float32, bitcast=True)
    mid = rest.to(tl.int32, bitcast=True) & UPPER
    low = (rest - mid.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) & UPPER
    least = tl.where(x == 0, 0, (bits & SIGN) | LEAST)
    finite = (bits & EXPONENT) != EXPONENT
    mid = tl.where(finite, tl.where(mid == 0, least, mid), bits)
    low = tl.where(finite, tl.where(low == 0, least, low), bits)
    return Split(upper_half(bits), upper_half(mid), upper_half(low))


@triton.jit
def store_parts(pointers, step, x, exists):
    """Store the parts of `x`, `step` elements apart."""
    parts = signed_split(x)
    tl.store(pointers, parts.hi, mask=exists)
    tl.store(pointers + step, parts.mid, mask=exists)
    tl.store(pointers + 2 * step, parts.low, mask=exists)


@kernel
def operand_kernel(
    x: QueryTensor, operand: Pointer, num_heads: Scalar, rows: Scalar, padded_rows: Scalar, D: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ORDER: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store parts of rows `x [B, H, rows, D]` in an order, of indices in a `Split`: of each `CHUNK` rows one part after
    another, `[B * H, chunks, parts, CHUNK, D]`, with zeros past the last row. With chunks of one row they lie side by
    side. `WIDTH` is a power of two.
    """
    tiles = tl.cdiv(padded_rows, BLOCK_M)
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, WIDTH)[None, :]
    x_rows = head_pointer(x, (at // num_heads).to(tl.int64), at % num_heads, ALIGN) + row[:, None] * elements(
        x.stride_m, ALIGN
    )
    parts = signed_split(tl.load(x_rows + d, mask=(row < rows)[:, None] & (d < D), other=0.0))
    PARTS: tl.constexpr = len(ORDER)
    first = at.to(tl.int64) * padded_rows + row // CHUNK * CHUNK  # [M] of the row's chunk
    to = operand + (first * PARTS + row % CHUNK)[:, None] * D + d
    for n in tl.static_range(PARTS):
        tl.store(to + n * (CHUNK * D), parts[ORDER[n]], mask=(row < padded_rows)[:, None] & (d < D))


@kernel
def softmax_kernel(
    s: Pointer, p: Pointer, lse: Pointer, factor: Scalar, rows: Scalar, keys: Scalar, stride_s: Scalar,
    padded_keys: Scalar, first: Scalar, stride_lse: Scalar, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store the probabilities `[heads, rows, chunks, 3, CHUNK]` of scores `[heads, rows, keys]`, and `lse`. A program
    has a row. `factor` makes base-2 logarithms of scores. Without `PARTS` probabilities are laid out as the scores,
    whose memory they may have.
    """
    at = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, WIDTH)
    x = tl.load(s + at * elements(stride_s, UNIT) + key, mask=key < stride_s * UNIT, other=0.0)  # whole vectors
    # As in `softmax`: the subtrahend is finite and whole, and NaN reaches the sum.
    m = tl.ceil(tl.max(tl.where(key < keys, x * factor, -INFINITY), 0))
    shift = tl.minimum(tl.maximum(m, -MAX_FLOAT), MAX_FLOAT)
    p_i = tl.where(key < keys, tl.exp2(x * factor - shift), 0.0)
    l = tl.sum(p_i, 0)  # noqa: E741
    weight = tl.where(l == INFINITY, float("nan"), 1.0 / tl.where(l == 0, 1.0, l))
    lse_i = (m + tl.log2(tl.where(l == 0, 1.0, l))) * LN2
    tl.store(lse + first + at // rows * stride_lse + at % rows, lse_i)
    if PARTS:
        p_rows = p + at * (3 * elements(padded_keys, UNIT)) + key // CHUNK * (3 * CHUNK) + key % CHUNK
        store_parts(p_rows, CHUNK, p_i * weight, key < padded_keys * UNIT)
    else:
        tl.store(p + at * elements(stride_s, UNIT) + key, p_i * weight, mask=key < stride_s * UNIT)


@kernel
def gradient_kernel(
    s: Pointer, dp: Pointer, row_stats: Pointer, p_t: Pointer, ds_t: Pointer, ds: Pointer, factor: Scalar,
    rows: Scalar, padded_rows: Scalar, keys: Scalar, stride_s: Scalar, padded_keys: Scalar, first: Scalar,
    stride_row_stats: Scalar, ROW_CHUNK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store probabilities and gradients of scores `[heads, rows, keys]`: for sums over rows `p_t` and `ds_t`,
    `[heads, chunks, 3, ROW_CHUNK, keys]` with zeros past the last row, and `ds`, as `softmax_kernel` stores
    probabilities. Those that are `None` are left out. A program has a row. Without `PARTS` there are `p_t` and `ds`,
    both laid out as the scores, whose memory they may have.
    """
    head, row = (tl.program_id(0) // padded_rows).to(tl.int64), tl.program_id(0) % padded_rows
    key = tl.arange(0, WIDTH)
    exists = key < tl.where(row < rows, keys, 0)
    at = (head * rows + row) * elements(stride_s, UNIT) + key
    lse_i, delta_i = load_row_stats(row_stats + first + head * stride_row_stats + row, row < rows)
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
