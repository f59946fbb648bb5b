"""Formulas as device functions, so that a kernel loads an element of a captured tensor as seldom as it varies.

    def head(b, h, captured): ... return (LOADED, ..., h)
    def rows(b, h, q_idx, captured): ... return (LOADED, ..., h)
    def keys(b, h, k_idx, captured, run): ... return (LOADED, ..., h)
    def pairs(score, b, h, q_idx, k_idx, distance, real_distance, captured, head, rows, keys): ... return (OUTPUT, ...)
    def before, after, unmasked: as pairs
    def factor(b, h, captured, head): ... return (FACTOR,)

Each of the first three returns the elements that depend on no other index of the pair; `pairs` takes their results.
`run` is `k_idx` and the first index after them, or `None`: then keys need not be consecutive.
`distance` is `q_idx - k_idx` (a thread may have fewer distances than pairs), and the two parts of `real_distance` have
the same number as their sum.
`before` and `after` are functions of pairs from the distance `reach` on, if simpler ones hold there
(`expression.sides`). With a mask there is `unmasked`, which is `pairs` where all pairs are visible. Only a formula that
is the score times a number of the head has `factor`, that number. Of hidden pairs, the new score is -inf.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ...expression.formula import Formula
from ...expression.program import REAL, TensorType, emit
from ...expression.scaling import is_head_factor
from ...expression.sides import reach_of, sides
from .formula import OPERATIONS, Value, Writer

COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}  # and those of -x and -y
STAGES = {"head": ("b", "h"), "rows": ("b", "h", "q_idx"), "keys": ("b", "h", "k_idx")}
MORE = {"keys": ("run",)}  # parameters
ALWAYS = "h"  # the last result of a stage: there is no empty tuple


class Line(NamedTuple):
    """A statement of a device function: its text, and the value that it defines."""

    text: str
    value: Value


class Staged(NamedTuple):
    """The texts of the device functions, and their properties."""

    texts: dict[str, str]
    derivative_inputs: frozenset[str]
    by_distance: bool  # whether distances are read
    reach: int | None  # distance from which `before` and `after` hold


def staged_source(
    formula: Formula,
    mask: Formula | None = None,
    *,
    partial: bool,
    wide: bool,
    contiguous: Sequence[bool],
) -> Staged:
    """Device functions of a score_mod; `pairs` returns the new score, with `partial`, also its derivative by
    the score. `mask` is a mask function among the same tensors. `wide`: offsets into captured tensors have 64 bits.
    `contiguous`: which captured tensors have contiguous last dimensions.
    """
    writer = StagedWriter(formula.tensors, "gl", wide, contiguous)
    results = {"pairs": writer.results(formula, mask, partial)}
    reach = max((x for x in (reach_of(formula), mask and reach_of(mask)) if x), default=None)
    if reach is not None:
        masks = (None, None) if mask is None else sides(mask, reach)
        for name, side, visible in zip(("before", "after"), sides(formula, reach), masks, strict=True):
            results[name] = writer.results(side, visible, partial)
    if mask is not None:
        results["unmasked"] = writer.results(formula, None, partial)
    factor = emit(formula.partials().program, writer)[0] if mask is None and is_head_factor(formula) else None
    lines = {value.name: Line(text, value) for text, value in writer.values.items()}
    stages = {name: stage_of(lines[name].value) for name in writer.loaded}
    texts, replaced = {}, {}
    for stage, parameters in STAGES.items():
        loaded = [name for name in writer.loaded if stages[name] == stage]
        replaced |= {name: f"{stage}[{n}]" for n, name in enumerate(loaded)}
        texts[stage] = function(
            stage, (*parameters, "captured", *MORE.get(stage, ())), needed(lines, loaded), (*loaded, ALWAYS)
        )
    lines = {name: x._replace(text=replaced.get(name, x.text)) for name, x in lines.items()}
    parameters = ("score", "b", "h", "q_idx", "k_idx", "distance", "real_distance", "captured", *STAGES)
    for name, values in results.items():
        outputs = tuple(x.name for x in values)
        texts[name] = function(name, parameters, needed(lines, outputs), outputs)
    if factor is not None:
        parameters = ("b", "h", "captured", "head")
        texts["factor"] = function("factor", parameters, needed(lines, [factor.name]), (factor.name,))
    by_distance = any("distance" in x for x in needed(lines, [y.name for y in results["pairs"]]))
    return Staged(texts, results["pairs"][-1].inputs, by_distance, reach)


class StagedWriter(Writer):
    """A writer that knows which lines load, and takes differences of positions from `distance`."""

    def __init__(self, tensors: Sequence[TensorType], language: str, wide: bool, contiguous: Sequence[bool]):
        super().__init__(tensors, language, wide)
        self.contiguous = contiguous
        self.loaded: dict[str, None] = {}  # names, in order
        self.numbers: dict[str, float] = {}  # values of constants
        pair = Value("", frozenset(("q_idx", "k_idx")))
        self.reals = {"distance": self.line("real_distance[0] + real_distance[1]", pair)}  # reals of integers, by name
        self.signs = {self.reals["distance"].name: ""}  # signs of distances and their opposites
        self.selected: dict[str, tuple[Value, Value, Value]] = {}  # operands of `where`
        for op in ("sub", *COMPARISONS):
            setattr(self, op, functools.partial(self.by_distance, op))

    def results(self, formula: Formula, mask: Formula | None, partial: bool) -> list[Value]:
        """The new score, and with `partial` its derivative."""
        found = [*emit(formula.program, self)]
        if partial:
            found.append(self.where_visible(found[0], emit(formula.partials().program, self)[0]))
        return found if mask is None else self.masked(found, emit(mask.program, self)[0])

    def load(self, tensor: int, indices: Sequence[Value]) -> Value:
        value = super().load(tensor, indices)
        self.loaded[value.name] = None
        return value

    def offset(self, tensor: int, dimension: int, indices: Sequence[Value]) -> str:
        if dimension < self.tensors[tensor].ndim - 1 or not self.contiguous[tensor]:
            return super().offset(tensor, dimension, indices)
        name = indices[dimension].name
        by_key = frozenset[str]().union(*(x.inputs for x in indices)) <= {*STAGES["keys"]}
        return "in_run(k_idx, run)" if name == "k_idx" and by_key else f"{name}.to({self.language}.int64)"

    def load_masked(self, pointer: str, mask: str, other: str, tensor: int, indices: Sequence[Value]) -> str:
        """A load for each key of a run needs no masks if the run is inside of the tensor."""
        others = frozenset().union(*(x.inputs for x in indices[:-1]))
        if not self.contiguous[tensor] or indices[-1].name != "k_idx" or "k_idx" in others:
            return super().load_masked(pointer, mask, other, tensor, indices)
        last = len(indices) - 1
        tests = [f"inside({x.name}, {self.size_text(tensor, n)})" for n, x in enumerate(indices[:-1])]
        before = " & ".join(tests) or "True"
        return f"load_run({pointer}, {mask}, {other}, {before}, {self.size_text(tensor, last)}, run)"

    def constant(self, value: float, kind: str) -> Value:
        x = super().constant(value, kind)
        self.numbers[x.name] = value
        return x

    def neg(self, x: Value) -> Value:
        value = self.line(OPERATIONS["neg"].format(x.name), x)
        if x.name in self.reals:  # there is no integer -0
            self.reals[value.name] = self.line(f"0.0 - {self.reals[x.name].name}", x)
            if x.name == "distance":
                self.signs[self.reals[value.name].name] = "-"
        return value

    def mul(self, x: Value, y: Value) -> Value:
        for distance, factor in ((x, y), (y, x)):
            if distance.name in self.signs and factor.inputs <= {*STAGES["head"]}:
                sign = self.signs[distance.name]
                return self.line(f"scaled_distance(real_distance, {sign}{factor.name})", x, y)
        return self.line(OPERATIONS["mul"].format(x.name, y.name), x, y)

    def abs(self, x: Value) -> Value:
        value = self.line(OPERATIONS["abs"].format(x.name, language=self.language), x)
        if x.name in self.reals:
            self.reals[value.name] = self.line(
                OPERATIONS["abs"].format(self.reals[x.name].name, language=self.language), x
            )
        return value

    def cast(self, x: Value, source: str, kind: str) -> Value:
        if kind == REAL and x.name in self.reals:
            return self.reals[x.name]
        return super().cast(x, source, kind)

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        value = self.line(
            OPERATIONS["where"].format(condition.name, x.name, y.name, language=self.language), condition, x, y
        )
        self.selected[value.name] = condition, x, y
        return value

    def where_visible(self, score: Value, derivative: Value) -> Value:
        """A derivative that is as good as the given one, 0 where `where` makes the score -inf: the probability is 0
        there, so that a number will do.
        """
        if score.name not in self.selected or derivative.name not in self.selected:
            return derivative
        condition, _, hidden = self.selected[score.name]
        same, visible, zero = self.selected[derivative.name]
        if condition != same or not visible.inputs <= {"b", "h"}:
            return derivative
        hides = self.numbers.get(hidden.name) == -math.inf and self.numbers.get(zero.name) == 0
        return visible if hides else derivative

    def masked(self, results: list[Value], visible: Value) -> list[Value]:
        """The score of visible pairs, and its derivative where that may be NaN in hidden ones."""
        score, *derivatives = results
        return [
            self.where(visible, score, self.constant(-math.inf, REAL)),
            *(x if x.inputs <= {"b", "h"} else self.where(visible, x, self.constant(0.0, REAL)) for x in derivatives),
        ]

    def by_distance(self, op: str, x: Value, y: Value) -> Value:
        """A difference or comparison; of a query's and a key's positions, by their distance."""
        if (x.name, y.name) == ("k_idx", "q_idx"):
            return self.neg(self.by_distance(op, y, x)) if op == "sub" else self.by_distance(COMPARISONS[op], y, x)
        if (x.name, y.name) == ("q_idx", "k_idx"):
            distance = Value("distance", frozenset((x.name, y.name)))
            return distance if op == "sub" else self.line(OPERATIONS[op].format("distance", "0"), distance)
        return self.line(OPERATIONS[op].format(x.name, y.name), x, y)


def stage_of(x: Value) -> str | None:
    """The first stage that has all that a value depends on."""
    return next((stage for stage, inputs in STAGES.items() if x.inputs <= {*inputs}), None)


def needed(lines: dict[str, Line], outputs: Sequence[str]) -> list[str]:
    """The statements on which outputs depend, in order."""
    found = {*outputs}
    for name in reversed(lines):
        if name in found:
            found.update(re.findall(r"\bx\d+\b", lines[name].text))
    return [f"{name} = {x.text}" for name, x in lines.items() if name in found]


def function(name: str, parameters: tuple[str, ...], statements: list[str], results: tuple[str, ...]) -> str:
    body = "".join(f"    {x}\n" for x in statements)
    returned = "".join(f"{x}, " for x in results)
    return f"def {name}({', '.join(parameters)}):\n{body}    return ({returned})\n"
