"""What a bare function of pairs reads, so that a later call with the same reads needs no trace.

A trace runs the function, so whatever it looks at may decide the formula. For functions that look at little, all of it
is compared instead: the code, and the values of its variables. Tensors count by their place only, since a formula takes
their values as inputs.
"""

import builtins
import dis
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .content import CONSTANTS
from .functions import FUNCTIONS

# Operations after which a function is more than an expression of what it reads.
EFFECTS = (
    "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "STORE_DEREF", "STORE_NAME", "STORE_SLICE", "DELETE_", "IMPORT_",
    "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_BUILD_CLASS", "LOAD_SUPER", "MAKE_FUNCTION", "YIELD", "SEND", "RAISE",
    "GET_A", "WITH_", "BEFORE_", "SETUP_", "PUSH_EXC",
)  # fmt: skip
BUILTINS = (abs, bool, float, int, len, max, min, pow, range)
MODULES = (torch, math)
ATTRIBUTES = {"shape", "size", "dim", "ndim", "numel", "dtype", *FUNCTIONS, *vars(math)}
ATTRIBUTES |= {name for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
TENSORS = (Tensor, torch.nn.Parameter)
ABSENT = object()


class Reads(NamedTuple):
    """The values of a function's variables, tensors left out."""

    code: types.CodeType
    cells: tuple[Any, ...]
    names: tuple[str, ...]  # names of globals
    values: tuple[Any, ...]
    order: tuple[int, ...]  # which of the variables each of the formula's tensors is

    @classmethod
    def of(cls, fn: Any, tensors: tuple[Tensor, ...]) -> Self | None:
        """The reads of a function whose formula takes these tensors; `None` if it may look at something else."""
        if type(fn) is not types.FunctionType or fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__:
            return None
        names = []
        for one in dis.get_instructions(fn):
            if one.opname.startswith(EFFECTS):
                return None
            if one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and one.argval not in ATTRIBUTES:
                return None
            if one.opname == "LOAD_GLOBAL":
                names.append(one.argval)
        made = cls(fn.__code__, (), tuple(dict.fromkeys(names)), (), ())
        try:
            variables = [*made.variables(fn)]
        except ValueError:  # a variable without a value
            return None
        if not all(map(is_comparable, variables)):
            return None
        ids = [id(x) for x in variables]
        if sorted(map(id, tensors)) != sorted(id(x) for x in variables if isinstance(x, Tensor)):
            return None  # one of them is read by two names, or only its shape is
        known = tuple([type(x) if isinstance(x, Tensor) else x for x in variables])
        count = len(fn.__closure__ or ())
        return made._replace(cells=known[:count], values=known[count:], order=tuple(ids.index(id(x)) for x in tensors))

    def variables(self, fn: types.FunctionType) -> Iterator[Any]:
        """The closure's values, then the globals that it reads."""
        for cell in fn.__closure__ or ():
            yield cell.cell_contents
        names = fn.__globals__
        for name in self.names:
            value = names.get(name, ABSENT)
            yield getattr(builtins, name, ABSENT) if value is ABSENT else value

    def tensors(self, fn: Any) -> tuple[Tensor, ...] | None:
        """The tensors of the formula if `fn` is the same function, with the same values of all that it reads; `None`
        otherwise.
        """
        if type(fn) is not types.FunctionType or fn.__code__ is not self.code or fn.__defaults__ or fn.__kwdefaults__:
            return None
        try:
            variables = [*self.variables(fn)]
        except ValueError:
            return None
        for x, known in zip(variables, (*self.cells, *self.values), strict=True):
            if x is not known and not (type(x) is known if known in TENSORS else equal(x, known)):
                return None
        return tuple([variables[n] for n in self.order])


def equal(x: Any, y: Any) -> bool:
    """Whether two constants are the same. Zeros may differ in their sign, and NaN is equal to nothing."""
    return type(x) is type(y) and isinstance(x, CONSTANTS) and repr(x) == repr(y)


def is_comparable(x: Any) -> bool:
    """Whether a variable's value can be compared with a later call's."""
    if type(x) in TENSORS:
        return not x.__dict__
    if isinstance(x, types.BuiltinFunctionType) and getattr(torch, x.__name__, None) is x:
        return x.__name__ in FUNCTIONS
    return type(x) in CONSTANTS or any(x is y for y in (*MODULES, *BUILTINS))
