"""Sums of any length, as exact as short ones.

Each block is summed from 0. Blocks are added to a recent sum, and after every few of them that is carried over to a
total. The rounding error of this one addition is known and stays behind as the next recent sum (Kahan, "Further remarks
on reducing truncation errors", 1965). So no error grows with the number of terms. Short sums have no totals.
"""

import math

from ..workspace import BLOCK_N
from .codegen import Code
from .operands import Pointer, Value

BLOCKS_PER_CARRY = 16  # of keys, in a recent sum
ROWS_PER_CARRY = 1024  # of queries, in a recent sum
MAX_PLAIN_TERMS = 96  # of a sum that needs no total


def needs_totals(lo: Value, hi: Value) -> Value:
    """Whether keys from `lo` to `hi` may be more blocks than a recent sum takes."""
    return hi - lo > (BLOCKS_PER_CARRY - 1) * BLOCK_N


def carry_due(block: Value) -> Value:
    """Whether the block that begins at this key is the last of a recent sum."""
    return (block // BLOCK_N % BLOCKS_PER_CARRY).equals(BLOCKS_PER_CARRY - 1)


def fast_two_sum(code: Code, recent: Value, total: Value) -> tuple[Value, Value]:
    """The next recent sum, and the new total. An infinity or NaN leaves nothing behind."""
    new = total + recent
    error = recent - (new - total)
    return code.select(code.intrinsic("llvm.fabs", new) < math.inf, error, 0.0), new


def carry(code: Code, recent: Pointer, total: Pointer, n: Value, last: bool, factor: Value | float = 1.0) -> None:
    """A vector of recent sums to its total, times `factor`; at the last, the total to the recent sum."""
    x, y = recent.vector(n), total.vector(n) * factor
    if last:
        recent.store(x + y, n)
    else:
        x, y = fast_two_sum(code, x, y)
        recent.store(x, n)
        total.store(y, n)
