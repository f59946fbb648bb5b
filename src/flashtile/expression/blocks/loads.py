"""Elements of captured tensors that are read for pairs: the smallest and the largest one in each block.

An index of rows or of keys that has few values in a block selects as many elements. Of a dimension with any other index
all elements count.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .analysis import KEY, ROW, UNIFORM
from .intervals import Interval

FEW = 2**16  # elements that may be read of a smaller tensor


class Index(NamedTuple):
    """The index of one dimension."""

    values: Interval | None  # in each block; `None` if it may be any integer
    stage: int
    count: int | None  # how many values it has in a block at most

    @property
    def shape(self) -> tuple[int, ...]:
        """`[B | 1, H | 1, blocks of rows | 1, blocks of keys | 1]`"""
        assert self.values is not None
        shape = self.values.low.shape
        return (*[1] * (4 - len(shape)), *shape)


def load_interval(x: Tensor, indices: Sequence[Index], fill: float) -> Interval:
    """The interval of `x[indices]` in each block; an element outside of `x` is `fill`."""
    chosen, low, high = selected(x, indices), x, x
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for dim, index in enumerate(indices):
        if chosen[dim]:
            continue
        if x.shape[dim] == 0:
            return Interval(*[torch.full((), fill, dtype=x.dtype, device=x.device)] * 2)
        low, high = low.amin(dim=dim, keepdim=True), high.amax(dim=dim, keepdim=True)
        known = index.values
        inside = inside & (torch.zeros_like(inside) if known is None else within(known, x.shape[dim]))
    found = elements(low, high, indices, chosen, fill)
    outside = torch.full((), fill, dtype=x.dtype, device=x.device)
    return Interval(
        torch.where(inside, found.low, torch.minimum(found.low, outside)),
        torch.where(inside, found.high, torch.maximum(found.high, outside)),
    )


def within(index: Interval, size: int) -> Tensor:
    return (index.low >= 0) & (index.high < size)


def selected(x: Tensor, indices: Sequence[Index]) -> list[bool]:
    """The dimensions whose index selects elements: as long as those are not many more than the tensor has."""
    for left_out in ((), (KEY,), (ROW, KEY)):
        allowed = {UNIFORM, ROW, KEY} - set(left_out)
        found = [y.values is not None and y.count is not None and y.stage in allowed for y in indices]
        of_dims = [y for y, wanted in zip(indices, found, strict=True) if wanted]
        blocks = (math.prod(max(sizes) for sizes in zip(*(y.shape for y in of_dims), strict=True))) if of_dims else 1
        if blocks * math.prod(y.count or 1 for y in of_dims) <= max(4 * x.numel(), FEW):
            return found
    return [False] * len(indices)


def elements(low: Tensor, high: Tensor, indices: Sequence[Index], chosen: list[bool], fill: float) -> Interval:
    """The interval of the selected elements; `low` and `high` have one element in the other dimensions."""
    number, positions, exists = sum(chosen), [], torch.ones((), dtype=torch.bool, device=low.device)
    for dim, index in enumerate(indices):
        if not chosen[dim]:
            positions.append(torch.zeros(1, dtype=torch.int64, device=low.device))
            continue
        assert index.values is not None
        assert index.count is not None
        own = [1] * number  # an axis for each such dimension, behind those of blocks
        own[sum(chosen[:dim])] = index.count
        first, last = (y.reshape(*y.shape, *[1] * number) for y in index.values)
        position = (first + torch.arange(index.count, device=low.device).view(own)).minimum(last)
        inside = (position >= 0) & (position < low.shape[dim])
        positions.append(torch.where(inside, position, 0))
        exists = exists & inside
    if low.numel() == 0:
        return Interval(
            *[torch.full(exists.shape[: exists.dim() - number], fill, dtype=low.dtype, device=low.device)] * 2
        )
    bounds = [torch.where(exists, y[tuple(positions)], fill) for y in (low, high)]
    if number == 0:
        return Interval(*bounds)
    axes = tuple(range(-number, 0))
    return Interval(bounds[0].amin(dim=axes), bounds[1].amax(dim=axes))
