"""Tensors that count the bytes of their slices: steps 1, 4, 5, 6 and 10 touch HBM by slices alone.

`x[rows]` on the right is a read and `x[rows] =` a write. `count` runs a step on such tensors.

`python -m flashtile_ladder measure.counted` prints the bytes of step 5 with a mask and with dropout: a mask is read, N²
bytes, and dropout's factors are drawn where they are used.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Counted:
    """A tensor in HBM: every read and write of a part of it is counted, in bytes."""

    def __init__(self, x: Tensor, counts: dict[str, int]):
        self.x, self.counts = x, counts
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, part: Any) -> Tensor:
        found = self.x[part]
        self.counts["read"] += found.numel() * found.element_size()
        return found.clone()  # so that nothing can be written past the count

    def __setitem__(self, part: Any, value: Any) -> None:
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
) -> tuple[dict[str, int], list[Tensor]]:
    """Bytes that `function` reads and writes, and its results; tensors among the keywords count too."""
    counts = {"read": 0, "written": 0}
    kept = {name: Counted(x, counts) if countable(x) else x for name, x in keywords.items()}
    results = function(*(Counted(x, counts) for x in tensors), *settings, **kept)
    return counts, [result.x for result in results]


def countable(x: Any) -> bool:
    """Matrices: the state of a random number generator is none."""
    return isinstance(x, Tensor) and x.ndim == 2


def main() -> None:
    from .. import step05_flash1

    n, d = 512, 64
    tensors, state = [torch.randn(n, d) for _ in range(3)], torch.Generator().manual_seed(0).get_state()
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": torch.rand(n, n) < 0.9},
    }
    features["dropout"] = {"dropout_p": 0.1, "rng_state": state}
    for name, keywords in features.items():
        counts, _ = count(step05_flash1.attention, tensors, **keywords)
        print(f"{name:>7}: {counts['read']:,} bytes read, {counts['written']:,} written")
