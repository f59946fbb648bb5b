"""Formulas: the traced programs of score and mask functions, with what a backend needs to compile them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derivative import Partials, partials
from .functions import UntraceableError
from .program import Program, TensorType
from .text import text
from .trace import trace


class Formula(NamedTuple):
    """A traced function: equal formulas need the same code, whatever the values and sizes of their tensors."""

    program: Program
    tensors: tuple[TensorType, ...]

    def partials(self, wanted: Sequence[bool] = ()) -> Partials:
        """Partial derivatives by the score and by every load of the wanted tensors; of none by default."""
        return derived(self, (*wanted, *[False] * (len(self.tensors) - len(wanted))))

    def __str__(self) -> str:
        return text(self.program)


class Untraced(NamedTuple):
    """Why a function has no formula."""

    reason: str

    def __str__(self) -> str:
        return f"not traced: {self.reason}"


@functools.lru_cache(maxsize=1024)
def derived(formula: Formula, wanted: tuple[bool, ...]) -> Partials:
    return partials(formula.program, formula.tensors, wanted)


def types_of(tensors: Sequence[Tensor]) -> tuple[TensorType, ...]:
    return tuple(TensorType(str(x.dtype).removeprefix("torch."), x.dim()) for x in tensors)


def formula_of(
    fn: Callable[..., Any], tensors: tuple[TensorType, ...], real: torch.dtype, *, mask: bool = False
) -> Formula | Untraced:
    """Trace a function of a pair and of tensors of these types."""
    for x in tensors:
        if getattr(torch, x.dtype).is_complex:
            return Untraced("it reads a tensor of complex numbers")
    try:
        return Formula(trace(fn, tensors, real, mask=mask), tensors)
    except UntraceableError as error:
        return Untraced(str(error))
