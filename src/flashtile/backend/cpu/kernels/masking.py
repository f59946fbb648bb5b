"""Visibility of a block's pairs, by window and by bool mask. Blocks that every row sees in full skip the window."""

import math

from .codegen import Code
from .operands import INT, Pointer, Value
from .products import Panel


def in_window(code: Code, low: Pointer, high: Pointer, n: Value | int, j: Value) -> Value:
    """Whether each of a vector's rows, from row `n` of the panel, has key `j` in its window."""
    key = code.splat(code.convert(j, INT))
    return (key >= low.vector(n)) & (key <= high.vector(n))


def in_mask(mask: Pointer, n: Value | int) -> Value:
    """Whether the transposed bool mask, 1.0 for visible pairs, shows one key to a vector of rows."""
    return mask.vector(n).differs(0)


def mask_fill(code: Code, s: Value, visible: Value) -> Value:
    return code.select(visible, s, -math.inf)


def mask_has_visible(code: Code, panel: Panel, mask: Pointer, count: Value) -> Value:
    """Whether the bool mask leaves any pair of a block visible."""
    largest = code.variable(code.full())
    with code.loop(0, count * panel.rows, code.lanes) as n:
        largest.set(code.maximum(mask.vector(n), largest.get()))
    return code.any(largest.get() > 0)
