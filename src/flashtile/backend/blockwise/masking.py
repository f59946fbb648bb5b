"""Which pairs of a tile are visible, element by element. Tiles inside the full range never come here."""

import torch
from torch import Tensor

from ...call.window import Window


def window_visible(window: Window, rows: Tensor, keys: Tensor, diagonal: int | Tensor) -> Tensor | None:
    """Rows `[M, 1]` and keys `[N]` by position, `diagonal` an int or `[B, 1, 1, 1]`; bool `[(B, 1,) M, N]`."""
    bounds = []
    if window.left is not None:
        bounds.append(keys >= rows + diagonal - window.left)
    if window.right is not None:
        bounds.append(keys <= rows + diagonal + window.right)
    if window.top_left:
        bounds.append(keys <= rows)
    return all_of(bounds)


def all_of(conditions: list[Tensor]) -> Tensor | None:
    """The conjunction of broadcastable bool tensors; `None` if there are none, which means always."""
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = torch.logical_and(visible, condition)
    return visible
