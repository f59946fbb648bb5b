"""Groups of a head dimension's columns, which warpgroups share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def chunks_of(chunks, COLUMNS: gl.constexpr):
    """Those of a group of columns, of all parts where it has all columns."""
    FIRST: gl.constexpr = len(COLUMNS.before)
    NUMBER: gl.constexpr = len(COLUMNS.chunks) * COLUMNS.parts
    return chunks[FIRST : FIRST + NUMBER]
