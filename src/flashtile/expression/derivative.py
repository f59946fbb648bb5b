"""Derivatives of programs, as programs: accumulation over the instructions, in reverse for `partials` and forward for
`pushforward`, with PyTorch's conventions at kinks.

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


def pushforward(program: Program, tensors: tuple[TensorType, ...], wanted: tuple[bool, ...]) -> Program:
    """The program with two more results, the partial derivative by the score and the tangent along the wanted tensors,
    whose own tangents are tensors behind `tensors`, in order. A tangent `ds` of the score adds its product with the
    former.
    """
    moving = [n for n, x in enumerate(wanted) if x]
    builder = Builder((*tensors, *(tensors[n] for n in moving)))
    [result] = builder.replayed(program)
    of_score: dict[int, Node] = {}
    of_loads: dict[int, Node] = {}
    for n, x in enumerate(builder.instructions[: result.n + 1]):
        if x.op == "input" and x.value == "score":
            of_score[n] = builder.constant(1.0)
        elif x.op == "load" and wanted[x.value]:
            of_loads[n] = builder.add(x._replace(value=len(tensors) + moving.index(x.value)))
    return builder.program(result, along(builder, result, of_score), along(builder, result, of_loads))


def along(builder: Builder, result: Node, tangents: dict[int, Node]) -> Node:
    """The tangent of `result`, from the tangents of instructions that it depends on."""
    for n in range(result.n + 1):
        x = builder.instructions[n]
        if n in tangents or not any(m in tangents for m in x.operands):
            continue
        operands = [Node(m, builder.instructions[m].kind) for m in x.operands]
        zero, of_operands = builder.constant(0.0), [tangents.get(m) for m in x.operands]
        if x.op == "where":  # a choice, not a product with 0: the tangent that is not chosen may be NaN
            tangents[n] = builder.op("where", operands[0], *(zero if y is None else y for y in of_operands[1:]))
            continue
        factors = terms(builder, x, Node(n, x.kind), operands, builder.constant(1.0))
        for factor, tangent in zip(factors, of_operands, strict=True):
            if factor is not None and tangent is not None:
                term = builder.op("mul", factor, tangent)
                tangents[n] = builder.op("add", tangents[n], term) if n in tangents else term
    return tangents.get(result.n, builder.constant(0.0))


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
