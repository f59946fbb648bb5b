"""How tensors are described to the copy engine (TMA)."""

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
    """`[B, H, S, D]` as the copy engine sees it, in boxes of rows and columns: what a box holds past the last row is 0,
    and is not written. Nothing is read at the stride of a single entry, which need not be aligned.
    """
    strides = [stride if n > 1 else TMA_ALIGNMENT for n, stride in zip(x.shape, x.stride(), strict=True)]
    return make_descriptor(x, x.shape, [*strides[:-1], 1], (1, 1, *box))


def dq_accum_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """The sums of dq `[rows of all heads, D]`."""
    return make_descriptor(x, x.shape, x.stride(), box)


def ragged_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """`[T, H, D]` as the copy engine sees it, so that boxes end with any sequence, not only with the last token.

    Token `first + i` of a sequence that ends before token `stop` has the coordinates `(END, stop, head, END - length +
    i, 0)`. Addresses are computed modulo 2**64, where `END` times the first stride and `END` times the fourth one are
    0 together; and the fourth dimension has END entries, so that `i >= length` lies outside. The copy engine knows no
    tensor without rows: it gets one that nothing reads.
    """
    x = x if len(x) > 0 else x.new_zeros((1, *x.shape[1:]))
    token, head = x.stride()[:2]
    strides = (2**34 - token, token, head, token, 1)
    return make_descriptor(x, (2**31 - 1, 2**31 - 1, x.shape[1], RAGGED_EXTENT, x.shape[-1]), strides, (1, 1, 1, *box))


def row_stats_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """One fp32 number for each row, in boxes of `rows`: contiguous, and `rows` of them divide what a head has."""
    x = x.view(-1, rows)
    descriptor = make_descriptor(x, x.shape, x.stride(), (1, rows))
    descriptor.layout = UNSWIZZLED
    return descriptor


def make_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorDescriptor:
    # TensorDescriptor's own checks, repeated for each call, take longer than the launch.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(base=x, shape=list(shape), strides=list(strides), block_shape=list(box), padding="zero")
    descriptor.layout = default_layout(tuple(box), x.dtype)
    return descriptor


@functools.cache
def default_layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])


def tma_aligned(x: Tensor) -> Tensor:
    """The tensor with contiguous features and rows on 16 bytes, which costs a copy if they were not."""
    x = rows_last(x)
    return x if alignment(x) >= TMA_ALIGNMENT else x.clone(memory_format=torch.contiguous_format)
