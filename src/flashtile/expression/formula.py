"""Formulas: the traced programs of score_mod and mask functions, as values that name themselves."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import torch_code
from .derivative import Partials, partials, pushforward
from .functions import ComputedError, UntraceableError
from .inlined import inlined
from .parse import parsed
from .program import BOOL, Instruction, Program, TensorType, type_of
from .purity import SCORE_MOD, Role
from .stand_ins import Standing
from .text import text
from .trace import trace

PREFIX = "formula "  # prefix of keys that are formulas


class Formula(NamedTuple):
    """A traced function. Equal formulas need the same code, whatever the values and sizes of their tensors."""

    program: Program
    tensors: tuple[TensorType, ...]

    def partials(self, wanted: Sequence[bool] = ()) -> Partials:
        """Partial derivatives by the score and by every load of the wanted tensors; of none by default."""
        return derived(self, (*wanted, *[False] * (len(self.tensors) - len(wanted))))

    def pushforward(self, wanted: Sequence[bool] = ()) -> "Formula":
        """The formula with the results of `derivative.pushforward`; tangents of the wanted tensors follow its own."""
        return pushed(self, (*wanted, *[False] * (len(self.tensors) - len(wanted))))

    @property
    def key(self) -> str:
        """The whole formula as text, from which `of_key` makes it again in any process."""
        return PREFIX + json.dumps([self.tensors, *self.program], separators=(",", ":"))

    @classmethod
    def of_key(cls, key: str) -> "Formula":
        """The formula of a key.

        Raises:
            AttentionError: the text is not one that `key` gives.
        """
        return cls(*parsed(key.removeprefix(PREFIX)))

    def __call__(self, *arguments: Tensor) -> Tensor:
        """The results for a tile by torch operations: the new score, from `(score, b, h, q_idx, k_idx, *tensors)`; of a
        mask, whether pairs are visible, from the arguments after the score.
        """
        own = 5 - self.is_mask
        if any(isinstance(x, Standing) for x in arguments):  # another function calls it, and is traced
            return inlined(self.program, arguments[:own], arguments[own:])  # type: ignore[return-value]
        if not self.is_mask:
            return self.run(arguments[:own], arguments[own:])
        wide = any(x.dtype is torch.float64 for x in arguments)
        score = arguments[0].new_zeros((), dtype=torch.float64 if wide else torch.float32)  # tells the dtype of reals
        return self.run((score, *arguments[:own]), arguments[own:])

    def run(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """The results for `(score, b, h, q_idx, k_idx)`. Reals have the score's dtype."""
        return torch_code.run(self.program, inputs, tensors)[0]

    @property
    def is_mask(self) -> bool:
        return self.program.kinds()[0] == BOOL

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations."""
        return frozenset(x.op for x in self.program.instructions)

    def among(self, before: Sequence[TensorType], after: Sequence[TensorType] = ()) -> "Formula":
        """The formula of a call that captures other tensors too, before and after its own."""

        def moved(x: Instruction) -> Instruction:
            if x.op == "load":
                return x._replace(value=x.value + len(before))
            return x._replace(value=(x.value[0] + len(before), x.value[1])) if x.op == "size" else x

        instructions = tuple(moved(x) for x in self.program.instructions) if before else self.program.instructions
        return Formula(self.program._replace(instructions=instructions), (*before, *self.tensors, *after))

    def __str__(self) -> str:
        return text(self.program)


class Untraced(NamedTuple):
    """Why a function has no formula; `each_call`, it has one for a single call."""

    reason: str
    each_call: bool = False

    def __str__(self) -> str:
        return f"not traced: {self.reason}"


def formula_of(
    fn: Callable[..., Any], tensors: Sequence[Tensor] = (), role: Role = SCORE_MOD, *, once: bool = False
) -> tuple[Formula, list[Tensor]] | Untraced:
    """The formula of a function, and all tensors that it reads: its arguments first. `once`, it is for later calls too.

    Raises:
        ArgumentError: the function draws random numbers, or writes into a tensor that it has not made.
    """
    try:
        program, found = trace(fn, tensors, role, once=once)
    except UntraceableError as error:
        return Untraced(str(error), isinstance(error, ComputedError))
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


@functools.lru_cache(maxsize=1024)
def pushed(formula: Formula, wanted: tuple[bool, ...]) -> Formula:
    moving = [x for x, moves in zip(formula.tensors, wanted, strict=True) if moves]
    return Formula(pushforward(formula.program, formula.tensors, wanted), (*formula.tensors, *moving))
