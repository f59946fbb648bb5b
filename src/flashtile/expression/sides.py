"""Formulas of pairs far from the diagonal, where distances are clipped, buckets are full and comparisons decided.

Most blocks of pairs are far from the diagonal. On each side of it, the sign of a distance is known, and so is whatever
follows from a distance of at least `reach`: an index of a clipped distance is a number there, and its element is the
same for all pairs of a head.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from . import ranges
from .builder import Builder, Node
from .formula import Formula
from .program import INTEGERS, REAL, Instruction, number
from .ranges import Range

LONGEST_REACH = 1024
ROUNDING = 1e-5  # relative error of a backend's functions of reals, with room
PAIR = frozenset(("q_idx", "k_idx"))


class Sides(NamedTuple):
    """A formula on both sides of the diagonal."""

    before: Formula  # formula of pairs with `q_idx - k_idx >= reach`
    after: Formula  # formula of pairs with `k_idx - q_idx >= reach`


@functools.lru_cache(maxsize=1024)
def reach_of(formula: Formula) -> int | None:
    """The shortest reach with the simplest formulas of both sides; `None` if they are not simpler than the formula, or
    each still loads an element for each pair: branches to them cost more than the operations that they lack.
    """
    found, fewest = None, 2 * operations_of_pairs(formula)
    reach = 1
    while reach <= LONGEST_REACH:
        both = sides(formula, reach)
        count = sum(operations_of_pairs(x) for x in both)
        if count < fewest and not all(loads_of_pairs(x) for x in both):
            found, fewest = reach, count
        reach *= 2
    return found


def sides(formula: Formula, reach: int) -> Sides:
    """The formulas of both sides from a distance on."""
    return Sides(
        on_side(formula, Range(reach, ranges.INDEX_RANGE.high)),
        on_side(formula, Range(-ranges.INDEX_RANGE.high, -reach)),
    )


def operations_of_pairs(formula: Formula) -> int:
    """Number of operations that depend on the query's and the key's position."""
    return len(instructions_of_pairs(formula))


def loads_of_pairs(formula: Formula) -> int:
    """Number of loads among these operations."""
    return sum(x.op == "load" for x in instructions_of_pairs(formula))


def instructions_of_pairs(formula: Formula) -> list[Instruction]:
    """The instructions whose results depend on the query's and the key's position."""
    inputs: list[frozenset[str]] = []
    for x in formula.program.instructions:
        own = frozenset([x.value]) if x.op == "input" else frozenset[str]()
        inputs.append(own.union(*(inputs[n] for n in x.operands)))
    return [x for x, of in zip(formula.program.instructions, inputs, strict=True) if of >= PAIR]


def on_side(formula: Formula, distance: Range) -> Formula:
    """The formula of pairs whose `q_idx - k_idx` is in a range."""
    builder = SideBuilder(formula, distance)
    nodes: list[Node] = []
    for x in formula.program.instructions:
        nodes.append(builder.again(x, [nodes[n] for n in x.operands]))
    return formula._replace(program=builder.program(*(nodes[n] for n in formula.program.outputs)))


class Linear(NamedTuple):
    """`q * q_idx + k * k_idx + c`."""

    q: int
    k: int
    c: int


class SideBuilder(Builder):
    """A builder that knows the range of distances, and replaces what is the same for all of them by a constant."""

    def __init__(self, formula: Formula, distance: Range):
        super().__init__(formula.tensors)
        self.distance = distance
        self.linear: dict[int, Linear] = {}  # forms of integers
        self.reals: dict[int, tuple[float, float]] = {}  # bounds of reals that depend on integers alone

    def again(self, x: Instruction, operands: list[Node]) -> Node:
        """An instruction of the formula on results of this builder."""
        return self.known(self.cast(operands[0], x.kind)) if x.op == "cast" else super().again(x, operands)

    def add(self, instruction: Instruction) -> Node:
        node = super().add(instruction)
        if node.kind in INTEGERS and node.n not in self.linear:
            self.note_integer(node, instruction)
        elif node.kind == REAL and node.n not in self.reals:
            self.note_real(node, instruction)
        return node

    def emitted(self, name: str, operands: list[Node]) -> Node:
        return self.known(super().emitted(name, operands))

    def known(self, x: Node) -> Node:
        """A constant in place of an integer that has one value."""
        if x.kind in INTEGERS and self.ranges[x.n].low == self.ranges[x.n].high:
            return self.cast(self.constant(self.ranges[x.n].low), x.kind)
        return x

    def note_integer(self, node: Node, x: Instruction) -> None:
        """The linear form of an integer, and its range if that follows from the distance."""
        value = linear_form(x, self.linear)
        if value is not None:
            self.linear[node.n] = value
            by_distance = self.range_of_linear(value)
            if by_distance is not None:
                self.ranges[node.n] = by_distance
        if x.op == "cast" and x.operands[0] in self.reals:
            low, high = self.reals[x.operands[0]]
            if max(abs(low), abs(high)) < 2**30:
                self.ranges[node.n] = Range(int(low), int(high))

    def range_of_linear(self, x: Linear) -> Range | None:
        """The range of a multiple of the distance, and a number."""
        if x.q != -x.k or x.q not in (-1, 0, 1):
            return None
        low, high = self.distance if x.q > 0 else (-self.distance.high, -self.distance.low)
        return Range(x.c, x.c) if x.q == 0 else Range(low + x.c, high + x.c)

    def note_real(self, node: Node, x: Instruction) -> None:
        """Bounds of a real that grows with each of its operands."""
        if x.op == "constant":
            value = float(number(x))
            bounds = (value, value)
        elif x.op == "cast" and x.operands[0] in self.ranges:
            bounds = (float(self.ranges[x.operands[0]].low), float(self.ranges[x.operands[0]].high))
        elif x.op in MONOTONIC and all(n in self.reals for n in x.operands):
            bounds = bounds_of(x.op, [self.reals[n] for n in x.operands])
        else:
            return
        if all(math.isfinite(y) for y in bounds):
            self.reals[node.n] = (bounds[0] - abs(bounds[0]) * ROUNDING, bounds[1] + abs(bounds[1]) * ROUNDING)

    def simplified(self, name: str, operands: list[Node]) -> Node | None:
        simpler = super().simplified(name, operands)
        if simpler is not None or operands[0].kind not in INTEGERS:
            return simpler
        a, b = self.ranges[operands[0].n], self.ranges[operands[-1].n]
        match name:
            case "abs" if a.low >= 0:
                return operands[0]
            case "abs" if a.high <= 0:
                return self.op("neg", operands[0])
            case "minimum" | "maximum" if a.high <= b.low or b.high <= a.low:
                return operands[0] if (a.high <= b.low) == (name == "minimum") else operands[-1]
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne":
                holds = self.comparison(name, operands)
                return None if holds is None else self.constant(holds)
        return None

    def comparison(self, name: str, operands: list[Node]) -> bool | None:
        """Whether a comparison holds for all distances; `None` if that differs, or is not known."""
        a, b = self.ranges[operands[0].n], self.ranges[operands[1].n]
        rest = Range(a.low - b.high, a.high - b.low)
        forms = [self.linear.get(x.n) for x in operands]
        if forms[0] is not None and forms[1] is not None:
            rest = self.range_of_linear(difference(forms[0], forms[1])) or rest
        return sign_of_comparison(name, rest)


def linear_form(x: Instruction, linear: Mapping[int, Linear]) -> Linear | None:
    """The linear form of an integer, from its operands' forms; `None` if it has none."""
    own = [linear.get(n) for n in x.operands]
    match x.op, own:
        case "constant", _ if x.kind in INTEGERS:
            return Linear(0, 0, int(x.value))
        case "input", _ if x.value in PAIR:
            return Linear(int(x.value == "q_idx"), int(x.value == "k_idx"), 0)
        case "cast", [Linear() as a] if x.kind in INTEGERS:
            return a
        case "neg", [Linear() as a]:
            return difference(Linear(0, 0, 0), a)
        case "add", [Linear() as a, Linear() as b]:
            return difference(a, difference(Linear(0, 0, 0), b))
        case "sub", [Linear() as a, Linear() as b]:
            return difference(a, b)
    return None


