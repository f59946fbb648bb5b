"""Merge of the results of split keys for few rows: a program for some columns of each row, which reads several splits
at once. `kernels.combine`, for blocks of rows, reads one after another.

Sums are in a fixed order: the same call gives the same bits.
"""

import triton
import triton.language as tl

from ..shared.compat import Pointer, Scalar, triton_kernel
from ..shared.padded_rows import RowTensor, stride64
from ..shared.softmax import INFINITY, LN2, LOG2E


@triton_kernel
def merge_kernel(
    partial_out: Pointer, partial_lse: Pointer, out: RowTensor, lse: Pointer, num_heads: Scalar, seqlen_q: Scalar,
    total_rows: Scalar, num_splits: Scalar, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, Dv]` and `lse [B, H, Sq]` from those of each split, weighted by their log-sum-exp; SPLITS of them
    at once. A split without visible keys holds 0 and an lse of -inf.
    """
    PARTS: tl.constexpr = WIDTH // COLUMNS
    part, row = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    feature = part * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.full([SPLITS], -INFINITY, tl.float32)
    for first in range(0, num_splits, SPLITS):
        largest = tl.maximum(largest, lse_of(partial_lse, first, row, total_rows, num_splits, SPLITS))
    row_max = tl.max(largest, 0)
    total = tl.zeros([SPLITS], tl.float32)
    acc = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        x = lse_of(partial_lse, first, row, total_rows, num_splits, SPLITS)
        weight = tl.where(x == row_max, 1.0, tl.exp2((x - row_max) * LOG2E))
        weight = tl.where(split < num_splits, weight, 0.0)
        places = (split.to(tl.int64) * total_rows + row)[:, None] * WIDTH + feature[None, :]
        acc += weight[:, None] * tl.load(partial_out + places, mask=(split < num_splits)[:, None], other=0.0)
        total += weight
    sum_of_weights = tl.sum(total, 0)
    if part == 0:
        tl.store(lse + row, row_max + tl.log2(sum_of_weights) * LN2)
    head = row // seqlen_q
    out_row = out.data + (head // num_heads).to(tl.int64) * stride64(out.stride_b, ALIGN)
    out_row += (head % num_heads).to(tl.int64) * stride64(out.stride_h, ALIGN)
    out_row += (row % seqlen_q).to(tl.int64) * stride64(out.stride_m, ALIGN)
    tl.store(out_row + feature, (tl.sum(acc, 0) / sum_of_weights).to(out.data.dtype.element_ty))


@triton.jit
def lse_of(partial_lse, first, row, total_rows, num_splits, SPLITS: tl.constexpr):
    """Those of SPLITS splits; -inf past the last one."""
    split = first + tl.arange(0, SPLITS)
    return tl.load(partial_lse + split.to(tl.int64) * total_rows + row, mask=split < num_splits, other=-INFINITY)
