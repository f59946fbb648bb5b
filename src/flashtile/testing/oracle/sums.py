"""Results that are sums of terms, with the ingredients of their error bound (docs/contract.md, section "Numbers").

Every element of out and of the gradients is a sum over visible pairs (i, j). In addition to the sum, the bound needs

    R      root of the sum of the squares of the terms, for independent rounding errors of the input dtype
    C      sum of the absolute values of the terms, for errors of the accumulation dtype
    A      largest score, as a sum of absolute values, among the contributing rows: a score's error is in proportion
    loss   error if every P (or dS) is off by 1, for values that are rounded to subnormals
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from .weights import Weights

RUN = 64  # terms that are added one after another


@dataclass
class Sums:
    """A block of results. All fields have one shape; float64, `loose` bool."""

    total: Tensor
    absolutes: Tensor  # C
    squares: Tensor  # R squared, so that blocks can be added
    loss: Tensor
    A: Tensor
    loose: Tensor  # True where the contract lets a NaN or infinity of another row leak in

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Sums":
        numbers = [torch.zeros(shape, dtype=torch.float64) for _ in range(5)]
        return cls(*numbers, loose=torch.zeros(shape, dtype=torch.bool))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Sums":
        """A change of shape applied to every field."""
        return Sums(*(change(getattr(self, name)) for name in self.__dataclass_fields__))

    def add_rows(self, rows: Tensor, block: "Sums") -> None:
        """Add block [H, S, X] to packed sums [T, H, X] at token rows [S], which other blocks may share (pages)."""
        block = block.map(lambda part: part.transpose(0, 1))
        for name in ("total", "absolutes", "squares", "loss"):
            getattr(self, name).index_add_(0, rows, getattr(block, name))
        self.A[rows] = torch.maximum(self.A[rows], block.A)
        self.loose[rows] |= block.loose

    def add_at(self, index: EllipsisType | slice | tuple[slice, ...], block: "Sums") -> None:
        """Add a block of the shape of `self[index]`."""
        for name in ("total", "absolutes", "squares", "loss"):
            getattr(self, name)[index] += getattr(block, name)
        self.A[index] = torch.maximum(self.A[index], block.A)
        self.loose[index] |= block.loose


def pair_products(weights: Weights, factors: Tensor, visible: Tensor, A: Tensor, loose: Tensor) -> Sums:
    """Sums over n of weights[h, m, n] * factors[h, n]: [H, M, X]. A is [H, M], loose [H]."""
    absolute, square = factors.abs(), factors.square()
    total = visible_matmul(weights.value, factors, visible)
    squares = visible_matmul(weights.root.square(), square, visible)
    if weights.shared is not None and weights.keys_dim == 2:
        squares = squares + visible_matmul(weights.shared, factors, visible).square()
    elif weights.shared is not None:
        squares = squares + visible_matmul(weights.shared.square(), square, visible)
    return Sums(
        total,
        absolutes=visible_matmul(weights.absolute, absolute, visible),
        squares=squares,
        loss=visible_matmul(weights.losses(visible), absolute, visible),
        A=A[:, :, None].expand_as(total),
        loose=loose[:, None, None].expand_as(total),
    )


def visible_matmul(weights: Tensor, factors: Tensor, visible: Tensor) -> Tensor:
    """weights @ factors where a pair that is not visible adds nothing, whatever it holds (0 * NaN would be NaN)."""
    if all_finite(factors):
        return exact_matmul(weights, factors)
    finite = factors.isfinite()
    product = exact_matmul(weights, factors.where(finite, 0.0))
    for n in (~finite).any(dim=2).any(dim=0).nonzero().flatten().tolist():
        special = factors[:, n].where(~finite[:, n], 0.0)  # [H, X]
        product += (weights[:, :, n, None] * special[:, None, :]).where(visible[:, :, n, None], 0.0)
    return product


def all_finite(x: Tensor) -> bool:
    """Whether all elements are finite; also `False` where their sum overflows. A sum takes a small part of the time of
    `x.isfinite()`.
    """
    return math.isfinite(x.sum())


def exact_matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [H, M, N] @ y [H, N, X], whose error does not grow with N: a tree over products of RUN terms each."""
    full = x.shape[2] // RUN * RUN
    rest = x[:, :, full:] @ y[:, full:]
    if full == 0:
        return rest
    runs = x[:, :, :full].unflatten(2, (-1, RUN)).transpose(1, 2) @ y[:, :full].unflatten(1, (-1, RUN))
    return runs.sum(1) + rest  # torch.sum is a tree


def group_sum(sums: Sums, group: int) -> Sums:
    """[Hq, S, X] -> [Hkv, S, X]: the query heads of a group read the same keys and values."""

    def grouped(part: Tensor) -> Tensor:
        return part.unflatten(0, (-1, group))  # [Hkv, group, S, X]

    return Sums(
        total=grouped(sums.total).sum(1),
        absolutes=grouped(sums.absolutes).sum(1),
        squares=grouped(sums.squares).sum(1),
        loss=grouped(sums.loss).sum(1),
        A=grouped(sums.A).amax(1),
        loose=grouped(sums.loose).any(1),
    )


def reduce_to(weights: Weights, visible: Tensor, A: Tensor, loose: Tensor, shape: tuple[int, ...]) -> Sums:
    """Sums of pairwise terms [H, Sq, Sk] over the dimensions that are 1 in `shape`. A is [H, Sq], loose [H]."""
    dims = [dim for dim, size in enumerate(shape) if size == 1]

    def summed(part: Tensor) -> Tensor:
        return part.sum(dims, keepdim=True) if dims else part

    def largest(part: Tensor) -> Tensor:
        if not dims:
            return part
        return part.amax(dims, keepdim=True) if part.numel() else torch.zeros(shape, dtype=part.dtype)

    squares = summed(weights.root.square())
    if weights.shared is not None:
        shared = weights.shared.sum(2, keepdim=True) if 2 in dims else weights.shared
        squares = squares + summed(shared.square())
    total = summed(weights.value)
    return Sums(
        total,
        absolutes=summed(weights.absolute),
        squares=squares,
        loss=summed(weights.losses(visible)),
        A=largest(A[:, :, None].where(visible, 0.0)),
        loose=largest(loose[:, None, None].expand(visible.shape).to(torch.uint8)).bool(),
    )
