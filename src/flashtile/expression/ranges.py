"""Ranges of integers, from which the width of their arithmetic follows: 32 bits where every result fits.

Positions, and the numbers of sequences and heads, are below 2**30 (`call.problem.LONGEST`), so that sums and
differences of two of them need no 64-bit arithmetic on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .program import BOOL, INT32, INT64, REAL


class Range(NamedTuple):
    """All integers from `low` to `high`, inclusive."""

    low: int
    high: int

    @property
    def kind(self) -> str:
        """The narrowest kind that has them all."""
        return INT32 if INT32_RANGE.low <= self.low and self.high <= INT32_RANGE.high else INT64


INT32_RANGE, INT64_RANGE = Range(-(2**31), 2**31 - 1), Range(-(2**63), 2**63 - 1)
CAST_RANGE = Range(INT32_RANGE.low + 2**16, INT32_RANGE.high - 2**16)
INDEX_RANGE = Range(0, 2**30 - 1)
SIZE_RANGE = Range(1, 2**31 - 1)  # an index into a dimension of size 0 is outside anyway


def of_dtype(dtype: str) -> Range:
    """The range of an integer dtype that has no numbers beyond int64."""
    info = torch.iinfo(getattr(torch, dtype))
    return Range(info.min, info.max)


def kind_of_elements(dtype: str) -> str:
    """The kind of what is loaded from a tensor of a dtype."""
    return REAL if "float" in dtype else BOOL if dtype == "bool" else of_dtype(dtype).kind


def of_kind(kind: str, source: str) -> Range:
    """The range of what is cast from `source`. Reals that become 32-bit integers leave room for sums with small
    numbers, which wrap in PyTorch's 32-bit arithmetic too.
    """
    return Range(0, 1) if source == BOOL else CAST_RANGE if kind == INT32 else INT64_RANGE


def corners(fn: Callable[[int, int], int], a: Range, b: Range) -> Range:
    """The range of a function that is monotonic in each argument."""
    values = [fn(x, y) for x in a for y in b]
    return Range(min(values), max(values))


def of_result(op: str, operands: tuple[Range, ...]) -> Range:
    """The range of an operation's results; past 64 bits they wrap, and may be anything."""
    found = exact(op, operands)
    return found if INT64_RANGE.low <= found.low and found.high <= INT64_RANGE.high else INT64_RANGE


def exact(op: str, operands: tuple[Range, ...]) -> Range:
    a, b = operands[0], operands[-1]
    match op:
        case "add":
            return Range(a.low + b.low, a.high + b.high)
        case "sub":
            return Range(a.low - b.high, a.high - b.low)
        case "mul":
            return corners(lambda x, y: x * y, a, b)
        case "neg":
            return Range(-a.high, -a.low)
        case "abs":
            low = 0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
            return Range(low, max(abs(a.low), abs(a.high)))
        case "sign":
            return Range(-1 if a.low < 0 else int(a.low > 0), 1 if a.high > 0 else -int(a.high < 0))
        case "minimum":
            return Range(min(a.low, b.low), min(a.high, b.high))
        case "maximum":
            return Range(max(a.low, b.low), max(a.high, b.high))
        case "where":
            x, y = operands[-2:]
            return Range(min(x.low, y.low), max(x.high, y.high))
        case "floordiv" if b.low > 0:
            return corners(lambda x, y: x // y, a, b)
        case "mod" if b.low > 0:
            return a if a.low >= 0 and a.high < b.low else Range(0, b.high - 1)
        case "and_" if a.low >= 0 and b.low >= 0:
            return Range(0, min(a.high, b.high))
    # Division by what may be 0 or below, and the bits of numbers of any sign.
    narrow = op not in ("floordiv", "mod") and all(x.kind == INT32 for x in operands)
    return INT32_RANGE if narrow else INT64_RANGE
