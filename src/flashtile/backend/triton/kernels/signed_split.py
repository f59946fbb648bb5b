"""Operands of matrix products that PyTorch computes: float32 numbers in bfloat16 parts.

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
from .rows import elements, head_pointer
from .split import UPPER, Split, upper_half

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
