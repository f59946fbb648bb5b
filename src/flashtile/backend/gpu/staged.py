"""A formula as four device functions, so that a kernel loads an element of a captured tensor as seldom as it varies.

    def head(b, h, captured): ... return (LOADED, ..., h)
    def rows(b, h, q_idx, captured): ... return (LOADED, ..., h)
    def keys(b, h, k_idx, captured): ... return (LOADED, ..., h)
    def pairs(score, b, h, q_idx, k_idx, captured, head, rows, keys): ... return (OUTPUT, ...)

Each of the first three returns the elements that depend on no other index of the pair; `pairs` takes their results.
"""

import re
from typing import NamedTuple

from ...expression.formula import Formula
from ...expression.program import emit
from .formula import Value, Writer

STAGES = {"head": ("b", "h"), "rows": ("b", "h", "q_idx"), "keys": ("b", "h", "k_idx")}
ALWAYS = "h"  # the last result of a stage: there is no empty tuple


class Line(NamedTuple):
    """A statement of a device function: its text, and the value that it defines."""

    text: str
    value: Value


class Staged(NamedTuple):
    """The texts of the four device functions, and the inputs on which the derivative depends."""

    texts: dict[str, str]
    derivative_inputs: frozenset[str]


def staged_source(formula: Formula, *, partial: bool, wide: bool, language: str) -> Staged:
    """Device functions of which `pairs` returns the new score; with `partial`, also its derivative by the score.
    `wide`: offsets into captured tensors have 64 bits.
    """
    writer = StagedWriter(formula.tensors, language, wide)
    results = [*emit(formula.program, writer)]
    if partial:
        results.append(emit(formula.partials().program, writer)[0])
    lines = {value.name: Line(text, value) for text, value in writer.values.items()}
    stages = {name: stage_of(lines[name].value) for name in writer.loaded}
    texts, replaced = {}, {}
    for stage, parameters in STAGES.items():
        loaded = [name for name in writer.loaded if stages[name] == stage]
        replaced |= {name: f"{stage}[{n}]" for n, name in enumerate(loaded)}
        texts[stage] = function(stage, (*parameters, "captured"), needed(lines, loaded), (*loaded, ALWAYS))
    lines = {name: x._replace(text=replaced.get(name, x.text)) for name, x in lines.items()}
    outputs = [x.name for x in results]
    parameters = ("score", "b", "h", "q_idx", "k_idx", "captured", *STAGES)
    texts["pairs"] = function("pairs", parameters, needed(lines, outputs), tuple(outputs))
    return Staged(texts, results[-1].inputs)


class StagedWriter(Writer):
    """A writer that knows which lines load."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.loaded: dict[str, None] = {}  # names, in order

    def load(self, tensor: int, indices: list[Value]) -> Value:
        value = super().load(tensor, indices)
        self.loaded[value.name] = None
        return value


def stage_of(x: Value) -> str | None:
    """The first stage that has all that a value depends on."""
    return next((stage for stage, inputs in STAGES.items() if x.inputs <= {*inputs}), None)


def needed(lines: dict[str, Line], outputs: list[str]) -> list[str]:
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
