"""The operations of programs: their operands, their results, their text and their values as torch functions."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .program import BOOL, REAL

SAME, ANY = "same", "any"


class Operation(NamedTuple):
    """One operation. `operands` is their kind: REAL, BOOL, or any one kind of numbers, the same for all; `result` is a
    kind, or SAME. `text` is a format of the operands' texts, with the precedence of Python's operator of that form.
    """

    operands: str
    result: str
    text: str
    precedence: int
    torch: Callable[..., Any]


CALL, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARISON = range(8, 0, -1)


def infix(symbol: str, precedence: int, operands: str, result: str, fn: Callable[..., Any]) -> Operation:
    return Operation(operands, result, f"{{}} {symbol} {{}}", precedence, fn)


def function(name: str, count: int, operands: str, fn: Callable[..., Any], result: str = SAME) -> Operation:
    return Operation(operands, result, f"{name}({', '.join(['{}'] * count)})", CALL, fn)


def real(name: str, fn: Callable[..., Any]) -> Operation:
    """A function of one real."""
    return function(name, 1, REAL, fn)


OPERATIONS = {
    "add": infix("+", SUM, ANY, SAME, operator.add),
    "sub": infix("-", SUM, ANY, SAME, operator.sub),
    "mul": infix("*", PRODUCT, ANY, SAME, operator.mul),
    "div": infix("/", PRODUCT, REAL, SAME, operator.truediv),
    "floordiv": infix("//", PRODUCT, ANY, SAME, operator.floordiv),  # for integers; rounds down
    "mod": infix("%", PRODUCT, ANY, SAME, operator.mod),  # for integers; has the divisor's sign
    "neg": Operation(ANY, SAME, "-{}", UNARY, operator.neg),
    "abs": function("abs", 1, ANY, torch.abs),
    "sign": function("sign", 1, ANY, torch.sign),  # NaN of NaN
    "minimum": function("minimum", 2, ANY, torch.minimum),  # NaN if either is
    "maximum": function("maximum", 2, ANY, torch.maximum),
    "where": function("where", 3, ANY, torch.where),  # (condition of BOOL, x, y)
    "exp": real("exp", torch.exp),
    "log": real("log", torch.log),
    "tanh": real("tanh", torch.tanh),
    "sigmoid": real("sigmoid", torch.sigmoid),
    "erf": real("erf", torch.erf),
    "sqrt": real("sqrt", torch.sqrt),
    "rsqrt": real("rsqrt", torch.rsqrt),
    "floor": real("floor", torch.floor),
    "lt": infix("<", COMPARISON, ANY, BOOL, operator.lt),
    "le": infix("<=", COMPARISON, ANY, BOOL, operator.le),
    "gt": infix(">", COMPARISON, ANY, BOOL, operator.gt),
    "ge": infix(">=", COMPARISON, ANY, BOOL, operator.ge),
    "eq": infix("==", COMPARISON, ANY, BOOL, operator.eq),
    "ne": infix("!=", COMPARISON, ANY, BOOL, operator.ne),  # True of NaN
    "and_": infix("&", AND, ANY, SAME, operator.and_),  # for BOOL, or the bits of integers
    "or_": infix("|", OR, ANY, SAME, operator.or_),
    "xor": infix("^", XOR, ANY, SAME, operator.xor),
    "not_": Operation(ANY, SAME, "~{}", UNARY, operator.invert),
}  # fmt: skip
