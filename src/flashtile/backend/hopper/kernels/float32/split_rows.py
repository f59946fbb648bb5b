"""Rows of float32 numbers in bfloat16 parts, side by side, for kernels that read them many times (`shared.parts`)."""

import triton
import triton.language as tl

from ..shared.compat import triton_kernel
from ..shared.padded_rows import stride64

UPPER, HALF = tl.constexpr(-65536), tl.constexpr(0x8000)  # bits of a bfloat16 number; half a unit in its last place


@triton_kernel
def split_rows_kernel(
    x, parts, stride_x_b, stride_x_h, stride_x_m, num_tiles, num_heads, rows, columns,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the parts of rows `x [B, H, rows, D]` as `[B, H, rows, PARTS, WIDTH]`, with zeros past the last feature.

    `hi` is truncated, because rounding could make an infinity of a finite number; the others are rounded.
    """
    tile, flat_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    exists = (row < rows)[:, None]
    base = x + b * stride64(stride_x_b, ALIGN) + head * stride64(stride_x_h, ALIGN)
    x_i = tl.load(base + row[:, None] * stride64(stride_x_m, ALIGN) + d, mask=exists & (d < columns * ALIGN), other=0.0)
    x_i = tl.where(x_i == x_i, x_i, float("nan"))  # truncation may make an infinity of another NaN
    to = parts + (flat_head.to(tl.int64) * rows + row)[:, None] * (PARTS * WIDTH) + d
    stored = exists & (d < WIDTH)
    bits = x_i.to(tl.int32, bitcast=True)
    tl.store(to, upper_half(bits), mask=stored)
    for n in tl.static_range(1, PARTS):
        x_i = x_i - (bits & UPPER).to(tl.float32, bitcast=True)
        bits = x_i.to(tl.int32, bitcast=True) + HALF
        tl.store(to + n * WIDTH, upper_half(bits), mask=stored)


@triton.jit
def upper_half(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
