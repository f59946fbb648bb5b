"""Sums of any length, as exact as short ones.

`torch.sum` adds in a tree. All else that adds many terms to one number does so here: products with a long inner
dimension, and sums of blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILES_PER_CARRY = 16  # that are added up before they are carried to a total
TERMS_PER_CARRY = 64  # the same for terms that are sums of whole tiles
NARROW_ROWS, NARROW_COLUMNS = 4, 16  # of a product for which BLAS has one accumulator an element


def carry(recent: Tensor, total: Tensor) -> None:
    """Add `recent` to `total`, in place. `recent` becomes the rounding error of that (Kahan, "Further remarks on
    reducing truncation errors", 1965), and 0 where the total is an infinity or NaN.
    """
    new = total + recent
    recent.sub_(new - total).masked_fill_(~new.isfinite(), 0)
    total.copy_(new)


class Sum:
    """A sum of any number of terms. `every` so many of them, what has been added is carried to a total; `None` is for
    sums of few terms.
    """

    def __init__(self, zeros: Tensor, every: int | None):
        self.recent, self.every, self.terms = zeros, every, 0
        self.total: Tensor | None = None

    def add(self, term: Tensor, part: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Add a term to a part of the sum, a view."""
        recent = part(self.recent)
        recent += term
        self.count_term(part)

    def count_term(self, part: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """A term has been added to `recent`."""
        self.terms += 1
        if self.every is not None and self.terms % self.every == 0:
            if self.total is None:
                self.total = torch.zeros_like(self.recent)
            carry(part(self.recent), part(self.total))

    def result(self) -> Tensor:
        """The sum, in the memory of the zeros that it began with."""
        return self.recent if self.total is None else self.recent.add_(self.total)


def tree_sum(term: Callable[[int], Tensor], first: int, last: int) -> Tensor:
    """`term(first) + ... + term(last - 1)`, halves added to one another; holds few terms at a time."""
    if last - first == 1:
        return term(first)
    middle = (first + last) // 2
    return tree_sum(term, first, middle) + tree_sum(term, middle, last)


def chunked_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, with a long inner dimension cut into pieces: BLAS may add up all of it in one accumulator."""
    chunk = 128 if a.shape[-2] < NARROW_ROWS or b.shape[-1] < NARROW_COLUMNS else 512
    length = a.shape[-1]
    if length <= chunk:
        return a @ b
    chunks = [slice(start, start + chunk) for start in range(0, length, chunk)]
    return torch.stack([a[..., part] @ b[..., part, :] for part in chunks]).sum(dim=0)
