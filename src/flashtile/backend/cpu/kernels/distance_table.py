"""The table of a score_mod's term of distances, which the other kernels read in place of computing it for each pair."""

from ..targets import Target
from ..variant import TABLE, TableVariant
from .captured import Captured
from .codegen import Code, Source
from .formula import Emitter
from .operands import ADDRESS, INT, LONG, REAL_TYPES
from .stages import StagedCode, staged


def source(variant: TableVariant, target: Target) -> Source:
    """The LLVM module of `distance_table(captured, table, heads, width, reach)`: element `[h, d + reach]` of a table
    with rows of `width` elements, whole vectors, is the term of head `h` and distance `d`.
    """
    code = Code(target, REAL_TYPES[variant.real_dtype])
    with code.function(TABLE, ADDRESS, ADDRESS, LONG, LONG, LONG, public=True) as args:
        captured, table, (heads, width, reach) = code.pointer(args[0], LONG), code.pointer(args[1]), args[2:]
        tensors = Captured(code, variant.term.tensors, captured, variant.wide)
        emitter = Emitter(code, tensors, code.constant(0, INT))  # the term depends on no sequence
        program = staged(variant.term.program)
        with code.loop(0, heads) as h, code.loop(0, width, code.lanes) as n:
            row = {"h": code.splat(code.convert(h, INT)), "q_idx": code.convert(n, INT) + code.lane_indices()}
            (x,) = StagedCode(program, emitter, row).at_key(code.convert(reach, INT), code.full())  # reads no score
            table.store(code.splat(x), h * width + n)
    return code.source()
