"""Copies of rows from one layout of memory to another.

PyTorch copies tensors of different strides by elements. Rows of 16 bits are copied several times as fast as words of
64.
"""

import torch
from torch import Tensor


def words(x: Tensor) -> Tensor:
    """The same memory in words of 8 bytes, or `x` if its rows are not made of these."""
    if x.element_size() >= 8 or x.data_ptr() % 8 != 0:
        return x
    try:
        return x.view(torch.int64)
    except RuntimeError:  # other strides
        return x


def copy_rows(place: Tensor, x: Tensor) -> None:
    """`place.copy_(x)`."""
    if place.dtype == x.dtype:
        in_words = words(place), words(x)
        if in_words[0].dtype == in_words[1].dtype:
            place, x = in_words
    place.copy_(x)


def join_rows(pieces: list[Tensor], dim: int, out: Tensor | None = None) -> Tensor:
    """`torch.cat` of pieces in a dimension before the last one, and without an `out` a single piece as it is."""
    if len(pieces) == 1:
        if out is None:
            return pieces[0]
        copy_rows(out, pieces[0])
        return out
    dtype = pieces[0].dtype
    in_words = [words(x) for x in (*pieces, *(() if out is None else (out,)))]
    if len({x.dtype for x in in_words}) > 1:
        return torch.cat(pieces, dim, out=out)
    joined = torch.cat(in_words[: len(pieces)], dim, out=None if out is None else in_words[-1])
    return joined.view(dtype) if out is None else out


def flat_copy(tensors: list[Tensor]) -> Tensor:
    """The elements of tensors one after another; a single contiguous tensor as a view."""
    present = [x for x in tensors if x.numel() > 0] or tensors[:1]
    if len(present) == 1 and present[0].is_contiguous():
        return present[0].view(-1)
    flat = present[0].new_empty(sum(x.numel() for x in present))
    for place, x in zip(flat.split([x.numel() for x in present]), present, strict=True):
        copy_rows(place.view(x.shape), x)
    return flat
