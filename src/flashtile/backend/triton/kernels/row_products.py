"""Products of rows: `<x, y>` of each row of two tensors of the same shape."""

import triton.language as tl

from .kernel import Scalar, kernel
from .parameters import QueryTensor, RowTensor
from .rows import elements, head_pointer, load_rows, row_tile


@kernel
def row_products_kernel(
    x: QueryTensor, y: QueryTensor, product: RowTensor, num_tiles: Scalar, num_heads_q: Scalar, total_q: Scalar,
    D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store `product [B, H, S]`, fp32, or `[H, T]` of packed rows."""
    b, head, row, exists = row_tile(num_tiles, num_heads_q, total_q, BLOCK_M)
    x_i = load_rows(head_pointer(x, b, head, ALIGN) + row[:, None] * elements(x.stride_m, ALIGN), exists, D)
    y_i = load_rows(head_pointer(y, b, head, ALIGN) + row[:, None] * elements(y.stride_m, ALIGN), exists, D)
    total = tl.sum(x_i.a.to(tl.float32) * y_i.a.to(tl.float32), 1)
    if D.CHUNK_1 > 0:
        total += tl.sum(x_i.b.to(tl.float32) * y_i.b.to(tl.float32), 1)
    tl.store(head_pointer(product, b, head, 1) + row, total, mask=exists)
