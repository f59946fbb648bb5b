"""Compensated summation, so that the rounding error of a sum does not grow with its length.

Each block is summed from 0 and added to a recent sum. Every few blocks, the recent sum is carried to a total, and the
rounding error of that addition is the next recent sum (Kahan, "Further remarks on reducing truncation errors", 1965).
Short sums have no totals.
"""

import math

from ..workspace import BLOCK_N
from .codegen import Code
from .operands import Pointer, Value

BLOCKS_PER_CARRY = 16  # key blocks in a recent sum


def needs_totals(lo: Value, hi: Value) -> Value:
    """Whether keys from `lo` to `hi` may be too many blocks for one recent sum."""
    return hi - lo > (BLOCKS_PER_CARRY - 1) * BLOCK_N


def carry_due(block: Value) -> Value:
    """Whether the block that begins at this key is the last of a recent sum."""
    return (block // BLOCK_N % BLOCKS_PER_CARRY).equals(BLOCKS_PER_CARRY - 1)


def fast_two_sum(code: Code, recent: Value, total: Value) -> tuple[Value, Value]:
    """The error and the result of `total + recent`. The error of an infinity or NaN is 0."""
    new = total + recent
    error = recent - (new - total)
    return code.select(code.intrinsic("llvm.fabs", new) < math.inf, error, 0.0), new


def carry(code: Code, recent: Pointer, total: Pointer, n: Value, last: bool, factor: Value | float = 1.0) -> None:
    """Carry a vector of recent sums to its total, which is first multiplied by `factor`; at the end (`last`), add the
    total to the recent sum instead.
    """
    x, y = recent.vector(n), total.vector(n) * factor
    if last:
        recent.store(x + y, n)
    else:
        x, y = fast_two_sum(code, x, y)
        recent.store(x, n)
        total.store(y, n)
