"""The memory layouts that a tensor argument may come in."""

import random

import torch
from torch import Tensor

from .poison import each_once, in_larger_buffer

LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "last_dim_strided", "combined")


def lay_out(values: Tensor, layout: str, rng: random.Random, expandable: tuple[int, ...] | None = None) -> Tensor:
    """A tensor with the values of `values` (at least two dimensions) in another layout.

    contiguous          row-major
    transposed          the dimensions before the last swapped in memory: [B, H, S, D] seen through [B, S, H, D]
    sliced              inside a larger buffer filled with NaN, with odd strides and an odd offset
    expanded            stride 0 along one of the dimensions `expandable` (default: any); its first slice is repeated
    last_dim_strided    the last two dimensions swapped in memory
    combined            dimensions in any order in memory, inside a larger buffer, every or every second element
    """
    if layout == "contiguous":
        return values.contiguous()
    if layout == "transposed":
        first = max(values.ndim - 3, 0)
        return values.transpose(first, first + 1).contiguous().transpose(first, first + 1)
    if layout == "sliced":
        return in_larger_buffer(values, [(rng.randint(0, 3), rng.randint(0, 3)) for _ in values.shape])
    if layout == "expanded":
        dim = rng.choice(expandable or tuple(range(values.ndim)))
        return values.narrow(dim, 0, min(1, values.shape[dim])).expand_as(values)
    if layout == "last_dim_strided":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "combined":
        return combined(values, rng)
    raise ValueError(f"layout is {layout!r}, should be one of {LAYOUTS}")


def combined(values: Tensor, rng: random.Random) -> Tensor:
    """`values` with their dimensions in any order in memory, in a larger buffer of NaN, with every or every
    second entry of each dimension. Expanded dimensions stay expanded.
    """
    once = each_once(values)
    order = rng.sample(range(once.ndim), once.ndim)
    margins = [(rng.randint(0, 2), rng.randint(0, 2)) for _ in order]
    steps = [rng.choice((1, 1, 2)) for _ in order]
    inverse = sorted(range(once.ndim), key=order.__getitem__)
    return in_larger_buffer(once.permute(order), margins, steps).permute(inverse).expand_as(values)


def expanded_cotangent(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Cotangent with stride 0 in every dimension, as in `out.sum().backward()`."""
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
