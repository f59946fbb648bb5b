"""TMA descriptors of tensors."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from ...call.problem import alignment
from ..scalars import rows_last
from .support import TMA_ALIGNMENT
from .tables import RAGGED_EXTENT

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
UNSWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def dense_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """Descriptor of `[B, H, S, D]` in boxes of rows and columns.

    TMA fills rows past the end with 0 and does not write them. A dimension of size 1 gets an aligned stride, as its own
    is never used and may be unaligned.
    """
    strides = [stride if n > 1 else TMA_ALIGNMENT for n, stride in zip(x.shape, x.stride(), strict=True)]
    return make_descriptor(x, x.shape, [*strides[:-1], 1], (1, 1, *box))


def dq_accum_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """Descriptor of the accumulators of dq, `[padded rows of all heads, D]`."""
    return make_descriptor(x, x.shape, x.stride(), box)


def ragged_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
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
    return make_descriptor(x, (2**31 - 1, 2**31 - 1, x.shape[1], RAGGED_EXTENT, x.shape[-1]), strides, (1, 1, 1, *box))


def row_stats_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of one fp32 value for each row, contiguous, in boxes of `rows`, which divides a head's padded rows."""
    x = x.view(-1, rows)
    descriptor = make_descriptor(x, x.shape, x.stride(), (1, rows))
    descriptor.layout = UNSWIZZLED
    return descriptor


def make_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorDescriptor:
    # Skips the constructor, whose checks take longer than the launch.
    """A `TensorDescriptor` with the default layout for its box."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(base=x, shape=list(shape), strides=list(strides), block_shape=list(box), padding="zero")
    descriptor.layout = default_layout(tuple(box), x.dtype)
    return descriptor


@functools.cache
def default_layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])


def tma_aligned(x: Tensor) -> Tensor:
    """The tensor itself, or a copy if features are not contiguous or rows not aligned to 16 bytes."""
    x = rows_last(x)
    return x if alignment(x) >= TMA_ALIGNMENT else x.clone(memory_format=torch.contiguous_format)
