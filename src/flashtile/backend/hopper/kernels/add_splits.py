"""Sum of dk or dv over the programs that share a block of keys, after the fused backward kernel."""

import triton
import triton.language as tl

from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.dependent import launch_dependents, wait_prerequisites
from .shared.padded_rows import RowTensor, feature_mask, stride64


@triton_kernel
def add_splits_kernel(
    splits: Pointer, dx: RowTensor, num_tiles: Scalar, num_heads: Scalar, seqlen: Scalar, columns: Scalar,
    num_splits: Scalar, first_head: Scalar,
    HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dx [B, H, S, D]` from `splits [num_splits * B, H, S, D]`, added in their order. With a `first_head`, some rows
    of some heads.
    """
    wait_prerequisites()
    launch_dependents()
    block, flat_head = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles).to(tl.int64)
    total_heads = (tl.num_programs(0) // num_tiles).to(tl.int64)
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < seqlen
    first = splits + (flat_head * seqlen + row)[:, None] * HEAD_DIM.width
    head = flat_head + first_head
    rows = dx.data + head // num_heads * stride64(dx.stride_b, ALIGN) + head % num_heads * stride64(dx.stride_h, ALIGN)
    rows += row[:, None] * stride64(dx.stride_m, ALIGN)
    for c in tl.static_range(len(HEAD_DIM.chunks)):
        feature = HEAD_DIM.offsets[c] + tl.arange(0, HEAD_DIM.chunks[c])[None, :]
        x = added(first + feature, total_heads * seqlen * HEAD_DIM.width, exists, num_splits)
        tl.store(rows + feature, x.to(dx.data.dtype.element_ty), mask=feature_mask(exists, feature, columns, ALIGN))


@triton.jit
def added(first, stride_split, exists, num_splits):
    """Sum of the splits at `first [N, D]`."""
    x = tl.load(first, mask=exists[:, None], other=0.0)
    for split in range(1, num_splits):
        x += tl.load(first + split * stride_split, mask=exists[:, None], other=0.0)
    return x
