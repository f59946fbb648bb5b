"""Blocks of keys that a panel of rows sees, by the table of the mask function (`cpu.blocks`). Without one each block
may have hidden pairs.
"""

from typing import NamedTuple

from ....expression.blocks import FULL, HIDDEN, PARTIAL
from ..tables import FIRST_BIT, LAST_BIT, PART, entry
from ..workspace import BLOCK_N
from .kernel import Kernel
from .operands import BYTE, LONG, Pointer, Value


class VisibleKeys(NamedTuple):
    """The keys of a block that may be visible, `last` exclusive, and the state of that part."""

    state: Value
    first: Value
    last: Value


def of_panel(kernel: Kernel, p: Value) -> Pointer:
    """The entries of panel `p`."""
    a, task = kernel.a, kernel.task
    panel = task.first_row // kernel.panel.rows + p
    at = task.b * a.integer("block_b") + task.kv_head * a.integer("block_h") + panel * a.integer("block_i")
    return a.pointer("blocks", BYTE) + at


def has_table(kernel: Kernel) -> Value:
    return kernel.a.pointer("blocks", BYTE).is_null().equals(0)


def visible_keys(kernel: Kernel, p: Value, first: Value, last: Value) -> VisibleKeys:
    """Those of the keys `first` to `last` of one block that panel `p` may see."""
    code = kernel.code
    if kernel.variant.mask_mod is None:
        return VisibleKeys(code.index(FULL), first, last)
    byte, block = code.variable(code.index(entry(PARTIAL))), first // BLOCK_N
    with code.if_then(has_table(kernel)):
        byte.set(code.convert(of_panel(kernel, p)[block], LONG, signed=False))
    lowest = block * BLOCK_N + ((byte.get() >> FIRST_BIT) & 3) * PART
    end = block * BLOCK_N + ((byte.get() >> LAST_BIT) + 1) * PART
    return VisibleKeys(byte.get() & 3, code.maximum(first, lowest), code.minimum(last, end))


def narrow_bounds(kernel: Kernel, p: Value) -> None:
    """Narrow the bounds of panel `p` (`tiles.fill_row_tables`) to the blocks that it sees."""
    if kernel.variant.mask_mod is None:
        return
    code, w = kernel.code, kernel.w
    lo, hi = w.bounds[p * 4], w.bounds[p * 4 + 3]
    first, last = code.variable(hi), code.variable(lo)
    with code.if_then(has_table(kernel) & (lo < hi)):
        table = of_panel(kernel, p)
        with code.loop(lo // BLOCK_N, (hi + (BLOCK_N - 1)) // BLOCK_N) as block, code.if_then(table[block].differs(0)):
            first.set(code.minimum(first.get(), block * BLOCK_N))
            last.set(block * BLOCK_N + BLOCK_N)
        w.bounds[p * 4] = code.maximum(lo, first.get())
        w.bounds[p * 4 + 3] = code.minimum(hi, last.get())


def panels_see(kernel: Kernel, panels: Value, first: Value) -> Value:
    """Whether any panel may see the block of key `first`."""
    code = kernel.code
    found = code.variable(code.index(0))
    if kernel.variant.mask_mod is None:
        return code.index(0).equals(0)
    with code.loop(0, panels) as p:
        found.set(code.maximum(found.get(), visible_keys(kernel, p, first, first + 1).state))
    return found.get() > HIDDEN
