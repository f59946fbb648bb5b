"""Row statistics that the backward kernels share: lse in base 2, and `delta = sum(dout * out) - dlse`."""

import triton.language as tl

from .kernel import Scalar, kernel
from .parameters import QueryTensor, RowTensor
from .rows import elements, head_pointer, load_rows
from .softmax import INFINITY, LOG2E


@kernel
def preprocess_kernel(
    out: QueryTensor, dout: QueryTensor, lse: RowTensor, dlse: QueryTensor, row_stats: RowTensor, num_tiles: Scalar,
    num_heads_q: Scalar, total_q: Scalar, DV: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store `row_stats [B, H, Sq, 2]`. A row without keys gets an infinite lse, which makes its probabilities 0, and a
    delta of 0.
    """
    program = tl.program_id(0)
    tile, head = program % num_tiles, program // num_tiles % num_heads_q
    b = (program // num_tiles // num_heads_q).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < total_q
    out_head, dout_head = head_pointer(out, b, head, ALIGN), head_pointer(dout, b, head, ALIGN)
    out_i = load_rows(out_head + row[:, None] * elements(out.stride_m, ALIGN), exists, DV)
    dout_i = load_rows(dout_head + row[:, None] * elements(dout.stride_m, ALIGN), exists, DV)
    delta = tl.sum(out_i.a.to(tl.float32) * dout_i.a.to(tl.float32), 1)
    if DV.CHUNK_1 > 0:
        delta += tl.sum(out_i.b.to(tl.float32) * dout_i.b.to(tl.float32), 1)
    lse_i = tl.load(head_pointer(lse, b, head, 1) + row, mask=exists, other=-INFINITY)
    if dlse.data is not None:
        dlse_rows = head_pointer(dlse, b, head, 1) + row * elements(dlse.stride_m, 1)
        delta -= tl.load(dlse_rows, mask=exists, other=0.0).to(tl.float32)
    empty = lse_i == -INFINITY
    at = b * elements(row_stats.stride_b, 2) + head * elements(row_stats.stride_h, 2) + row
    tl.store(row_stats.data + 2 * at, tl.where(empty, INFINITY, lse_i * LOG2E), mask=exists)
    tl.store(row_stats.data + 2 * at + 1, tl.where(empty, 0.0, delta), mask=exists)
