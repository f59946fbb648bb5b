"""Compensated and pairwise sums, so that rounding errors do not grow with the number of terms.

`torch.sum` is pairwise already. This module has the other long sums: matrix products with a long inner dimension, and
sums over tiles.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILES_PER_CARRY = 16  # products of tiles that are added before the sum is carried to a total
TERMS_PER_CARRY = 64  # the same for terms that are sums over whole tiles
NARROW_ROWS, NARROW_COLUMNS = 4, 16  # BLAS computes narrower products with one accumulator for each element


def carry(recent: Tensor, total: Tensor) -> None:
    """Add `recent` to `total`, in place. `recent` becomes the rounding error of the addition (Kahan, "Further remarks
    on reducing truncation errors", 1965), or 0 where the total is an infinity or NaN.
    """
    new = total + recent
    recent.sub_(new - total).masked_fill_(~new.isfinite(), 0)
    total.copy_(new)


class Sum:
    """A compensated sum: after `every` terms, the recent sum is carried to a total. `None` for a plain sum."""

    def __init__(self, zeros: Tensor, every: int | None):
        self.recent, self.every, self.terms = zeros, every, 0
        self.total: Tensor | None = None

    def add(self, term: Tensor, part: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Add a term to a part of the sum, a view."""
        recent = part(self.recent)
        recent += term
        self.count_term(part)

    def count_term(self, part: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Count a term that the caller has added to `recent` itself, and carry if it is due."""
        self.terms += 1
        if self.every is not None and self.terms % self.every == 0:
            if self.total is None:
                self.total = torch.zeros_like(self.recent)
            carry(part(self.recent), part(self.total))

    def result(self) -> Tensor:
        """The sum, in the memory of the zeros that it started with."""
        return self.recent if self.total is None else self.recent.add_(self.total)


def tree_sum(term: Callable[[int], Tensor], first: int, last: int) -> Tensor:
    """Pairwise sum of `term(first) + ... + term(last - 1)`; holds only O(log) terms at a time."""
    if last - first == 1:
        return term(first)
    middle = (first + last) // 2
    return tree_sum(term, first, middle) + tree_sum(term, middle, last)


def chunked_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, with a long inner dimension cut into chunks: BLAS may sum all of it in one accumulator."""
    chunk = 128 if a.shape[-2] < NARROW_ROWS or b.shape[-1] < NARROW_COLUMNS else 512
    if a.shape[-1] <= chunk:
        return a @ b
    return torch.stack([x @ y for x, y in zip(a.split(chunk, -1), b.split(chunk, -2), strict=True)]).sum(dim=0)
