"""TMA descriptors of tensors."""

import torch
from torch import Tensor

from ....call.problem import alignment
from ...gpu.pointers import TmaDescriptor
from ...scalars import rows_last
from ..support import TMA_ALIGNMENT
from ..tile_config import ALIGN, RAGGED_EXTENT


def dense_descriptor(x: Tensor, box: tuple[int, int]) -> TmaDescriptor:
    """Descriptor of `[B, H, S, D]` in boxes of rows and columns.

    TMA fills rows past the end with 0 and does not write them. A dimension of size 1 gets an aligned stride, as its own
    is never used and may be unaligned.
    """
    strides = [stride if n > 1 else TMA_ALIGNMENT for n, stride in zip(x.shape, x.stride(), strict=True)]
    return TmaDescriptor(x, tuple(x.shape), (*strides[:-1], 1), (1, 1, *box))


def dq_accum_descriptor(x: Tensor, box: tuple[int, int]) -> TmaDescriptor:
    """Descriptor of the accumulators of dq, `[padded rows of all heads, D]`."""
    return TmaDescriptor(x, tuple(x.shape), x.stride(), box)


def ragged_descriptor(x: Tensor, box: tuple[int, int]) -> TmaDescriptor:
    """Descriptor of packed `[T, H, D]` that cuts boxes at the end of any sequence, not only at the last token.

    Row i of a sequence of `length` tokens that ends before token `stop` has coordinates `(RAGGED_EXTENT, stop, head,
    RAGGED_EXTENT - length + i, 0)`. The fourth dimension has RAGGED_EXTENT entries, so `i >= length` is out of bounds.
    Addresses are computed modulo 2**64, where RAGGED_EXTENT times the first stride and RAGGED_EXTENT times the fourth
    one add up to 0.

    TMA accepts no empty tensor: in its place it gets one that is never read.
    """
    x = x if len(x) > 0 else x.new_zeros((1, *x.shape[1:]))
    token, head = x.stride()[:2]
    strides = (2**34 - token, token, head, token, 1)
    shape = (2**31 - 1, 2**31 - 1, x.shape[1], RAGGED_EXTENT, x.shape[-1])
    return TmaDescriptor(x, shape, strides, (1, 1, 1, *box))


def pages_descriptor(x: Tensor, box: tuple[int, int]) -> TmaDescriptor:
    """Descriptor of pages `[P, rows, H, D]` whose first rows are whole numbers of rows apart. It cuts boxes at any row:
    `ragged_descriptor` of the rows of all pages, where page `p` begins at row `p * rows_of_page(x)`.
    """
    row, head = row_stride(x), x.stride(2) if x.shape[2] > 1 else TMA_ALIGNMENT
    strides = (2**34 - row, row, head, row, 1)
    shape = (2**31 - 1, 2**31 - 1, x.shape[2], RAGGED_EXTENT, x.shape[-1])
    return TmaDescriptor(x, shape, strides, (1, 1, 1, *box))


def row_stride(x: Tensor) -> int:
    """The stride between rows of pages `[P, rows, H, D]`; of single rows, between pages."""
    sizes = x.shape[:2]
    return x.stride(1) if sizes[1] > 1 else x.stride(0) if sizes[0] > 1 else TMA_ALIGNMENT


def row_stats_descriptor(x: Tensor, rows: int) -> TmaDescriptor:
    """Descriptor of one fp32 value for each row, contiguous, in boxes of `rows`, which divides a head's padded rows."""
    x = x.view(-1, rows)
    return TmaDescriptor(x, tuple(x.shape), x.stride(), (1, rows), swizzled=False)


def tma_aligned(x: Tensor) -> Tensor:
    """The tensor itself, or a copy with contiguous features and aligned rows."""
    x = rows_last(x)
    return x if is_tma_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_tma_aligned(x: Tensor) -> bool:
    """Whether rows are aligned to 16 bytes and to ALIGN elements."""
    whole = all(stride % ALIGN == 0 for stride, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
    return whole and alignment(x) >= TMA_ALIGNMENT
