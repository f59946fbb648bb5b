"""Numbers that change from call to call, as an annealed temperature in a closure: after a few values they are read as
data, so that no further kernels are compiled for them.
"""

from typing import NamedTuple

from .formula import Formula
from .program import REAL, TensorType

FEW = 4  # values of a function that are constants of kernels: those of several layers, say
MOST = 1024  # functions


class Seen(NamedTuple):
    """What the real constants of a function have been."""

    values: list[tuple[str, ...]]  # the first ones, which stay constants
    varying: set[int]  # places of those that differed


_seen: dict[Formula, Seen] = {}  # by the formula without its real constants


def with_arguments(formula: Formula, dtype: str) -> tuple[Formula, list[float]]:
    """The formula with the constants that change as its last tensors, of a dtype and without dimensions; and their
    values.
    """
    instructions = [*formula.program.instructions]
    places = [n for n, x in enumerate(instructions) if x.op == "constant" and x.kind == REAL]
    values = tuple(instructions[n].value for n in places)
    if not places:
        return formula, []
    for n in places:
        instructions[n] = instructions[n]._replace(value="")
    without = formula._replace(program=formula.program._replace(instructions=tuple(instructions)))
    if len(_seen) >= MOST and without not in _seen:
        _seen.pop(next(iter(_seen)), None)
    seen = _seen.setdefault(without, Seen([], set()))
    if values in seen.values:
        return formula, []
    seen.varying.update(m for first in seen.values[:1] for m, x in enumerate(values) if x != first[m])
    if len(seen.values) < FEW:
        seen.values.append(values)
        return formula, []
    tensors, numbers = [*formula.tensors], []
    for m, n in enumerate(places):
        x = formula.program.instructions[n]
        if m in seen.varying:
            x = x._replace(op="load", value=len(tensors))
            tensors.append(TensorType(dtype, 0))
            numbers.append(float(values[m]))
        instructions[n] = x
    return Formula(formula.program._replace(instructions=tuple(instructions)), tuple(tensors)), numbers
