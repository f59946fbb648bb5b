"""Tensors in the big memory that count their reads and writes: bytes and launches of an algorithm, by running it.

An algorithm of the ladder touches the big memory through slices alone: `x[part]` on the right is a read, `x[part] =` a
write, and everything without a slice is in the small memory. Run on `Counted` tensors it counts itself:

    counts, (out, lse) = count(step06_flash2.attention, [q, k, v])
    counts["read"], counts["written"]                                                                     (bytes)
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

Counts = dict[str, int]


class Counted:
    """A tensor in the big memory: every read and write of a part of it is counted, in bytes."""

    def __init__(self, x: Tensor, counts: Counts):
        self.x, self.counts = x, counts
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def __getitem__(self, part: Any) -> Tensor:
        found = self.x[part]
        self.counts["read"] += found.numel() * found.element_size()
        return found.clone()  # so that nothing can be written past the count

    def __setitem__(self, part: Any, value: Tensor) -> None:
        assert not isinstance(value, Counted)
        self.counts["written"] += self.x[part].numel() * self.x.element_size()
        self.x[part] = value

    def new_empty(self, shape: tuple[int, ...]) -> "Counted":
        return Counted(self.x.new_full(shape, math.nan), self.counts)

    def new_full(self, shape: tuple[int, ...], value: float) -> "Counted":
        self.counts["written"] += math.prod(shape) * self.x.element_size()
        return Counted(self.x.new_full(shape, value), self.counts)

    def new_zeros(self, shape: tuple[int, ...]) -> "Counted":
        return self.new_full(shape, 0.0)


def count(
    function: Callable[..., Any], tensors: list[Tensor], *settings: Any, **keywords: Any
) -> tuple[Counts, list[Tensor]]:
    """Bytes that `function` reads and writes, and its results."""
    counts = {"read": 0, "written": 0}
    kept = {name: Counted(x, counts) if isinstance(x, Tensor) else x for name, x in keywords.items()}
    results = function(*(Counted(x, counts) for x in tensors), *settings, **kept)
    return counts, [result.x for result in results]
