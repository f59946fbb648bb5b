"""Sums of any length, as exact as short ones.

Each block is summed from 0. Blocks are added to a recent sum, and after every few of them that is carried over to a
total. The rounding error of this one addition is known and stays behind as the next recent sum (Kahan, "Further remarks
on reducing truncation errors", 1965). So no error grows with the number of terms. Short sums have no totals.
"""

import math

from ..workspace import BLOCK
from .codegen import Code
from .operands import Pointer, Value

BLOCKS = 16  # of keys, in a recent sum
ROWS = 1024  # of queries, in a recent sum
TERMS = 96  # of a sum that needs no total


def many_blocks(lo: Value, hi: Value) -> Value:
    """Whether keys from `lo` to `hi` may be more blocks than a recent sum takes."""
    return hi - lo > (BLOCKS - 1) * BLOCK


def time_to_carry(block: Value) -> Value:
    """Whether the block that begins at this key is the last of a recent sum."""
    return (block // BLOCK % BLOCKS).equals(BLOCKS - 1)


def carried(code: Code, recent: Value, total: Value) -> tuple[Value, Value]:
    """The next recent sum, and the new total. An infinity or NaN leaves nothing behind."""
    new = total + recent
    lost = recent - (new - total)
    return code.select(code.intrinsic("llvm.fabs", new) < math.inf, lost, 0.0), new


def carry(code: Code, recent: Pointer, total: Pointer, n: Value, last: bool, factor: Value | float = 1.0) -> None:
    """A vector of recent sums to its total, times `factor`; at the last, the total to the recent sum."""
    x, y = recent.vector(n), total.vector(n) * factor
    if last:
        recent.store(x + y, n)
    else:
        x, y = carried(code, x, y)
        recent.store(x, n)
        total.store(y, n)
