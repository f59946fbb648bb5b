"""Row statistics that the backward kernels share: lse, in base 2 or natural, and `delta = sum(dout * out) - dlse`."""

import triton
import triton.language as tl

from .kernel import Pointer, Scalar, kernel
from .parameters import QueryTensor, RowTensor
from .rows import elements, head_pointer, load_rows, row_tile
from .softmax import INFINITY, LOG2E


@kernel
def preprocess_kernel(
    out: QueryTensor, dout: QueryTensor, lse: RowTensor, residual: Pointer, dlse: QueryTensor, row_stats: RowTensor,
    num_tiles: Scalar, num_heads_q: Scalar, total_q: Scalar, DV: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Store `row_stats [B, H, Sq, 2]`, or `[B, H, Sq, 4]` of natural scores."""
    b, head, row, exists = row_tile(num_tiles, num_heads_q, total_q, BLOCK_M)
    out_head, dout_head = head_pointer(out, b, head, ALIGN), head_pointer(dout, b, head, ALIGN)
    out_i = load_rows(out_head + row[:, None] * elements(out.stride_m, ALIGN), exists, DV)
    dout_i = load_rows(dout_head + row[:, None] * elements(dout.stride_m, ALIGN), exists, DV)
    lse_i, delta_i, residual_i = row_statistics(out_i, dout_i, lse, residual, dlse, b, head, row, exists, DV, NATURAL)
    at = b * elements(row_stats.stride_b, 2) + head * elements(row_stats.stride_h, 2) + row * (2 if NATURAL else 1)
    tl.store(row_stats.data + 2 * at, lse_i, mask=exists)
    tl.store(row_stats.data + 2 * at + 1, delta_i, mask=exists)
    if NATURAL:
        tl.store(row_stats.data + 2 * at + 2, residual_i, mask=exists)


@triton.jit
def row_statistics(
    out_i, dout_i, lse, residual, dlse, b, head, row, exists, DV: tl.constexpr, NATURAL: tl.constexpr
):  # fmt: skip
    """lse in base 2, and delta, of rows `[M]`; of natural scores a natural lse, and its residual in base 2. A row
    without keys, or that does not exist, gets an infinite lse, which makes its probabilities 0, and a delta of 0.
    """
    delta = tl.sum(out_i.a.to(tl.float32) * dout_i.a.to(tl.float32), 1)
    if DV.CHUNK_1 > 0:
        delta += tl.sum(out_i.b.to(tl.float32) * dout_i.b.to(tl.float32), 1)
    lse_i = tl.load(head_pointer(lse, b, head, 1) + row, mask=exists, other=-INFINITY)
    if dlse.data is not None:
        dlse_rows = head_pointer(dlse, b, head, 1) + row * elements(dlse.stride_m, 1)
        delta -= tl.load(dlse_rows, mask=exists, other=0.0).to(tl.float32)
    empty = lse_i == -INFINITY
    delta = tl.where(empty, 0.0, delta)
    if NATURAL:
        residual_i = tl.zeros_like(delta)
        if residual is not None:
            of_head = head_pointer(RowTensor(residual, lse.stride_b, lse.stride_h), b, head, 1)
            residual_i = tl.load(of_head + row, mask=exists, other=0.0)
        return tl.where(empty, INFINITY, lse_i), delta, tl.where(empty, 0.0, residual_i * LOG2E)
    else:
        return tl.where(empty, INFINITY, lse_i * LOG2E), delta, 0.0
