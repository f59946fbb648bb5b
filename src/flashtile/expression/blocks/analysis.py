"""Properties of a mask's instructions that hold for all blocks: the inputs they depend on, and conjunctions."""

import functools
from typing import NamedTuple

from ..builder import Builder
from ..formula import Formula
from ..program import BOOL, INTEGERS, REAL, Instruction, Program, number
from ..ranges import INT64_RANGE
from .intervals import MIRRORED, WRAPPING

UNIFORM, ROW, KEY = 0, 1, 2  # the bits of a stage
PAIR = ROW | KEY
INPUT_STAGES = {"b": UNIFORM, "h": UNIFORM, "q_idx": ROW, "k_idx": KEY}
EXACT = (
    "constant",
    "load",
    "cast",
    "where",
    "minimum",
    "maximum",
    "neg",
    "abs",
    "sign",
    "floor",
)  # for reals


class Bound(NamedTuple):
    """A comparison in a conjunction, which bounds an instruction of pairs."""

    instruction: int
    comparison: str
    other: int


class Conjunction(NamedTuple):
    """The conditions of a conjunction of any length, and the bounds that some of them set to what others read."""

    conditions: tuple[int, ...]
    bounds: tuple[Bound, ...]


class Analysis(NamedTuple):
    """A formula's instructions, with one entry for each in every tuple."""

    program: Program
    stages: tuple[int, ...]
    by_position: tuple[bool, ...]  # computed for every position, instead of intervals
    wraps: tuple[bool, ...]  # whether results may exceed 64 bits
    inputs: tuple[frozenset[str], ...]
    conjunctions: dict[int, Conjunction]


@functools.lru_cache(maxsize=256)
def analysis(formula: Formula) -> Analysis:
    """The analysis of a mask's formula."""
    program, builder = formula.program, Builder(formula.tensors)
    builder.replayed(program)  # for the ranges of integers
    stages: list[int] = []
    exact: list[bool] = []
    inputs: list[frozenset[str]] = []
    wraps: list[bool] = []
    for x in program.instructions:
        own = frozenset([x.value]) if x.op == "input" else frozenset[str]()
        inputs.append(own.union(*(inputs[m] for m in x.operands)))
        stages.append(0)
        for name in inputs[-1]:
            stages[-1] |= INPUT_STAGES[name]
        from_real = any(program.instructions[m].kind == REAL for m in x.operands)
        rounds = (x.kind == REAL and x.op not in EXACT) or (x.kind in INTEGERS and from_real)
        exact.append(not rounds and all(exact[m] for m in x.operands))
        range_ = builder.ranges.get(builder.numbers[x]) if x.kind in INTEGERS else None
        wraps.append(x.op in WRAPPING and range_ == INT64_RANGE)
    by_position = tuple(stage != PAIR and own for stage, own in zip(stages, exact, strict=True))
    return Analysis(
        program, tuple(stages), by_position, tuple(wraps), tuple(inputs), conjunctions(program, by_position)
    )


def depends_on(formula: Formula, name: str) -> bool:
    """Whether a mask depends on an input, such as `h`."""
    found = analysis(formula)
    return name in found.inputs[found.program.outputs[0]]


@functools.lru_cache(maxsize=256)
def has_classes(formula: Formula) -> bool:
    """Whether rows see keys of their own class alone, as in a document: a condition of the conjunction compares
    a number of the row with one of the key.
    """
    found = analysis(formula)
    instructions = found.program.instructions
    return any(
        instructions[n].op == "eq" and {found.stages[m] for m in instructions[n].operands} == {ROW, KEY}
        for n in flattened(instructions, found.program.outputs[0])
    )


def spread(of: Analysis, n: int, length: int) -> int | None:
    """A bound on the difference of an integer's values among `length` consecutive positions; `None` if unknown."""
    x = of.program.instructions[n]
    if of.stages[n] == UNIFORM:
        return 0
    inner = [spread(of, m, length) for m in x.operands]
    constants = [integer(of.program.instructions[m]) for m in x.operands]
    if x.op == "input":
        return length - 1
    if None in inner:
        return constants[1] - 1 if x.op == "mod" and constants[1] is not None and constants[1] > 0 else None
    sizes = [s for s in inner if s is not None]
    match x.op:
        case "add" | "sub":
            return sum(sizes)
        case "cast" if x.kind in INTEGERS:
            return sizes[0]
        case "neg" | "abs":
            return sizes[0]
        case "minimum" | "maximum":
            return max(sizes)
        case "mul" if constants[1] is not None:
            return sizes[0] * abs(constants[1])
        case "floordiv" if constants[1] is not None and constants[1] > 0:
            return -(-sizes[0] // constants[1])
        case "mod" if constants[1] is not None and constants[1] > 0:
            return constants[1] - 1
    return None


def integer(x: Instruction) -> int | None:
    """The value of a constant that is an integer."""
    return int(number(x)) if x.op == "constant" and x.kind in INTEGERS else None


# Conjunctions ---------------------------------------------------------------------------------------------------------


def conjunctions(program: Program, by_position: tuple[bool, ...]) -> dict[int, Conjunction]:
    """The conjunctions that are no part of another one, by their last instruction, where bounds matter."""
    instructions = program.instructions
    users: list[list[Instruction]] = [[] for _ in instructions]
    for x in instructions:
        for m in x.operands:
            users[m].append(x)
    found: dict[int, Conjunction] = {}
    for n, x in enumerate(instructions):
        inner = users[n] and all(is_and(user) for user in users[n]) and n not in program.outputs
        if not is_and(x) or by_position[n] or inner:
            continue
        conditions = tuple(flattened(instructions, n))
        bounds = [y for m in conditions for y in bounds_of(instructions, m, by_position)]
        read = {m: read_by(instructions, m) for m in conditions}
        counts = {y.instruction: sum(y.instruction in read[m] for m in conditions) for y in bounds}
        bounds = [y for y in bounds if counts[y.instruction] > 1]
        if bounds:
            found[n] = Conjunction(conditions, tuple(bounds))
    return found


def is_and(x: Instruction) -> bool:
    return x.op == "and_" and x.kind == BOOL


def flattened(instructions: tuple[Instruction, ...], n: int) -> list[int]:
    x = instructions[n]
    return [m for y in x.operands for m in flattened(instructions, y)] if is_and(x) else [n]


def bounds_of(instructions: tuple[Instruction, ...], n: int, by_position: tuple[bool, ...]) -> list[Bound]:
    """Bounds that a condition sets for integers of pairs."""
    x = instructions[n]
    if x.op not in MIRRORED or any(instructions[m].kind not in INTEGERS for m in x.operands):
        return []
    left, right = x.operands
    found = [Bound(left, x.op, right), Bound(right, MIRRORED[x.op], left)]
    return [y for y in found if not by_position[y.instruction]]


def read_by(instructions: tuple[Instruction, ...], n: int) -> set[int]:
    """All instructions that one depends on."""
    needed = {n}
    for m in range(n, -1, -1):
        if m in needed:
            needed.update(instructions[m].operands)
    return needed
