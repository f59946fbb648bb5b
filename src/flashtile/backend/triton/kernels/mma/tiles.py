"""Tiles of chips whose matrix units take their operands from registers (mma.sync), in Gluon: rows in shared memory,
which copies fill while others are used, and products that read their operands from there a step at a time.

Triton would keep the fragments of a loop's invariants in registers, which have no room for them. One set of functions
of scores and masks serves these kernels and the ones in Triton's own language: called from Gluon, they compute in its
layouts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..rows import Chunks

K_STEP = gl.constexpr(16)  # of a 16-bit product
# Triton 3.9 has another name for it.
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Visit(NamedTuple):
    """A visit to a block."""

    start: tl.tensor
    masked: tl.tensor  # whether some of its pairs are hidden


@dataclass(frozen=True)
class Layouts:
    """Layouts of a program."""

    pairs: Any  # and sums of the block that a program owns
    rows: Any  # sums of a block of rows
    copies: Any  # of rows to and from memory
    numbers: Any  # one a thread


@constexpr_function
def layouts_of(down, of_rows, D, WARPS):
    """Products of pairs with so many warps below each other, and those of sums of rows with `of_rows`."""
    across = min(32, padded(D) // 8)  # threads that copy a row, 16 bytes each
    return Layouts(
        products_layout(down, WARPS),
        products_layout(of_rows, WARPS),
        gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0]),
        gl.BlockedLayout([1], [32], [WARPS], [0]),
    )


@constexpr_function
def products_layout(down, WARPS):
    """With so many warps below each other."""
    return gl.NVMMADistributedLayout([2, 0], [down, WARPS // down], [16, 8])


@constexpr_function
def padded(D):
    """The columns of shared memory."""
    return D.CHUNK_0 if D.CHUNK_1 == 0 else 2 * D.CHUNK_0


@constexpr_function
def swizzled(columns):
    """Rows of 16-bit numbers without bank conflicts: of 128 bytes, eight rows have their vectors in other orders."""
    rows = max(1, 64 // columns)
    return gl.SwizzledSharedLayout(8, rows, max(1, 8 // rows), [1, 0])


@constexpr_function
def plain():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def visit(blocks, first, n, num_masked, params, M: gl.constexpr):
    """The n-th visit: in order, or by the list, which names those first that need masks."""
    if params.lists.data is None:
        start = blocks.lo + n * M
        return Visit(start, (start < blocks.full_lo) | (start >= blocks.full_hi))
    else:
        return Visit(gl.load(first + n) * M, n < num_masked)


@gluon.jit
def copy_rows(buffer, x, first, seqlen, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """Begin to load rows; those that do not exist are 0, and features past the last one."""
    row = first + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUTS.copies))
    d = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, LAYOUTS.copies))
    pointers = (x.data + row * x.stride)[:, None] + d[None, :]
    mask = (row < seqlen)[:, None] & (d < D.WIDTH)[None, :]
    begin_copy(buffer, pointers, mask=mask)


@gluon.jit
def inner_products(x, y, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """`x [N, D] @ y [M, D]^T`."""
    acc = gl.full([x.shape[0], y.shape[0]], 0.0, gl.float32, LAYOUTS.pairs)
    return multiply(acc, x, y.permute((1, 0)), (D.WIDTH + K_STEP - 1) // K_STEP)


@gluon.jit
def add_product(acc, x, y, D: gl.constexpr):
    """`acc [N, D] + x [N, M] @ y [M, D]`."""
    STEPS: gl.constexpr = x.shape[1] // K_STEP
    a = multiply(acc.a, x, y.slice(0, D.CHUNK_0, dim=1), STEPS)
    if D.CHUNK_1 == 0:
        return Chunks(a, 0.0)
    else:
        return Chunks(a, multiply(acc.b, x, y.slice(D.CHUNK_0, D.CHUNK_1, dim=1), STEPS))


@gluon.jit
def multiply(acc, x, y, STEPS: gl.constexpr):
    """`acc + x @ y`, a step at a time: fragments take few registers."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    for n in gl.static_range(STEPS):
        left = x.slice(n * K_STEP, K_STEP, dim=1).load(LEFT)
        right = y.slice(n * K_STEP, K_STEP, dim=0).load(RIGHT)
        acc = mma_v2(left, right, acc)
    return acc


@gluon.jit
def zeros(N: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Empty sums `[N, D]`."""
    a = gl.full([N, D.CHUNK_0], 0.0, gl.float32, LAYOUT)
    if D.CHUNK_1 == 0:
        return Chunks(a, 0.0)
    else:
        return Chunks(a, gl.full([N, D.CHUNK_1], 0.0, gl.float32, LAYOUT))


@gluon.jit
def store_rows(x, first, seqlen, sums, factor, D: gl.constexpr, LAYOUTS: gl.constexpr):
    """Store those rows `[N, D]` that exist, times `factor`, a number or `[N, 1]`."""
    store_chunk(x, first, seqlen, sums.a, factor, 0, D, LAYOUTS)
    if D.CHUNK_1 > 0:
        store_chunk(x, first, seqlen, sums.b, factor, D.CHUNK_0, D, LAYOUTS)


@gluon.jit
def store_chunk(x, first, seqlen, sums, factor, FIRST: gl.constexpr, D: gl.constexpr, LAYOUTS: gl.constexpr):
    values = gl.convert_layout((sums * factor).to(x.data.dtype.element_ty), LAYOUTS.copies)
    row = first + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUTS.copies))
    d = FIRST + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUTS.copies))
    pointers = (x.data + row * x.stride)[:, None] + d[None, :]
    gl.store(pointers, values, mask=(row < seqlen)[:, None] & (d < D.WIDTH)[None, :])
