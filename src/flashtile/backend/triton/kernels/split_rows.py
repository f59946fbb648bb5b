"""Rows of float32 numbers in three bfloat16 parts, side by side."""

import triton
import triton.language as tl

from .kernel import Scalar, kernel
from .parameters import QueryTensor
from .rows import elements, head_pointer, load_rows, row_tile
from .split import split


@kernel
def split_rows_kernel(
    x: QueryTensor, parts: QueryTensor, num_tiles: Scalar, num_heads: Scalar, rows: Scalar, D: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the parts of rows, each of `D.CHUNK_0 + D.CHUNK_1` features with zeros past `D.WIDTH`."""
    b, head, row, exists = row_tile(num_tiles, num_heads, rows, BLOCK_M)
    x_i = load_rows(head_pointer(x, b, head, ALIGN) + row[:, None] * elements(x.stride_m, ALIGN), exists, D)
    to = head_pointer(parts, b, head, ALIGN) + row[:, None] * elements(parts.stride_m, ALIGN)
    store_parts(to, x_i.a, exists, 0, D.CHUNK_0, D)
    if D.CHUNK_1 > 0:
        store_parts(to, x_i.b, exists, D.CHUNK_0, D.CHUNK_1, D)


@triton.jit
def store_parts(pointers, x, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    W: tl.constexpr = D.CHUNK_0 + D.CHUNK_1
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    parts = split(tl.where(x == x, x, float("nan")))  # truncation may make an infinity of another NaN
    tl.store(pointers + d, parts.hi, mask=exists[:, None])
    tl.store(pointers + d + W, parts.mid, mask=exists[:, None])
    tl.store(pointers + d + 2 * W, parts.low, mask=exists[:, None])
