"""Score formulas with a long term of the head and the distance alone, as formulas that read this term from a table.

The term has to be the same for all pairs that are far apart, as a bucket of distances is: a table of the near distances
has all of its values then, whatever the sequences' lengths.
"""

import functools
from typing import NamedTuple

from . import ranges
from .builder import Builder, Node
from .formula import Formula
from .program import REAL, Instruction, Program, TensorType, used
from .ranges import Range
from .sides import LONGEST_REACH, PAIR, Linear, difference, linear_form, on_side, operations_of_pairs

LEAST_SAVING = 2  # operations of the formula for each of those with a table
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Tabulated(NamedTuple):
    """A formula with a table, its last tensor `[H, 2 * reach + 1]`: element `[h, d + reach]` is the term of the pairs
    of head `h` with `q_idx - k_idx == d`.
    """

    formula: Formula
    term: Formula  # term of any such pair; it depends on no score
    reach: int


@functools.lru_cache(maxsize=1024)
def tabulated(formula: Formula, dtype: str = "float32") -> Tabulated | None:
    """The formula with a table of this dtype; `None` if it has no such term, or would not become much shorter."""
    terms = terms_of_distance(formula.program)
    if len(terms) != 1:
        return None
    [n] = terms
    term = Formula(used(formula.program.instructions, (n,)), formula.tensors)
    reach = reach_of_constant(term)
    if reach is None:
        return None
    shorter = with_table(formula, n, reach, TensorType(dtype, 2))
    if operations_of_pairs(formula) < LEAST_SAVING * operations_of_pairs(shorter):
        return None
    return Tabulated(shorter, term, reach)


def terms_of_distance(program: Program) -> list[int]:
    """The largest parts that depend on positions by their distance alone, and on the head; empty where one of them is
    no real number.
    """
    instructions = program.instructions
    linear: dict[int, Linear] = {}
    fixed, by_distance = set[int](), set[int]()  # numbers of the head, and those of the distance too
    for n, x in enumerate(instructions):
        form = linear_form(x, linear)
        if form is not None:
            linear[n] = form
        operands = {*x.operands}
        if x.op == "input":
            if x.value == "h":
                fixed.add(n)
        elif operands <= fixed:
            fixed.add(n)
        elif operands <= fixed | by_distance or is_distance(x, linear.get(n), linear):
            by_distance.add(n)
    ends = {*program.outputs}
    for n, x in enumerate(instructions):
        if n not in by_distance:
            ends |= {*x.operands}
    terms = sorted(ends & by_distance)
    return terms if all(instructions[n].kind == REAL for n in terms) else []


def is_distance(x: Instruction, form: Linear | None, linear: dict[int, Linear]) -> bool:
    """Whether an instruction is a multiple of the distance and a number, or compares positions by their distance."""
    if form is None and x.op in COMPARISONS and all(n in linear for n in x.operands):
        form = difference(*(linear[n] for n in x.operands))
    return form is not None and form.q == -form.k != 0


def reach_of_constant(term: Formula) -> int | None:
    """The shortest distance, a power of two, from which a term is the same for all pairs of a side and head."""
    reach = 1
    while reach <= LONGEST_REACH:
        farthest = ranges.INDEX_RANGE.high
        both = (on_side(term, distances) for distances in (Range(reach, farthest), Range(-farthest, -reach)))
        if not any(x.value in PAIR for side in both for x in side.program.instructions if x.op == "input"):
            return reach
        reach *= 2
    return None


def with_table(formula: Formula, term: int, reach: int, table: TensorType) -> Formula:
    """The formula that reads a part of it from a table."""
    builder = Builder((*formula.tensors, table))
    nodes: list[Node] = []
    for n, x in enumerate(formula.program.instructions):
        if n == term:
            distance = builder.op("sub", builder.input("q_idx"), builder.input("k_idx"))
            index = builder.op("add", distance, builder.constant(reach))
            index = builder.op(
                "minimum", builder.op("maximum", index, builder.constant(0)), builder.constant(2 * reach)
            )
            nodes.append(builder.load(len(formula.tensors), [builder.input("h"), index]))
        else:
            nodes.append(builder.add(x._replace(operands=tuple(nodes[m].n for m in x.operands))))
    return Formula(builder.program(*(nodes[n] for n in formula.program.outputs)), tuple(builder.tensors))
