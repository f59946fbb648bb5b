"""Visibility of a tile's pairs, element by element. Tiles that are visible in full do not need it."""

import torch
from torch import Tensor

from ...call.window import Window


def window_visible(window: Window, rows: Tensor, keys: Tensor, diagonal: int | Tensor) -> Tensor | None:
    """Whether pairs are in the window, as bool `[(B, 1,) M, N]`, from the positions of rows `[M, 1]` and keys `[N]`;
    `diagonal` is an int or `[B, 1, 1, 1]`. `None` for an unlimited window.
    """
    bounds = []
    if window.left is not None:
        bounds.append(keys >= rows + diagonal - window.left)
    if window.right is not None:
        bounds.append(keys <= rows + diagonal + window.right)
    if window.top_left:
        bounds.append(keys <= rows)
    if window.chunk is not None:
        bounds.append(keys // window.chunk == (rows + diagonal) // window.chunk)
    return all_of(bounds)


def all_of(conditions: list[Tensor]) -> Tensor | None:
    """The conjunction of broadcastable bool tensors; `None` (all true) if there are none."""
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = torch.logical_and(visible, condition)
    return visible
