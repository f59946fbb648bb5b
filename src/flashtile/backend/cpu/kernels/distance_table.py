"""The table of a score_mod's term of distances, which the other kernels read in place of computing it for each pair."""

from typing import NamedTuple

from llvmlite import ir

from ....expression import Formula
from ..targets import Target
from .captured import Captured
from .codegen import Code, Source
from .formula import Emitter
from .operands import ADDRESS, DOUBLE, FLOAT, INT, LONG
from .stages import StagedCode, staged

NAME = "distance_table"  # of the compiled function


class TableVariant(NamedTuple):
    """The properties of a term that machine code depends on."""

    real_dtype: str
    term: Formula
    wide: bool  # whether offsets in its tensors need 64 bits

    @property
    def real_type(self) -> ir.Type:
        return DOUBLE if self.real_dtype == "float64" else FLOAT


def source(variant: TableVariant, target: Target) -> Source:
    """The LLVM module of `distance_table(captured, table, heads, width, reach)`: element `[h, d + reach]` of a table
    with rows of `width` elements, whole vectors, is the term of head `h` and distance `d`.
    """
    code = Code(target, variant.real_type)
    with code.function(NAME, ADDRESS, ADDRESS, LONG, LONG, LONG, public=True) as args:
        captured, table, (heads, width, reach) = code.pointer(args[0], LONG), code.pointer(args[1]), args[2:]
        tensors = Captured(code, variant.term.tensors, captured, variant.wide)
        emitter = Emitter(code, tensors, code.constant(0, INT))  # the term depends on no sequence
        program = staged(variant.term.program)
        with code.loop(0, heads) as h, code.loop(0, width, code.lanes) as n:
            row = {"h": code.splat(code.convert(h, INT)), "q_idx": code.convert(n, INT) + code.lane_indices()}
            (x,) = StagedCode(program, emitter, row).at_key(code.convert(reach, INT), code.full())  # of no score
            table.store(code.splat(x), h * width + n)
    return code.source()
