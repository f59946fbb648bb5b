"""Formulas that commute with positive factors of the score: kernels may apply the softmax's scale after them."""

import functools
import math

from .formula import Formula
from .program import Program, number

FREE, HOMOGENEOUS, BOTH, OTHER = "free", "homogeneous", "both", "other"  # kinds of a value, as a function of the score


@functools.lru_cache(maxsize=1024)
def is_homogeneous(formula: Formula) -> bool:
    """Whether `f(c * score) = c * f(score)` for every factor c > 0. Conditions on the score are taken for others."""
    return degrees(formula.program)[formula.program.outputs[0]] in (HOMOGENEOUS, BOTH)


def degrees(program: Program) -> list[str]:
    """FREE values do not depend on the score, HOMOGENEOUS ones are multiplied with it; 0 and infinities are BOTH."""
    found: list[str] = []
    for x in program.instructions:
        operands = [found[n] for n in x.operands]
        if x.op == "input" and x.value == "score":
            found.append(HOMOGENEOUS)
        elif x.op == "constant" and x.kind == "real":
            value = float(number(x))
            found.append(FREE if math.isfinite(value) and value != 0 else BOTH)
        elif all(degree in (FREE, BOTH) for degree in operands):
            found.append(FREE)
        else:
            found.append(degree_of(x.op, operands))
    return found


def degree_of(op: str, operands: list[str]) -> str:
    """The degree of an operation's result, where an operand depends on the score."""
    if op == "where":
        condition, *operands = operands
        if condition != FREE:
            return OTHER
    if op in ("mul", "div"):
        first, second = operands
        scaled = first == HOMOGENEOUS and second in (FREE, BOTH)
        return HOMOGENEOUS if scaled or (op == "mul" and degree_of("div", operands[::-1]) == HOMOGENEOUS) else OTHER
    if op in ("where", "add", "sub", "neg", "abs", "minimum", "maximum"):
        return HOMOGENEOUS if all(degree in (HOMOGENEOUS, BOTH) for degree in operands) else OTHER
    return OTHER


@functools.lru_cache(maxsize=1024)
def is_head_factor(formula: Formula) -> bool:
    """Whether the formula is the score times a number of the head: its derivative is that number."""
    program = formula.program
    inputs: list[frozenset[str]] = []
    scaled: list[bool] = []  # whether a value is the score times a number of the head
    for x in program.instructions:
        own = frozenset([x.value]) if x.op == "input" else frozenset[str]()
        inputs.append(own.union(*(inputs[n] for n in x.operands)))
        factors = [inputs[n] <= {"b", "h"} for n in x.operands]
        match x.op, [scaled[n] for n in x.operands]:
            case "input", _:
                scaled.append(x.value == "score")
            case ("neg", [True]) | ("neg" | "mul" | "div", [True, _]):
                scaled.append(all(factors[1:]))
            case "mul", [_, True]:
                scaled.append(factors[0])
            case _:
                scaled.append(False)
    return scaled[program.outputs[0]]
