"""Formulas in a loop over keys. Each instruction has a stage, by the inputs that it depends on: instructions of rows
alone are emitted before the loop, instructions of keys alone once for a vector of rows.
"""

from typing import Any, NamedTuple

from ....expression.derivative import Load
from ....expression.program import Instruction, Program, emit_instruction
from ..tables import GRADIENT_DIMENSIONS
from .formula import Emitter
from .operands import Value

UNIFORM, ROW, KEY = 0, 1, 2  # the bits of a stage
PAIR = ROW | KEY
INPUT_STAGES = {"score": PAIR, "b": UNIFORM, "h": ROW, "q_idx": ROW, "k_idx": KEY}


class Staged(NamedTuple):
    """A program's instructions with their stages. A load is split, so that each index has the stage of its operand:

    position    an index of the dimension `value = (tensor, dimension)`
    base        the positions that do not depend on the row; `value = (tensor, its other dimensions)`
    load        the base and the other positions
    """

    instructions: tuple[Instruction, ...]
    stages: tuple[int, ...]
    outputs: tuple[int, ...]


def staged(program: Program, loads: tuple[Load, ...] = ()) -> Staged:
    """A program with stages. Results that are indices of `loads` become positions in the gradients of their tensors."""
    numbers: dict[Instruction, int] = {}
    stages: list[int] = []
    new: list[int] = []

    def add(x: Instruction) -> int:
        if x not in numbers:
            stage = INPUT_STAGES[x.value] if x.op == "input" else UNIFORM
            for n in x.operands:
                stage |= stages[n]
            numbers[x] = len(stages)
            stages.append(stage)
        return numbers[x]

    for x in program.instructions:
        operands = tuple(new[n] for n in x.operands)
        if x.op == "load":
            positions = [add(Instruction("position", "", (n,), (x.value, d))) for d, n in enumerate(operands)]
            others = tuple(d for d, n in enumerate(positions) if stages[n] & ROW)
            same = tuple(n for n in positions if not stages[n] & ROW)
            base = add(Instruction("base", "", same, (x.value, others)))
            operands = (base, *(positions[d] for d in others))
        new.append(add(x._replace(operands=operands)))
    outputs = [new[n] for n in program.outputs]
    for load in loads:
        for d, n in enumerate(load.indices):
            outputs[n] = add(Instruction("position", "", (outputs[n],), (load.tensor, GRADIENT_DIMENSIONS + d)))
    return Staged(tuple(numbers), tuple(stages), tuple(outputs))


class StagedCode:
    """A program's code in a loop over keys, for a vector of rows: make it before the loop, then call `at_key` in it."""

    def __init__(self, program: Staged, emitter: Emitter, rows: dict[str, Value]):
        self.program, self.emitter = program, emitter
        self.uniform = self.emit(UNIFORM, {}, {})
        self.rows = self.emit(ROW, self.uniform, rows)

    def at_key(self, k_idx: Value, score: Value) -> list[Any]:
        """The program's results."""
        key = self.emit(KEY, self.uniform, {"k_idx": k_idx})
        values = self.emit(PAIR, key | self.rows, {"score": score})
        return [values[n] for n in self.program.outputs]

    def emit(self, stage: int, values: dict[int, Any], inputs: dict[str, Value]) -> dict[int, Any]:
        """The values of a stage and of earlier stages."""
        values, instructions = dict(values), self.program.instructions
        self.emitter.inputs |= inputs
        for n, x in enumerate(instructions):
            if self.program.stages[n] != stage:
                continue
            operands = [values[m] for m in x.operands]
            match x.op:
                case "position":
                    values[n] = self.emitter.position(operands[0], *x.value)
                case "base":
                    values[n] = self.emitter.base(operands, *x.value)
                case "load":
                    values[n] = self.emitter.load(operands[0], operands[1:], x.value)
                case _:
                    kinds = [instructions[m].kind for m in x.operands]
                    values[n] = emit_instruction(x, operands, kinds, self.emitter)
        return values
