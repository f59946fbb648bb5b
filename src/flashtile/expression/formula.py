"""Formulas: the traced programs of score functions, as values that name themselves."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import torch_code
from .derivative import Partials, partials
from .functions import UntraceableError
from .program import Instruction, Program, TensorType, type_of
from .text import text
from .trace import trace

PREFIX = "formula "  # of keys that are formulas


class Formula(NamedTuple):
    """A traced function. Equal formulas need the same code, whatever the values and sizes of their tensors."""

    program: Program
    tensors: tuple[TensorType, ...]

    def partials(self, wanted: Sequence[bool] = ()) -> Partials:
        """Partial derivatives by the score and by every load of the wanted tensors; of none by default."""
        return derived(self, (*wanted, *[False] * (len(self.tensors) - len(wanted))))

    @property
    def key(self) -> str:
        """The whole formula as text, from which `of_key` makes it again in any process."""
        return PREFIX + json.dumps([self.tensors, *self.program], separators=(",", ":"))

    @classmethod
    def of_key(cls, key: str) -> "Formula":
        tensors, instructions, outputs = json.loads(key.removeprefix(PREFIX))
        made = (Instruction(op, kind, tuple(operands), hashable(value)) for op, kind, operands, value in instructions)
        return cls(Program(tuple(made), tuple(outputs)), tuple(TensorType(*x) for x in tensors))

    def __call__(self, *arguments: Tensor) -> Tensor:
        """The new score of a tile, from `(score, b, h, q_idx, k_idx, *tensors)`, by torch operations."""
        return torch_code.run(self.program, arguments[:5], arguments[5:])[0]

    def __str__(self) -> str:
        return text(self.program)


class Untraced(NamedTuple):
    """Why a function has no formula."""

    reason: str

    def __str__(self) -> str:
        return f"not traced: {self.reason}"


def formula_of(fn: Callable[..., Any], tensors: Sequence[Tensor] = ()) -> tuple[Formula, list[Tensor]] | Untraced:
    """The formula of a function, and all tensors that it reads: its arguments first.

    Raises:
        ArgumentError: the function draws random numbers, or writes into a tensor that it has not made.
    """
    try:
        program, found = trace(fn, tensors)
    except UntraceableError as error:
        return Untraced(str(error))
    return Formula(program, tuple(type_of(x) for x in found)), found


@functools.lru_cache(maxsize=1024)
def loads_pairs(formula: Formula) -> bool:
    """Whether an element of a tensor is read for each pair: its indices depend on the query and on the key."""
    inputs: list[frozenset[str]] = []
    for x in formula.program.instructions:
        own = frozenset([x.value]) if x.op == "input" else frozenset[str]()
        inputs.append(own.union(*(inputs[n] for n in x.operands)))
        if x.op == "load" and inputs[-1] >= {"q_idx", "k_idx"}:
            return True
    return False


@functools.lru_cache(maxsize=1024)
def derived(formula: Formula, wanted: tuple[bool, ...]) -> Partials:
    return partials(formula.program, formula.tensors, wanted)


def hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
