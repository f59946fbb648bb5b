"""A builder of programs: every instruction is added here, with its operands converted, simplified and shared."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from . import ranges
from .operations import ANY, OPERATIONS, SAME
from .program import BOOL, INT32, INT64, INTEGERS, REAL, Instruction, Program, TensorType, number, used
from .ranges import Range

OF_BOOLS = {"add": "or_", "mul": "and_", "minimum": "and_", "maximum": "or_"}  # what PyTorch's mean of bools


class Node(NamedTuple):
    """An instruction of the builder, by its number."""

    n: int
    kind: str


class Builder:
    """A growing list of instructions without duplicates. Methods take and return nodes."""

    def __init__(self, tensors: Sequence[TensorType]):
        self.tensors = tensors
        self.instructions: list[Instruction] = []
        self.numbers: dict[Instruction, int] = {}
        self.ranges: dict[int, Range] = {}  # ranges of integers

    def program(self, *outputs: Node) -> Program:
        return used(self.instructions, [x.n for x in outputs])

    def add(self, instruction: Instruction) -> Node:
        if instruction not in self.numbers:
            if instruction.kind in INTEGERS:
                self.ranges[len(self.instructions)] = self.range_of(instruction)
            self.numbers[instruction] = len(self.instructions)
            self.instructions.append(instruction)
        return Node(self.numbers[instruction], instruction.kind)

    def range_of(self, x: Instruction) -> Range:
        """The range of an instruction's results, which are integers."""
        match x.op:
            case "constant":
                return Range(int(x.value), int(x.value))
            case "input":
                return ranges.INDEX_RANGE
            case "size":
                return ranges.SIZE_RANGE
            case "load":
                return ranges.of_dtype(self.tensors[x.value].dtype)
            case "cast":
                return self.ranges.get(x.operands[0], ranges.of_kind(x.kind, self.instructions[x.operands[0]].kind))
        numbers = x.operands[1:] if x.op == "where" else x.operands
        return ranges.of_result(x.op, tuple(self.ranges[n] for n in numbers))

    def replayed(self, program: Program) -> list[Node]:
        """The results of a program, whose instructions are added as they are."""
        nodes: list[Node] = []
        for x in program.instructions:
            nodes.append(self.add(x._replace(operands=tuple(nodes[n].n for n in x.operands))))
        return [nodes[n] for n in program.outputs]

    def again(self, x: Instruction, operands: list[Node]) -> Node:
        """An instruction of a program on results of this builder, whose ranges tell how wide its integers are."""
        match x.op:
            case "constant" | "input" | "size" | "load":
                return self.add(x._replace(operands=tuple(y.n for y in operands)))
            case "cast":
                integers = x.kind in INTEGERS and operands[0].kind in INTEGERS
                return operands[0] if integers else self.cast(operands[0], x.kind)
            case "round":
                return self.round(operands[0], x.value)
        return self.op(x.op, *operands)

    # Leaves -----------------------------------------------------------------------------------------------------------

    def constant(self, value: float | int | bool) -> Node:
        if isinstance(value, bool):
            return self.add(Instruction("constant", BOOL, value=repr(value)))
        if isinstance(value, int):
            return self.add(Instruction("constant", Range(value, value).kind, value=repr(value)))
        return self.add(Instruction("constant", REAL, value=repr(float(value))))

    def input(self, name: str) -> Node:
        return self.add(Instruction("input", REAL if name == "score" else INT32, value=name))

    def size(self, tensor: int, dimension: int) -> Node:
        return self.add(Instruction("size", INT32, value=(tensor, dimension)))

    def load(self, tensor: int, indices: list[Node]) -> Node:
        """An element of a captured tensor. An index below 0 counts from the end, as in PyTorch."""
        wrapped = []
        for dimension, index in enumerate(indices):
            if self.ranges[index.n].low < 0:
                from_end = self.op("add", index, self.size(tensor, dimension))
                index = self.op("where", self.op("lt", index, self.constant(0)), from_end, index)
            wrapped.append(index.n)
        kind = ranges.kind_of_elements(self.tensors[tensor].dtype)
        return self.add(Instruction("load", kind, tuple(wrapped), tensor))

    # Conversions ------------------------------------------------------------------------------------------------------

    def cast(self, x: Node, kind: str) -> Node:
        if x.kind == kind:
            return x
        source = self.instructions[x.n]
        if source.op == "constant" and kind == REAL:
            return self.constant(float(number(source)))
        if source.op == "constant" and kind in INTEGERS and x.kind != REAL:
            return self.add(Instruction("constant", kind, value=repr(int(number(source)))))
        return self.add(Instruction("cast", kind, (x.n,)))

    def as_integer(self, x: Node) -> Node:
        return x if x.kind in INTEGERS else self.cast(x, INT32 if x.kind == BOOL else INT64)

    def round(self, x: Node, dtype: str) -> Node:
        """A real rounded to a narrower dtype."""
        return self.add(Instruction("round", REAL, (x.n,), dtype))

    def alike(self, *operands: Node, least: str = BOOL) -> list[Node]:
        """Operands of one kind: REAL if any is, else an integer if any is. `least` is what they become at least."""
        kinds = {x.kind for x in operands} | {least}
        kind = next(k for k in (REAL, INT64, INT32, BOOL) if k in kinds)
        return [self.cast(x, kind) for x in operands]

    # Operations -------------------------------------------------------------------------------------------------------

    def op(self, name: str, *operands: Node) -> Node:
        """An operation on operands of any kinds that it takes, as PyTorch promotes them."""
        if all(x.kind == BOOL for x in operands):
            name = OF_BOOLS.get(name, name)
        operation = OPERATIONS[name]
        if name == "where":
            condition, *rest = operands
            chosen = [self.cast(condition, BOOL), *self.alike(*rest)]
        elif operation.operands == ANY:
            logical = ("and_", "or_", "xor", "not_", "eq", "ne", "where")
            chosen = self.alike(*operands, least=BOOL if name in logical else INT32)
        else:
            chosen = [self.cast(x, operation.operands) for x in operands]
        simpler = self.simplified(name, chosen)
        return self.emitted(name, chosen) if simpler is None else simpler

    def emitted(self, name: str, operands: list[Node]) -> Node:
        kind = OPERATIONS[name].result
        kind = operands[-1].kind if kind == SAME else kind
        if kind not in INTEGERS:
            return self.add(Instruction(name, kind, tuple(x.n for x in operands)))
        numbers = [self.ranges[x.n] for x in (operands[1:] if name == "where" else operands)]
        range_ = ranges.of_result(name, tuple(numbers))
        kind = INT64 if INT64 in (range_.kind, kind) else INT32
        wide = [x if x.kind == BOOL else self.cast(x, kind) for x in operands]
        value = numbers[0].low >= 0 and numbers[1].low > 0 if name in ("floordiv", "mod") else None
        result = self.add(Instruction(name, kind, tuple(x.n for x in wide), value))
        return self.cast(result, range_.kind)  # back to 32 bits where a 64-bit operation's results fit

    # Simplification ---------------------------------------------------------------------------------------------------

    def simplified(self, name: str, operands: list[Node]) -> Node | None:
        """A node with the value that the operation has, for every value of its operands, infinities and NaN included;
        `None` if there is no simpler one.
        """
        constants = [self.constant_of(x) for x in operands]
        x, y = operands[0], operands[-1]
        a, b = constants[0], constants[-1]
        if name == "where":
            if a is not None:
                return operands[1] if a else operands[2]
            return y if operands[1] == y else None
        if x.kind != BOOL and None not in constants:
            value = folded(name, [c for c in constants if c is not None])
            return None if value is None else self.constant(value)
        if name in ("add", "mul", "and_", "or_") and a is not None and b is None:
            return self.op(name, y, x)
        match name:
            case "add" | "sub" if b == 0 and (x.kind != REAL or math.copysign(1, b) == (1 if name == "sub" else -1)):
                return x
            case "mul" | "div" if b == 1:
                return x
            case "mul" if b == -1:
                return self.op("neg", x)
            case "mul" if b == 0 and x.kind in INTEGERS:
                return y
            case "floordiv" if b == 1:
                return x
            case "neg" if self.instructions[x.n].op == "neg":
                return Node(self.instructions[x.n].operands[0], x.kind)
            case "and_" if x.kind == BOOL and b is not None:
                return x if b else y
            case "or_" if x.kind == BOOL and b is not None:
                return y if b else x
            case "not_" if x.kind == BOOL and a is not None:
                return self.constant(not a)
            case "and_" | "or_" | "minimum" | "maximum" if x == y:
                return x
        return None

    def constant_of(self, x: Node) -> float | int | bool | None:
        instruction = self.instructions[x.n]
        return number(instruction) if instruction.op == "constant" else None


def folded(name: str, operands: list[float]) -> float | None:
    """The value of an operation on constants; `None` where it is left to the backend."""
    a, b = operands[0], operands[-1]
    match name:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "neg":
            return -a
        case "floordiv" | "mod" if b != 0:
            return a // b if name == "floordiv" else a % b
    return None
