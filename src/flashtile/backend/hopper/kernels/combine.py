"""Merge of the results of split keys (Dao et al., "Flash-Decoding", 2023), after the forward kernel.

The splits are merged in their order: the same call gives the same bits.
"""

import triton
import triton.language as tl

from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.padded_rows import RowTensor, feature_mask, stride64
from .shared.softmax import INFINITY, LN2, LOG2E


@triton_kernel
def combine_kernel(
    partial_out: Pointer, partial_lse: Pointer, partial_residual: Pointer, out: RowTensor, lse: Pointer,
    residual: Pointer, num_tiles: Scalar, num_heads: Scalar, total_heads: Scalar, seqlen_q: Scalar, columns: Scalar,
    num_splits: Scalar,
    HEAD_DIM_V: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]` and `lse [B, H, Sq]`, with its residual or without, from those of each split, weighted by
    their log-sum-exp.

    A split without visible keys holds 0 and an lse of -inf.
    """
    block, flat_head = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < seqlen_q
    first = flat_head * seqlen_q + row
    stride_split = total_heads.to(tl.int64) * seqlen_q
    row_max = tl.full([BLOCK_M], -INFINITY, tl.float32)
    for split in range(num_splits):
        row_max = tl.maximum(row_max, tl.load(partial_lse + split * stride_split + first, mask=exists, other=0.0))
    total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(num_splits):
        total += weight_of(partial_lse, partial_residual, split * stride_split + first, row_max, exists)
    lse_i = row_max + tl.log2(total) * LN2
    tl.store(lse + first, lse_i, mask=exists)
    if residual is not None:
        lost = (row_max - lse_i) + tl.log2(total) * LN2
        tl.store(residual + first, tl.where(tl.abs(lse_i) == INFINITY, 0.0, lost), mask=exists)
    out_head = out.data + flat_head // num_heads * stride64(out.stride_b, ALIGN)
    out_head += flat_head % num_heads * stride64(out.stride_h, ALIGN)
    for c in tl.static_range(len(HEAD_DIM_V.chunks)):
        feature = HEAD_DIM_V.offsets[c] + tl.arange(0, HEAD_DIM_V.chunks[c])[None, :]
        x = partial_out + feature
        acc = merged(
            x, partial_lse, partial_residual, first, stride_split, row_max, exists, num_splits, HEAD_DIM_V.width
        )
        acc = (acc / total[:, None]).to(out.data.dtype.element_ty)
        out_rows = out_head + row[:, None] * stride64(out.stride_m, ALIGN)
        tl.store(out_rows + feature, acc, mask=feature_mask(exists, feature, columns, ALIGN))


@triton.jit
def merged(
    partial_out, partial_lse, partial_residual, first, stride_split, row_max, exists, num_splits, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum of the splits' rows, `[M, D]`, with their weights."""
    x = tl.load(partial_out + first[:, None] * WIDTH, mask=exists[:, None], other=0.0)
    acc = weight_of(partial_lse, partial_residual, first, row_max, exists)[:, None] * x
    for split in range(1, num_splits):
        rows = split * stride_split + first
        x = tl.load(partial_out + rows[:, None] * WIDTH, mask=exists[:, None], other=0.0)
        acc += weight_of(partial_lse, partial_residual, rows, row_max, exists)[:, None] * x
    return acc


@triton.jit
def weight_of(partial_lse, partial_residual, rows, row_max, exists):
    """Weights of one split's rows. Equal infinities have no difference."""
    x = tl.load(partial_lse + rows, mask=exists, other=0.0)
    if partial_residual is None:
        return tl.where(x == row_max, 1.0, tl.exp2((x - row_max) * LOG2E))
    else:
        difference = tl.where(x == row_max, 0.0, x - row_max)
        return tl.exp2((difference + tl.load(partial_residual + rows, mask=exists, other=0.0)) * LOG2E)