def difference(a: Linear, b: Linear) -> Linear:
    return Linear(a.q - b.q, a.k - b.k, a.c - b.c)


def sign_of_comparison(name: str, x: Range) -> bool | None:
    """Whether the comparison of each number of a range with 0 holds."""
    match name:
        case "lt" | "ge":
            holds = True if x.high < 0 else False if x.low >= 0 else None
        case "le" | "gt":
            holds = True if x.high <= 0 else False if x.low > 0 else None
        case _:
            holds = True if x == Range(0, 0) else False if x.low > 0 or x.high < 0 else None
    return holds if holds is None or name in ("lt", "le", "eq") else not holds


MONOTONIC = ("add", "sub", "mul", "div", "neg", "log", "sqrt", "minimum", "maximum", "floor")


def bounds_of(op: str, operands: list[tuple[float, float]]) -> tuple[float, float]:
    """Bounds of an operation's results, infinite where they are not known."""
    (a, b), (c, d) = operands[0], operands[-1]
    unknown = (-math.inf, math.inf)
    match op:
        case "add":
            return a + c, b + d
        case "sub":
            return a - d, b - c
        case "neg":
            return -b, -a
        case "mul":
            products = [x * y for x in (a, b) for y in (c, d)]
            return min(products), max(products)
        case "div":
            quotients = [x / y for x in (a, b) for y in (c, d)] if c > 0 or d < 0 else [*unknown]
            return min(quotients), max(quotients)
        case "log":
            return (math.log(a), math.log(b)) if a > 0 else unknown
        case "sqrt":
            return (math.sqrt(a), math.sqrt(b)) if a > 0 else unknown
        case "minimum":
            return min(a, c), min(b, d)
        case "maximum":
            return max(a, c), max(b, d)
    return math.floor(a), math.floor(b)
