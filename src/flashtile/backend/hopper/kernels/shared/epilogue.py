"""Results on their way out: from registers through shared memory to the copy engine; or straight to memory.

Straight, a thread writes two neighbouring features at a time. That is slow beside the copy engine, but needs no shared
memory, and is rare: once for a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ... import tables
from .chunks import halves
from .pipeline import as_matrix, columns_of
from .versions import store_box, thread_barrier

ALIGN = gl.constexpr(tables.ALIGN)


@gluon.jit
def store_columns(desc, out, at, staged, FIRST: gl.constexpr):
    """Columns of the results from FIRST on, as many at once as there is room for."""
    WIDTH: gl.constexpr = out.shape[1]
    ROOM: gl.constexpr = staged.shape[-1]
    BOX: gl.constexpr = desc.block_type.shape[-1]
    if WIDTH > ROOM:
        left, right = halves(out)
        store_columns(desc, left, at, staged, FIRST)
        store_columns(desc, right, at, staged, FIRST + WIDTH // 2)
    else:
        PLACE: gl.constexpr = FIRST % ROOM
        if PLACE == 0:
            tma.store_wait(0)  # what was there has left
            thread_barrier()
        columns_of(as_matrix(staged), PLACE, WIDTH).store(out.to(desc.dtype))
        fence_async_shared()
        for n in gl.static_range(WIDTH // BOX):
            store_box(desc, at[:-1] + (FIRST + n * BOX,), columns_of(staged, PLACE + n * BOX, BOX))


class Result(NamedTuple):
    """`[B, H, S, D]` or `[T, H, D]` with contiguous features; strides are in units of ALIGN elements."""

    data: gl.tensor  # pointer
    stride_b: gl.tensor  # 0 where sequences are packed
    stride_h: gl.tensor
    stride_m: gl.tensor


@gluon.jit
def store_sums(result, sums, scale, b, head, token, first, stop, HEAD_DIM: gl.constexpr):
    """Rows `first <= i < stop` of a sequence that begins with a token: `sums` times a scale, by chunks."""
    start = result.data + b.to(gl.int64) * result.stride_b * ALIGN + head.to(gl.int64) * result.stride_h * ALIGN
    for c in gl.static_range(len(sums)):
        store_chunk(result, start, sums[c] * scale, token, first, stop, HEAD_DIM.starts[c])


@gluon.jit
def store_chunk(result, start, x, token, first, stop, FIRST: gl.constexpr):
    """Features from FIRST on."""
    layout: gl.constexpr = x.type.layout
    row = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    rows = start + gl.expand_dims((token + row).to(gl.int64) * result.stride_m * ALIGN, 1)
    exists = gl.expand_dims(row < stop, 1)
    gl.store(rows + gl.expand_dims(feature, 0), x.to(result.data.dtype.element_ty), mask=exists)
