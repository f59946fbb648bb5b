"""Visibility of the blocks of a mask that is a tensor, by one pass over its elements. Torch operations on its device
compute it: the host reads no value, and a CUDA graph can contain them.
"""

import torch
from torch import Tensor

from .evaluation import PARTIAL

SUMMARY_BLOCK = 32  # rows and keys of the blocks whose states all kernels of a call share: most have multiples of it
WORD = 8  # elements that are read as one number, where they lie together
ALL_VISIBLE = 0x0101010101010101  # such a number of visible pairs


def mask_visibility(mask: Tensor, num_rows: int, num_keys: int, block_m: int, block_n: int) -> Tensor:
    """Whether each block is HIDDEN, PARTIAL or FULL, as uint8
    `[B | 1, H | 1, blocks of rows, blocks of keys]`, for a bool mask `[B | 1, H | 1, Sq | 1, Sk | 1]`. Expanded
    dimensions count as broadcast ones.
    """
    words = as_words(unexpanded(mask), block_n)
    in_words = words.dtype is torch.int64
    low, high = bounds_of_blocks((words,), 3, block_n // WORD if in_words else block_n)
    low, high = bounds_of_blocks((low, high), 2, block_m)
    states = (low == (ALL_VISIBLE if in_words else 1)).to(torch.uint8) + (high != 0)
    return states.expand(-1, -1, -(-num_rows // block_m), -(-num_keys // block_n))


def coarser(states: Tensor, rows: int, keys: int) -> Tensor:
    """The states of blocks of `rows` by `keys` such blocks each; the last ones may have fewer."""
    low, high = bounds_of_blocks(bounds_of_blocks((states,), 3, keys), 2, rows)
    return torch.where(low == high, low, PARTIAL)


def unexpanded(x: Tensor) -> Tensor:
    """The tensor with one element in each dimension that `Tensor.expand` has made longer."""
    expanded = (n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
    return x[tuple([slice(0, 1) if dim else slice(None) for dim in expanded])]


def as_words(mask: Tensor, block_n: int) -> Tensor:
    """A mask as int64 numbers of WORD elements each, or as bytes where its rows or blocks are no multiples of that."""
    *strides, stride_n = mask.stride()
    multiples = (mask.shape[3], mask.storage_offset(), block_n, *strides)
    return mask.view(torch.int64 if stride_n == 1 and all(n % WORD == 0 for n in multiples) else torch.uint8)


def bounds_of_blocks(x: tuple[Tensor, ...], dim: int, size: int) -> tuple[Tensor, Tensor]:
    """The least and the largest element of each block along a dimension; the last may be shorter; `x` is one
    tensor, or the least and the largest elements of blocks in another dimension.
    """
    length = x[0].shape[dim]
    whole = length // size * size
    found = []
    for first, count, width in ((0, whole, size), (whole, length - whole, length - whole)):
        if count > 0:
            parts = [y.narrow(dim, first, count).unflatten(dim, (-1, width)) for y in x]
            one_pass = torch.aminmax(parts[0], dim=dim + 1) if len(parts) == 1 else None
            found.append(one_pass or (parts[0].amin(dim=dim + 1), parts[1].amax(dim=dim + 1)))
    low, high = (torch.cat(y, dim=dim) for y in zip(*found, strict=True))
    return low, high
