"""Stores of accumulators: through shared memory by TMA, or directly from registers.

A direct store writes two adjacent features of a thread at a time. It is slower than TMA, but needs no shared memory and
happens once for a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ... import tile_config
from .compat import Pointer, Scalar, thread_barrier, tma_reduce_add, tma_store
from .mma import split_columns
from .pipeline import as_matrix, slice_columns

ALIGN = gl.constexpr(tile_config.ALIGN)


@gluon.jit
def tma_store_columns(desc, out, coord, smem, FIRST: gl.constexpr, ADD: gl.constexpr = False):
    """Store or add (ADD) columns from FIRST on by TMA, as many at a time as the staging buffer holds."""
    WIDTH: gl.constexpr = out.shape[1]
    SMEM_COLUMNS: gl.constexpr = smem.shape[-1]
    BOX: gl.constexpr = desc.block_type.shape[-1]
    if WIDTH > SMEM_COLUMNS:
        left, right = split_columns(out)
        tma_store_columns(desc, left, coord, smem, FIRST, ADD)
        tma_store_columns(desc, right, coord, smem, FIRST + WIDTH // 2, ADD)
    else:
        OFFSET: gl.constexpr = FIRST % SMEM_COLUMNS
        if OFFSET == 0:
            tma.store_wait(0)  # TMA has read the previous contents
            thread_barrier()
        slice_columns(as_matrix(smem), OFFSET, WIDTH).store(out.to(desc.dtype))
        fence_async_shared()
        for n in gl.static_range(max(WIDTH // BOX, 1)):  # TMA does not store columns past the head dimension
            box_coord = coord[:-1] + (FIRST + n * BOX,)
            box = slice_columns(smem, OFFSET + n * BOX, BOX)
            if ADD:
                tma_reduce_add(desc, box_coord, box)
            else:
                tma_store(desc, box_coord, box)


class OutputTensor(NamedTuple):
    """`[B, H, S, D]` or `[T, H, D]` with contiguous features; strides are in units of ALIGN elements."""

    data: Pointer
    stride_b: Scalar  # 0 if packed
    stride_h: Scalar
    stride_m: Scalar


@gluon.jit
def store_accumulators(output, columns, acc, scale, b, head, token, first_row, seqlen, HEAD_DIM: gl.constexpr):
    """Store `acc * scale`, one accumulator for each chunk, to rows `first_row <= row < seqlen` of a sequence. `columns`
    is the head dimension in units of ALIGN, or `None` where it is the kernel's.
    """
    base = output.data + b.to(gl.int64) * output.stride_b * ALIGN + head.to(gl.int64) * output.stride_h * ALIGN
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        store_chunk(output, columns, base, acc[c] * scale, token, first_row, seqlen, HEAD_DIM.offsets[c])


@gluon.jit
def store_chunk(output, columns, base, x, token, first_row, seqlen, FIRST: gl.constexpr):
    """Store features from FIRST on."""
    layout: gl.constexpr = x.type.layout
    row = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    rows = base + gl.expand_dims((token + row).to(gl.int64) * output.stride_m * ALIGN, 1)
    exists = gl.expand_dims(row < seqlen, 1)
    if columns is not None:
        exists = exists & gl.expand_dims(feature < columns * ALIGN, 0)
    gl.store(rows + gl.expand_dims(feature, 0), x.to(output.data.dtype.element_ty), mask=exists)
