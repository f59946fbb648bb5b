"""Results on their way out: from registers through shared memory to the copy engine; or straight to memory.

Straight, a thread writes two neighbouring features at a time. That is slow beside the copy engine, but needs no shared
memory, and is rare: once for a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ... import tables
from .compat import thread_barrier, tma_store
from .mma import split_columns
from .pipeline import as_matrix, slice_columns

ALIGN = gl.constexpr(tables.ALIGN)


@gluon.jit
def tma_store_columns(desc, out, coord, smem, FIRST: gl.constexpr):
    """Columns of the results from FIRST on, as many at once as there is room for."""
    WIDTH: gl.constexpr = out.shape[1]
    SMEM_COLUMNS: gl.constexpr = smem.shape[-1]
    BOX: gl.constexpr = desc.block_type.shape[-1]
    if WIDTH > SMEM_COLUMNS:
        left, right = split_columns(out)
        tma_store_columns(desc, left, coord, smem, FIRST)
        tma_store_columns(desc, right, coord, smem, FIRST + WIDTH // 2)
    else:
        OFFSET: gl.constexpr = FIRST % SMEM_COLUMNS
        if OFFSET == 0:
            tma.store_wait(0)  # what was there has left
            thread_barrier()
        slice_columns(as_matrix(smem), OFFSET, WIDTH).store(out.to(desc.dtype))
        fence_async_shared()
        for n in gl.static_range(WIDTH // BOX):
            tma_store(desc, coord[:-1] + (FIRST + n * BOX,), slice_columns(smem, OFFSET + n * BOX, BOX))


class OutputTensor(NamedTuple):
    """`[B, H, S, D]` or `[T, H, D]` with contiguous features; strides are in units of ALIGN elements."""

    data: gl.tensor  # pointer
    stride_b: gl.tensor  # 0 where sequences are packed
    stride_h: gl.tensor
    stride_m: gl.tensor


@gluon.jit
def store_accumulators(output, acc, scale, b, head, token, first_row, seqlen, HEAD_DIM: gl.constexpr):
    """Rows `first <= i < stop` of a sequence that begins with a token: `sums` times a scale, by chunks."""
    base = output.data + b.to(gl.int64) * output.stride_b * ALIGN + head.to(gl.int64) * output.stride_h * ALIGN
    for c in gl.static_range(len(acc)):
        store_chunk(output, base, acc[c] * scale, token, first_row, seqlen, HEAD_DIM.offsets[c])


@gluon.jit
def store_chunk(output, base, x, token, first_row, seqlen, FIRST: gl.constexpr):
    """Features from FIRST on."""
    layout: gl.constexpr = x.type.layout
    row = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    rows = base + gl.expand_dims((token + row).to(gl.int64) * output.stride_m * ALIGN, 1)
    exists = gl.expand_dims(row < seqlen, 1)
    gl.store(rows + gl.expand_dims(feature, 0), x.to(output.data.dtype.element_ty), mask=exists)
