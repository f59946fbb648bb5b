"""Derivatives of programs, as programs: reverse accumulation over the instructions, with PyTorch's conventions at
kinks.

A program computes each pair's result from that pair's inputs alone, so a gradient is a product of the arriving gradient
and a partial derivative: those are what `partials` gives. They can be differentiated again.
"""

import math
from typing import NamedTuple

from .builder import Builder, Node
from .program import REAL, Instruction, Program, TensorType


class Load(NamedTuple):
    """A load of the formula: the tensor, and the partial derivative by the loaded element and its indices, as numbers
    of the program's results.
    """

    tensor: int
    partial: int
    indices: tuple[int, ...]


class Partials(NamedTuple):
    """Partial derivatives of a real result. The first result of `program` is that by the score."""

    program: Program
    loads: tuple[Load, ...]


def partials(program: Program, tensors: tuple[TensorType, ...], wanted: tuple[bool, ...]) -> Partials:
    """Partial derivatives of the program's result by the score and by every load of the wanted tensors."""
    builder = Builder(tensors)
    [result] = builder.replayed(program)
    adjoints = accumulated(builder, result)
    zero = builder.constant(0.0)
    outputs, loads = [zero], []
    for n, adjoint in sorted(adjoints.items()):
        x = builder.instructions[n]
        if x.op == "input":
            outputs[0] = adjoint
        elif x.op == "load" and wanted[x.value]:
            indices = [Node(index, builder.instructions[index].kind) for index in x.operands]
            first = len(outputs)
            loads.append(Load(x.value, first, tuple(range(first + 1, first + 1 + len(indices)))))
            outputs += [adjoint, *indices]
    return Partials(builder.program(*outputs), tuple(loads))


def accumulated(builder: Builder, result: Node) -> dict[int, Node]:
    """The partial derivatives of `result` by every real instruction that it depends on."""
    adjoints = {result.n: builder.constant(1.0)}
    for n in range(result.n, -1, -1):
        if n in adjoints:
            x = builder.instructions[n]
            operands = [Node(m, builder.instructions[m].kind) for m in x.operands]
            for operand, term in zip(operands, terms(builder, x, Node(n, x.kind), operands, adjoints[n]), strict=True):
                if term is not None and operand.kind == REAL:
                    before = adjoints.get(operand.n)
                    adjoints[operand.n] = term if before is None else builder.op("add", before, term)
    return adjoints


def terms(builder: Builder, x: Instruction, result: Node, operands: list[Node], g: Node) -> list[Node | None]:
    """The terms that an operation adds to its operands' derivatives, given its own, `g`."""
    op, constant = builder.op, builder.constant
    if x.kind != REAL or x.op in ("cast", "sign", "floor"):
        return [None] * len(operands)
    a, b = (operands[0], operands[-1]) if operands else (result, result)
    match x.op:
        case "add":
            return [g, g]
        case "sub":
            return [g, op("neg", g)]
        case "mul":
            return [op("mul", g, b), op("mul", g, a)]
        case "div":
            return [op("div", g, b), op("neg", op("mul", g, op("div", result, b)))]
        case "neg":
            return [op("neg", g)]
        case "round":
            return [g]
        case "abs":
            return [op("mul", g, op("sign", a))]
        case "minimum" | "maximum":  # equal operands share the derivative; NaN passes it on to both
            half = op("mul", g, constant(0.5))
            shared = op("where", op("eq", a, b), half, g)
            smaller = op("where", op("gt", a, b), constant(0.0), shared)
            larger = op("where", op("lt", a, b), constant(0.0), shared)
            return [smaller, larger] if x.op == "minimum" else [larger, smaller]
        case "where":
            zero = constant(0.0)
            return [None, op("where", a, g, zero), op("where", a, zero, g)]
        case "exp":
            return [op("mul", g, result)]
        case "log":
            return [op("div", g, a)]
        case "tanh":
            return [op("mul", g, op("sub", constant(1.0), op("mul", result, result)))]
        case "sigmoid":
            return [op("mul", g, op("mul", result, op("sub", constant(1.0), result)))]
        case "erf":
            bell = op("exp", op("neg", op("mul", a, a)))
            return [op("mul", g, op("mul", bell, constant(2 / math.sqrt(math.pi))))]
        case "sqrt":
            return [op("div", g, op("mul", result, constant(2.0)))]
        case "rsqrt":
            cube = op("mul", op("mul", result, result), result)
            return [op("mul", g, op("mul", cube, constant(-0.5)))]
    return [None] * len(operands)
