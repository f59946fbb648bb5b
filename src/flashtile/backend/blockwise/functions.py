"""Calls of a user's functions on tiles, with their errors as errors of the arguments `score_mod` and `mask`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, AttentionError
from ...expression import Formula
from ...expression.purity import MASK_MOD, SCORE_MOD, Role, reject_result

Indices = tuple[Tensor, Tensor, Tensor, Tensor]  # b [B, 1, 1, 1], h [1, H, 1, 1], rows [M, 1], keys [N]


def call_score_mod(fn: Callable[..., Any], s: Tensor, indices: Indices, tensors: Sequence[Tensor]) -> Tensor:
    """The new scores of a tile `s [B, H, M, N]`."""
    return checked(fn, (s, *indices, *tensors), s.shape, SCORE_MOD)


def call_mask_mod(
    fn: Callable[..., Any], indices: Indices, tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Whether the pairs of a tile of this shape are visible; reals of a formula are in `dtype`."""
    if isinstance(fn, Formula):
        return fn.run((indices[0].new_zeros((), dtype=dtype), *indices), tensors)
    return checked(fn, (*indices, *tensors), shape, MASK_MOD)


def checked(fn: Callable[..., Any], arguments: tuple[Tensor, ...], shape: tuple[int, ...], role: Role) -> Tensor:
    try:
        result = fn(*arguments)
    except AttentionError:
        raise
    except Exception as error:
        accepted = f"{role.signature}; it raised {type(error).__name__}: {error}"
        raise ArgumentError(role.argument, fn, accepted, role.example) from error
    reject_result(fn, result, shape, arguments[0].device, role)
    return result
