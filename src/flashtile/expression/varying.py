"""Numbers that change from call to call, as an annealed temperature or a document's length in a closure: from its
second value on, a number is read as data, so that no further kernels are compiled for it.
"""

import functools
from typing import NamedTuple

from .band import bands_of
from .blocks.analysis import read_by
from .builder import Builder, Node
from .formula import Formula
from .program import INTEGERS, REAL, Instruction, TensorType, number
from .sides import reach_of
from .tabulated import tabulated

MOST = 1024  # functions

Numbers = tuple[float | int, ...]


class Seen(NamedTuple):
    """What the numbers of a function have been."""

    first: Formula  # whose numbers stay constants
    varying: set[int]  # instructions of those that differed


_seen: dict[Formula, Seen] = {}  # by the formula without its numbers


def with_arguments(formula: Formula, reals: str) -> tuple[Formula, Numbers]:
    """The formula with the numbers that change as its last tensors, without dimensions, and their values. Those that
    are real have the dtype `reals`.

    The trace of each call gives the formula first, so a number that decides what a function does is in the rest of it.
    """
    instructions = formula.program.instructions
    without = tuple([x._replace(value="") if is_number(x) else x for x in instructions])
    key = formula._replace(program=formula.program._replace(instructions=without))
    seen = _seen.get(key)
    if seen is None:
        if len(_seen) >= MOST:
            _seen.pop(next(iter(_seen)), None)
        seen = _seen.setdefault(key, Seen(formula, set()))
    pairs = zip(instructions, seen.first.program.instructions, strict=True)
    differ = {n for n, (x, y) in enumerate(pairs) if x.value != y.value}
    if differ:
        differ -= constants_of_kernels(seen.first)
    if not differ:
        return formula, ()
    seen.varying.update(differ)
    return replaced(formula, sorted(seen.varying), reals)


def is_number(x: Instruction) -> bool:
    return x.op == "constant" and x.kind in (REAL, *INTEGERS)


@functools.lru_cache(maxsize=MOST)
def constants_of_kernels(formula: Formula) -> frozenset[int]:
    """Numbers that are worth more as constants: a band's, which is no part of a kernel's code; those that divide
    integers; and the integers of a score_mod that is simpler far from the diagonal because they are known.
    """
    instructions = formula.program.instructions
    fixed = {x.operands[1] for x in instructions if x.op in ("floordiv", "mod")}
    if formula.is_mask:
        fixed.update(m for n in bands_of(formula) for m in read_by(instructions, n))
        return frozenset(fixed)
    integers = [n for n, x in enumerate(instructions) if x.op == "constant" and x.kind in INTEGERS]
    other, _ = replaced(formula, integers, "float32")
    if reach_of(other) != reach_of(formula) or (tabulated(other) is None) != (tabulated(formula) is None):
        fixed.update(integers)
    return frozenset(fixed)


def replaced(formula: Formula, places: list[int], reals: str) -> tuple[Formula, Numbers]:
    """The formula that reads some of its constants from tensors. Its integers may need more bits then."""
    instructions = formula.program.instructions
    types = [TensorType(reals if instructions[n].kind == REAL else instructions[n].kind, 0) for n in places]
    builder = Builder((*formula.tensors, *types))
    nodes: list[Node] = []
    for n, x in enumerate(instructions):
        if n in places:
            nodes.append(builder.load(len(formula.tensors) + places.index(n), []))
        else:
            nodes.append(builder.again(x, [nodes[m] for m in x.operands]))
    program = builder.program(*(nodes[n] for n in formula.program.outputs))
    return Formula(program, tuple(builder.tensors)), tuple(number(instructions[n]) for n in places)
