"""Tangents of forward mode and how they are compared."""

from collections.abc import Callable
from typing import Any

import torch
from formula import Example, Outputs
from torch import Tensor
from torch.autograd import forward_ad


def of_one(function: Callable[..., Outputs], example: Example, position: int) -> Callable[[Tensor], Outputs]:
    """`function` of one input alone; the others stay."""

    def of_input(x: Tensor) -> Outputs:
        tensors = list(example.tensors)
        tensors[position] = x
        return function(*tensors)

    return of_input


def assert_close(found: Any, expected: Any, **tolerance: float) -> None:
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, **tolerance)


def tangents_of_duals(function: Callable[..., Outputs], tensors: Any, tangents: Any) -> list[Tensor]:
    """Forward mode of torch.autograd; `None` stands for an input without a tangent. A missing one is an error."""
    with forward_ad.dual_level():
        given = zip(tensors, tangents, strict=True)
        duals = [x if dx is None else forward_ad.make_dual(x, dx) for x, dx in given]
        found = [forward_ad.unpack_dual(x).tangent for x in function(*duals)]
    assert all(x is not None for x in found)
    return found
