"""Formulas for tensors of other dtypes than those they were traced with: `module.to(torch.bfloat16)` changes a
parameter in place, below a ScoreMod of it.
"""

import functools

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..private_torch import constant_result
from . import registry
from .formula import Untraced, formula_of
from .program import BOOL, INT64, REAL, TensorType
from .purity import MASK_MOD, SCORE_MOD

Types = tuple[tuple[str, int], ...]  # types of tensors: dtypes without `torch.`, and numbers of dimensions


def types_of(tensors: tuple[Tensor, ...]) -> Types:
    return tuple([(str(x.dtype).removeprefix("torch."), x.dim()) for x in tensors])


@constant_result
def key_for(key: str, types: Types, hides: bool) -> str:
    """The key of a modifier's function for tensors of these types: `key`, or the key of the formula of other dtypes.

    Raises:
        ArgumentError: a formula reads other numbers of tensors or dimensions, or another kind of numbers.
    """
    return _key_for(key, types, hides)


@functools.lru_cache(maxsize=1024)
def _key_for(key: str, types: Types, hides: bool) -> str:
    role = MASK_MOD if hides else SCORE_MOD
    formula = registry.formula_of(key, role)
    if isinstance(formula, Untraced) or formula.tensors == types:
        return key
    given = ", ".join(map(in_words, types)) or "no tensors"
    if list(map(reads, formula.tensors)) == list(map(reads, types)):
        zeros = [torch.empty((0,) * ndim, dtype=getattr(torch, dtype)) for dtype, ndim in types]
        found = formula_of(formula, zeros, role)
        if not isinstance(found, Untraced):
            registry.register(found[0].key, found[0])
            return found[0].key
        given += f", of which it is {found}"
    expected = ", ".join(map(in_words, formula.tensors)) or "none"
    accepted = (
        f"tensors as those that the formula was traced with ({expected}), of any dtype with the same kind of numbers; "
        f"flashtile.{role.owner} of the same function traces it again for others"
    )
    raise ArgumentError(f"{role.argument}.tensors", given, accepted, role.example)


def reads(x: TensorType | tuple[str, int]) -> tuple[str, int]:
    """The kind of numbers in a tensor, and its dimensions."""
    dtype = getattr(torch, x[0])
    if dtype.is_complex:
        return "complex", x[1]
    return REAL if dtype.is_floating_point else BOOL if dtype is torch.bool else INT64, x[1]


def in_words(x: TensorType | tuple[str, int]) -> str:
    return f"{x[0]} with {x[1]} dimensions"
