"""The band of a mask function: the conditions that bound the distance of a query and a key, as causal and windows do.
Kernels know these by the position of a block, without a formula.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..private_torch import constant_result
from .blocks.analysis import PAIR, analysis, flattened, read_by
from .builder import Builder, Node
from .formula import Formula
from .program import INTEGERS, Instruction
from .purity import MASK_MOD
from .registry import formula_of, is_local
from .sides import Linear, difference, linear_form

LARGEST = 2**30  # number in a condition; sums of it and of two positions have 32 bits
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


class Band(NamedTuple):
    """Keys `q_idx - left <= k_idx <= q_idx + right`; `None` is unlimited."""

    left: int | None = None
    right: int | None = None

    def both(self, other: "Band") -> "Band":
        """The pairs in both bands."""
        return Band(least(self.left, other.left), least(self.right, other.right))


NO_BAND = Band()


def least(a: int | None, b: int | None) -> int | None:
    """The narrower one of two sides."""
    return b if a is None else a if b is None else min(a, b)


@constant_result
def split(key: str) -> tuple[int | None, int | None, str | None] | None:
    """The sides of the band of a mask function, by its key, and the key of its other conditions, `None` if there are
    none; no result for a function without a band.
    """
    return None if is_local(key) else split_key(key)  # such a key keeps its function


@functools.lru_cache(maxsize=1024)
def split_key(key: str) -> tuple[int | None, int | None, str | None] | None:
    formula = formula_of(key, MASK_MOD)
    if not isinstance(formula, Formula):
        return None
    band, rest = split_formula(formula)
    # Where nothing is left, a call would have tensors that nothing reads.
    if band == NO_BAND or (rest is None and formula.tensors):
        return None
    return band.left, band.right, None if rest is None else rest.key


def split_formula(formula: Formula) -> tuple[Band, Formula | None]:
    """The band of a formula, and the formula of its other conditions."""
    bands = bands_of(formula)
    if not bands:
        return NO_BAND, formula
    rest = [n for n in conditions(formula) if n not in bands]
    return functools.reduce(Band.both, bands.values(), NO_BAND), joined(formula, rest) if rest else None


def conditions(formula: Formula) -> list[int]:
    """The conditions of a mask's conjunction."""
    return flattened(formula.program.instructions, formula.program.outputs[0])


def bands_of(formula: Formula) -> dict[int, Band]:
    """The bands of a formula, by the conditions that they are."""
    instructions = formula.program.instructions
    forms: dict[int, Linear] = {}
    for n, x in enumerate(instructions):
        if (form := linear_form(x, forms)) is not None:
            forms[n] = form
    found = {n: band_of(instructions, n, forms) for n in conditions(formula)}
    bands = {n: band for n, band in found.items() if band is not None}
    # What reads the same distance is hidden or shown in blocks by both together (`blocks.analysis`).
    shared = read_of_pairs(formula, bands) & read_of_pairs(formula, found.keys() - bands.keys())
    return {} if shared else bands


def read_of_pairs(formula: Formula, conditions: Iterable[int]) -> set[int]:
    """The integers of pairs that conditions read."""
    instructions, stages = formula.program.instructions, analysis(formula).stages
    read = set[int]().union(*(read_by(instructions, n) for n in conditions))
    return {n for n in read if stages[n] == PAIR and instructions[n].kind in INTEGERS}


def joined(formula: Formula, rest: Sequence[int]) -> Formula:
    """The conjunction of some conditions."""
    builder = Builder(formula.tensors)
    nodes = builder.replayed(formula.program._replace(outputs=tuple(rest)))
    whole: Node = functools.reduce(lambda x, y: builder.op("and_", x, y), nodes)
    return formula._replace(program=builder.program(whole))


def band_of(instructions: Sequence[Instruction], n: int, forms: dict[int, Linear]) -> Band | None:
    """The band that a condition is; `None` if it is none."""
    x, negated = instructions[n], False
    while x.op == "not_":
        x, negated = instructions[x.operands[0]], not negated
    if x.op not in MIRRORED or any(instructions[m].kind not in INTEGERS for m in x.operands):
        return None
    comparison = NEGATED[x.op] if negated else x.op
    left, right = x.operands
    if any(abs(forms[m].c) > LARGEST for m in x.operands if m in forms):  # a sum might exceed 64 bits
        return None
    if left in forms and right in forms:
        return band_of_form(comparison, difference(forms[left], forms[right]))
    if left not in forms:
        return band_of_distance(comparison, instructions[left], forms, forms.get(right))
    return band_of_distance(MIRRORED[comparison], instructions[right], forms, forms[left])


def band_of_form(comparison: str, form: Linear) -> Band | None:
    """The band where a linear form compares so with 0."""
    if form.q != -form.k or form.q not in (-1, 1):
        return None
    if form.q < 0:
        comparison, form = MIRRORED[comparison], Linear(-form.q, -form.k, -form.c)
    match comparison:  # comparison of `q_idx - k_idx + c`
        case "le":
            return Band(left=-form.c)
        case "lt":
            return Band(left=-form.c - 1)
        case "ge":
            return Band(right=form.c)
    return Band(right=form.c - 1)


def band_of_distance(comparison: str, x: Instruction, forms: dict[int, Linear], limit: Linear | None) -> Band | None:
    """The band where the absolute value `x` of a linear form is below a number."""
    form = forms.get(x.operands[0]) if x.op == "abs" else None
    if form is None or limit is None or limit.q or limit.k or comparison not in ("lt", "le"):
        return None
    if abs(form.c) > LARGEST:
        return None
    above = band_of_form(comparison, difference(form, limit))
    below = band_of_form(MIRRORED[comparison], difference(form, Linear(0, 0, -limit.c)))
    return None if above is None or below is None else above.both(below)
