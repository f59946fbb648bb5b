"""Mask functions for tests of lists of blocks."""

from torch import Tensor

UNSEEN = 256  # the first key of the blocks that no row sees under `far_by_head`


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor) -> Tensor:
    return ids[i] == ids[j]


def earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Tensor) -> Tensor:
    """Causal by a tensor, which no window stands for."""
    return i + offset >= j


def far_by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor, width: Tensor) -> Tensor:
    """Rows from 230 on see no key, and keys from 250 on are seen by no row. Heads of a group differ."""
    return (i < 230) & (j < 250) & ((i - j).abs() >= width[h])


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 140) & ((i - j).abs() % 5 == b)


def near_in_documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor, width: Tensor) -> Tensor:
    return (ids[b, i] == ids[b, j]) & ((i - j).abs() <= width[h])
