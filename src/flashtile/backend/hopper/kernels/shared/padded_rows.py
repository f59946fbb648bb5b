"""Rows in blocks of BLOCK_M, for the Triton kernels before and after the fused backward kernel.

Every packed sequence begins with a block of its own, so that no block holds rows of two sequences; rows past a
sequence's end are padding. Sequence b begins with block `cu_seqlens_q[b] // BLOCK_M + b`, past all blocks before it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .compat import Pointer, Scalar


class RowTensor(NamedTuple):
    """`[B, H, S, D]` or packed `[T, H, D]`, or without features."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar


class HeadTensor(NamedTuple):
    """One value a row, contiguous: `[B, H, S]` or `[H, T]`."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar


@triton.jit
def stride64(stride, ALIGN: tl.constexpr):
    """Stride in elements from units of ALIGN elements: 64-bit, and visibly aligned to the compiler."""
    return stride.to(tl.int64) * ALIGN


@triton.jit
def feature_mask(exists, feature, columns, ALIGN: tl.constexpr):
    """Mask of existing rows and, where the head dimension is narrower than the kernel, of its columns, in units of
    ALIGN: visibly multiples, or the compiler would access each element for itself.
    """
    mask = exists[:, None]
    if columns is not None:
        mask = mask & (feature < columns * ALIGN)
    return mask


@triton.jit
def block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M: tl.constexpr):
    """Rows of a block and whether they exist.

    If packed, `seqlen_q` is the number of tokens. Tokens outside all sequences count as one more sequence.
    """
    first, stop = block * BLOCK_M, seqlen_q
    if cu_seqlens_q is not None:
        b, above = 0, batch + 1
        while above - b > 1:
            middle = (b + above) // 2
            reached = token_of(cu_seqlens_q, middle, seqlen_q) // BLOCK_M + middle <= block
            b, above = tl.where(reached, middle, b), tl.where(reached, above, middle)
        token = token_of(cu_seqlens_q, b, seqlen_q)
        first = token + (block - token // BLOCK_M - b) * BLOCK_M
        if b < batch:
            stop = token_of(cu_seqlens_q, b + 1, seqlen_q)
    row = first + tl.arange(0, BLOCK_M)
    return row, row < stop


@triton.jit
def token_of(cu_seqlens_q, b, num_tokens):
    """First token of sequence b, clamped to the tokens that exist."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b), 0), num_tokens).to(tl.int32)
