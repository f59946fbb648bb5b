"""Rows of float32 numbers in bfloat16 parts, side by side, for kernels that read them many times (`shared.parts`)."""

import triton
import triton.language as tl

from ..shared.compat import Pointer, Scalar, triton_kernel
from ..shared.dependent import launch_dependents
from ..shared.padded_rows import RowTensor, stride64

UPPER, HALF = tl.constexpr(-65536), tl.constexpr(0x8000)  # bits of a bfloat16 number; half a unit in its last place


@triton_kernel
def split_rows_kernel(
    q: RowTensor, k: RowTensor, v: RowTensor, dout: RowTensor, q_parts: Pointer, k_parts: Pointer, v_parts: Pointer,
    dout_parts: Pointer, batch: Scalar, num_heads_q: Scalar, num_heads_k: Scalar, seqlen_q: Scalar, seqlen_k: Scalar,
    columns: Scalar, columns_v: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store the parts of rows `[B, H, S, D]` as `[B, H, S, PARTS, WIDTH]`, with zeros past the last feature. The first
    programs are those of q, then those of k, v and dout, which may be absent.
    """
    launch_dependents()
    tiles_q, tiles_k = tl.cdiv(seqlen_q, CONFIG.block_m), tl.cdiv(seqlen_k, CONFIG.block_m)
    programs_q, programs_k = batch * num_heads_q * tiles_q, batch * num_heads_k * tiles_k
    program = tl.program_id(0)
    if program < programs_q:
        split_tile(q, q_parts, program, num_heads_q, tiles_q, seqlen_q, columns, CONFIG)
    elif program < programs_q + programs_k:
        split_tile(k, k_parts, program - programs_q, num_heads_k, tiles_k, seqlen_k, columns, CONFIG)
    elif program < programs_q + 2 * programs_k:
        split_tile(v, v_parts, program - programs_q - programs_k, num_heads_k, tiles_k, seqlen_k, columns_v, CONFIG)
    elif dout.data is not None:
        program -= programs_q + 2 * programs_k
        split_tile(dout, dout_parts, program, num_heads_q, tiles_q, seqlen_q, columns_v, CONFIG)


@triton.jit
def split_tile(x, parts, program, num_heads, tiles, rows, columns, CONFIG: tl.constexpr):
    """Split some rows of a head. `hi` is truncated, because rounding could make an infinity of a finite number; the
    others are rounded.
    """
    WIDTH: tl.constexpr = CONFIG.head_dim.width
    PARTS: tl.constexpr = CONFIG.head_dim.parts
    ALIGN: tl.constexpr = CONFIG.align
    tile, flat_head = program % tiles, program // tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, d = tile * CONFIG.block_m + tl.arange(0, CONFIG.block_m), tl.arange(0, CONFIG.head_dim.padded_width)[None, :]
    exists = (row < rows)[:, None]
    x_head = x.data + b * stride64(x.stride_b, ALIGN) + head * stride64(x.stride_h, ALIGN)
    x_rows = x_head + row[:, None] * stride64(x.stride_m, ALIGN)
    x_i = tl.load(x_rows + d, mask=exists & (d < columns * ALIGN), other=0.0)
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
