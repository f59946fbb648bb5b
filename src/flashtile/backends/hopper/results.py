"""Sums that go from registers to memory: by the threads that have them, so that no shared memory is needed.

A thread writes two neighbouring features at a time. That is slow beside the copy engine, and rare: once for a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import tables

ALIGN = gl.constexpr(tables.ALIGN)


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
