"""Visibility of a block's pairs, by window and by bool mask. Blocks that every row sees in full skip the window."""

import math
from typing import NamedTuple, Self

from ....expression.blocks import FULL, HIDDEN, PARTIAL
from .buffers import Workspace
from .codegen import Code
from .fields import Arguments
from .operands import BYTE, INT, Pointer, Value


class Window(NamedTuple):
    """The first and the last key that each of a vector of rows may see."""

    low: Value
    high: Value

    @classmethod
    def of_rows(cls, w: Workspace, row: Value) -> Self:
        """Those from `row` on, among the rows of all panels."""
        return cls(w.low.vector(row), w.high.vector(row))

    def has(self, j: Value) -> Value:
        """Whether each row has key `j` in its window."""
        key = self.low.code.convert(j, INT)
        return (self.low <= key) & (self.high >= key)


def in_mask(mask: Pointer, n: Value | int) -> Value:
    """Whether the transposed bool mask, 1.0 for visible pairs, shows one key to a vector of rows."""
    return mask.vector(n).differs(0)


def mask_fill(code: Code, s: Value, visible: Value) -> Value:
    return code.select(visible, s, -math.inf)


def mask_state(code: Code, a: Arguments, row_offsets: Pointer, rows: Value, first: Value, count: Value) -> Value:
    """Whether the bool mask hides a block, `count` keys from `first` on, shows it in part or in full: one pass over its
    bytes, which costs a small part of loading them transposed.
    """
    stride = a.integer("mask_j")
    mask = a.pointer("mask", BYTE) + first * stride
    some, every = (code.variable(code.splat(code.constant(n, BYTE))) for n in (0, 1))
    full = code.select(stride.equals(1), count // code.lanes * code.lanes, 0)
    with code.loop(0, rows) as r:
        row = mask + row_offsets[r]
        with code.loop(0, full, code.lanes) as j:
            some.set(some.get() | row.vector(j))
            every.set(every.get() & row.vector(j))
        with code.loop(full, count) as j:
            visible = code.splat(row[j * stride])
            some.set(some.get() | visible)
            every.set(every.get() & visible)
    shown = code.select(code.reduce("and", every.get()).differs(0), code.index(FULL), PARTIAL)
    return code.select(code.reduce("or", some.get()).differs(0), shown, HIDDEN)
