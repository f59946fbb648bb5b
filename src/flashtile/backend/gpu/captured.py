"""Tensors that formulas capture, as arguments of kernels: `captured0`, `size_captured0_0`, `stride_captured0_0`, ..."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .pointers import Described


def captured_scalars(tensors: Sequence[Tensor]) -> dict[str, int]:
    """Sizes and strides of captured tensors."""
    return {
        f"{name}_captured{n}_{dim}": values[dim]
        for n, x in enumerate(tensors)
        for name, values in (("size", x.shape), ("stride", x.stride()))
        for dim in range(x.dim())
    }


def captured_pointers(tensors: Sequence[Tensor]) -> dict[str, Tensor | Described]:
    """The captured tensors; of bools as bytes."""
    return {
        f"captured{n}": Described(x, Tensor.view, torch.uint8) if x.dtype is torch.bool else x
        for n, x in enumerate(tensors)
    }


def needs_wide_offsets(x: Tensor) -> bool:
    """Whether offsets into a tensor need 64 bits."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) >= 2**31
