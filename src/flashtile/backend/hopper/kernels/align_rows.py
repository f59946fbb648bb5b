"""A copy of a bias with aligned rows, which TMA can load."""

import triton.language as tl

from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.dependent import launch_dependents
from .shared.padded_rows import RowTensor, stride64


@triton_kernel
def align_rows_kernel(
    x: RowTensor, aligned: Pointer, num_heads: Scalar, rows: Scalar, keys: Scalar, pitch: Scalar, row_tiles: Scalar,
    key_tiles: Scalar,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store `x [B, H, rows, keys]` in `aligned [B, H, rows, pitch]`, with zeros after the keys. Elements are as many
    bytes of a row as divide all addresses of `x`. Stores of 16 bytes would leave each thread loads far from its
    neighbors' ones.
    """
    launch_dependents()
    key_tile, program = tl.program_id(0) % key_tiles, tl.program_id(0) // key_tiles
    row_tile, flat_head = program % row_tiles, (program // row_tiles).to(tl.int64)
    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    key = (key_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    source = x.data + flat_head // num_heads * stride64(x.stride_b, 1) + flat_head % num_heads * stride64(x.stride_h, 1)
    exists = row < rows
    values = tl.load(source + row * stride64(x.stride_m, 1) + key, mask=exists & (key < keys), other=0)
    tl.store(aligned + (flat_head * rows + row) * pitch + key, values, mask=exists & (key < pitch))
