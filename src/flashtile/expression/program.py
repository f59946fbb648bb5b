"""Programs of score formulas: straight-line code over one pair of a query and a key.

A traced formula is a tuple of instructions, each on results of earlier ones, so that a shared subexpression is computed
once. Programs are values: equal ones compare equal, `repr` is complete and the same in each process, and pickling
needs no code. A backend turns a program into its own code by an `Emitter`; nothing else about it is private to a
backend.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

REAL, INT32, INT64, BOOL = "real", "int32", "int64", "bool"  # kinds of results; REAL is the accumulation dtype
INTEGERS = (INT32, INT64)
INPUTS = ("score", "b", "h", "q_idx", "k_idx")


class TensorType(NamedTuple):
    """Type of a captured tensor in a program: its dtype, as `float32`, and its number of dimensions."""

    dtype: str
    ndim: int


def type_of(x: Tensor) -> TensorType:
    return TensorType(str(x.dtype).removeprefix("torch."), x.dim())


class Instruction(NamedTuple):
    """One operation of `operations.py`, or a leaf:

    constant    a number; `value` is its `repr`
    input       the score, or an index of the pair; `value` is its name
    size        the size of a captured tensor's dimension; `value` is `(tensor, dimension)`
    load        an element of the captured tensor `value`, with an operand for each dimension. Outside of the tensor a
                real is NaN, another kind 0.
    cast        the operand as another kind; from REAL toward zero, to BOOL whether it is not 0
    round       a real rounded to the narrower dtype `value`

    The `value` of `floordiv` and `mod` is whether no operand is ever below 0, and the divisor is not 0.
    """

    op: str
    kind: str
    operands: tuple[int, ...] = ()
    value: Any = None


class Program(NamedTuple):
    """Instructions, and the numbers of those that are the results."""

    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def kinds(self) -> tuple[str, ...]:
        """The kinds of the results."""
        return tuple(self.instructions[n].kind for n in self.outputs)


class Emitter(Protocol):
    """A backend's code for the leaves. It has a method for each operation of `operations.OPERATIONS` too, which takes
    the operands' code and gives the result's. Operands have one kind, but for the condition of `where`.
    """

    def constant(self, value: float, kind: str) -> Any: ...
    def input(self, name: str) -> Any: ...
    def size(self, tensor: int, dimension: int) -> Any: ...
    def load(self, tensor: int, indices: Sequence[Any]) -> Any: ...
    def cast(self, x: Any, source: str, kind: str) -> Any: ...
    def round(self, x: Any, dtype: str) -> Any: ...
    def floordiv(self, x: Any, y: Any, nonnegative: bool) -> Any: ...  # whether x and y never are below 0, nor y is 0
    def mod(self, x: Any, y: Any, nonnegative: bool) -> Any: ...


def emit(program: Program, emitter: Any) -> tuple[Any, ...]:
    """The results of a program in an emitter's code."""
    values: list[Any] = []
    for x in program.instructions:
        kinds = [program.instructions[n].kind for n in x.operands]
        values.append(emit_instruction(x, [values[n] for n in x.operands], kinds, emitter))
    return tuple(values[n] for n in program.outputs)


def emit_instruction(x: Instruction, operands: list[Any], kinds: Sequence[str], emitter: Any) -> Any:
    """One instruction in an emitter's code, from its operands' code and kinds."""
    match x.op:
        case "constant":
            return emitter.constant(number(x), x.kind)
        case "input":
            return emitter.input(x.value)
        case "size":
            return emitter.size(*x.value)
        case "load":
            return emitter.load(x.value, operands)
        case "cast":
            return emitter.cast(operands[0], kinds[0], x.kind)
        case "round":
            return emitter.round(operands[0], x.value)
        case "floordiv" | "mod":
            return getattr(emitter, x.op)(*operands, x.value)
    return getattr(emitter, x.op)(*operands)


def joined(*programs: Program) -> Program:
    """The program with the results of all, in order. Instructions that are the same are shared."""
    numbers: dict[Instruction, int] = {}
    outputs: list[int] = []
    for program in programs:
        new: list[int] = []
        for x in program.instructions:
            x = x._replace(operands=tuple(new[n] for n in x.operands))
            new.append(numbers.setdefault(x, len(numbers)))
        outputs += [new[n] for n in program.outputs]
    return Program(tuple(numbers), tuple(outputs))


def number(constant: Instruction) -> float | int | bool:
    """The number of a constant."""
    if constant.kind == REAL:
        return float(constant.value)
    return constant.value == "True" if constant.kind == BOOL else int(constant.value)


def used(instructions: Sequence[Instruction], outputs: Sequence[int]) -> Program:
    """The program of what `outputs` need, renumbered."""
    needed = set(outputs)
    for n in range(len(instructions) - 1, -1, -1):
        if n in needed:
            needed.update(instructions[n].operands)
    order = sorted(needed)
    new = {old: n for n, old in enumerate(order)}
    kept = (instructions[old] for old in order)
    return Program(
        tuple(x._replace(operands=tuple(new[n] for n in x.operands)) for x in kept), tuple(new[n] for n in outputs)
    )
