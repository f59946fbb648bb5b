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
    """Whether keys from `lo` to `hi` are in more than one recent sum. A row whose own keys are in one has the same bits
    with totals and without, whatever keys the other rows of its task see.
    """
    keys = BLOCKS_PER_CARRY * BLOCK_N
    return (hi + (keys - 1)) // keys > lo // keys + 1


def carry_due(block: Value) -> Value:
    """Whether the block that begins at this key is the last of a recent sum."""
    return (block // BLOCK_N % BLOCKS_PER_CARRY).equals(BLOCKS_PER_CARRY - 1)


def fast_two_sum(code: Code, recent: Value, total: Value) -> tuple[Value, Value]:
    """The error and the result of `total + recent`, exact where `total` is the larger one. The error of an infinity or
    NaN is 0.
    """
    new = total + recent
    return finite_error(code, recent - (new - total), new), new


def two_sum(code: Code, recent: Value, total: Value) -> tuple[Value, Value]:
    """As `fast_two_sum`, exact whichever of both is larger (Knuth, "The Art of Computer Programming", volume 2, section
    4.2.2). Carrying a sum once more then changes nothing: a row does not depend on where its task's other rows end.
    """
    new = total + recent
    rounded = new - total
    return finite_error(code, (total - (new - rounded)) + (recent - rounded), new), new


def finite_error(code: Code, error: Value, result: Value) -> Value:
    return code.select(code.intrinsic("llvm.fabs", result) < math.inf, error, 0.0)


def carry(code: Code, recent: Pointer, total: Pointer, n: Value, last: bool, factor: Value | float = 1.0) -> None:
    """Carry a vector of recent sums to its total, which is first multiplied by `factor`; at the end (`last`), add the
    total to the recent sum instead.
    """
    x, y = recent.vector(n), total.vector(n) * factor
    if last:
        recent.store(x + y, n)
    else:
        x, y = two_sum(code, x, y)
        recent.store(x, n)
        total.store(y, n)
