"""Which pairs of a block are visible. Blocks inside the range that every row sees never come here, unless there is a
bool mask.
"""

import math

from .codegen import Code
from .operands import INT, Pointer, Value
from .products import Panel


def in_window(code: Code, low: Pointer, high: Pointer, n: Value | int, j: Value) -> Value:
    """Whether each of a vector's rows sees key `j` by position."""
    key = code.splat(code.convert(j, INT))
    return (key >= low.vector(n)) & (key <= high.vector(n))


def in_mask(mask: Pointer, n: Value | int) -> Value:
    """Of one key's row of a turned bool mask, which has 1 for what is visible."""
    return mask.vector(n).differs(0)


def mask_fill(code: Code, s: Value, visible: Value) -> Value:
    return code.select(visible, s, -math.inf)


def mask_has_visible(code: Code, panel: Panel, mask: Pointer, count: Value) -> Value:
    """Whether a bool mask leaves any pair of a block visible."""
    largest = code.variable(code.full())
    with code.loop(0, count * panel.rows, code.lanes) as n:
        largest.set(code.maximum(mask.vector(n), largest.get()))
    return code.any(largest.get() > 0)
