"""Row statistics that the backward kernels share: lse in base 2, and `delta = sum(dout * out) - dlse`."""

import triton
import triton.language as tl

from .kernel import Scalar, kernel
from .parameters import QueryTensor, RowTensor
from .rows import elements, head_pointer, load_rows, row_tile
from .softmax import INFINITY, LOG2E


@kernel
def preprocess_kernel(
    out: QueryTensor, dout: QueryTensor, lse: RowTensor, dlse: QueryTensor, row_stats: RowTensor, num_tiles: Scalar,
    num_heads_q: Scalar, total_q: Scalar, DV: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store `row_stats [B, H, Sq, 2]`."""
    b, head, row, exists = row_tile(num_tiles, num_heads_q, total_q, BLOCK_M)
    out_head, dout_head = head_pointer(out, b, head, ALIGN), head_pointer(dout, b, head, ALIGN)
    out_i = load_rows(out_head + row[:, None] * elements(out.stride_m, ALIGN), exists, DV)
    dout_i = load_rows(dout_head + row[:, None] * elements(dout.stride_m, ALIGN), exists, DV)
    lse_i, delta_i = row_statistics(out_i, dout_i, lse, dlse, b, head, row, exists, DV)
    at = b * elements(row_stats.stride_b, 2) + head * elements(row_stats.stride_h, 2) + row
    tl.store(row_stats.data + 2 * at, lse_i, mask=exists)
    tl.store(row_stats.data + 2 * at + 1, delta_i, mask=exists)


@triton.jit
def row_statistics(out_i, dout_i, lse, dlse, b, head, row, exists, DV: tl.constexpr):
    """lse in base 2, and delta, of rows `[M]`. A row without keys, or that does not exist, gets an infinite lse, which
    makes its probabilities 0, and a delta of 0.
    """
    delta = tl.sum(out_i.a.to(tl.float32) * dout_i.a.to(tl.float32), 1)
    if DV.CHUNK_1 > 0:
        delta += tl.sum(out_i.b.to(tl.float32) * dout_i.b.to(tl.float32), 1)
    lse_i = tl.load(head_pointer(lse, b, head, 1) + row, mask=exists, other=-INFINITY)
    if dlse.data is not None:
        dlse_rows = head_pointer(dlse, b, head, 1) + row * elements(dlse.stride_m, 1)
        delta -= tl.load(dlse_rows, mask=exists, other=0.0).to(tl.float32)
    empty = lse_i == -INFINITY
    return tl.where(empty, INFINITY, lse_i * LOG2E), tl.where(empty, 0.0, delta)
