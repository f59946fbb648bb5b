"""Intervals of integers, reals and truth values as tensors, for whole blocks of pairs at once.

An interval has bounds of all values that an expression takes in a block; for a truth value, whether it holds
always, and whether it ever does. Bounds of reals are NaN where a value may be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ranges import INT64_RANGE

LARGEST = 2.0**62  # sums and differences of two numbers up to it do not wrap


class Interval(NamedTuple):
    """Bounds, inclusive. Tensors that broadcast to `[B, H, blocks of rows, blocks of keys]`."""

    low: Tensor
    high: Tensor


Operands = tuple[Interval, ...]


def point(x: Tensor) -> Interval:
    return Interval(x, x)


def anything(like: Tensor) -> Interval:
    """The interval of all truth values."""
    return Interval(like.new_zeros((), dtype=torch.bool), like.new_ones((), dtype=torch.bool))


def union(x: Interval, y: Interval) -> Interval:
    return Interval(torch.minimum(x.low, y.low), torch.maximum(x.high, y.high))


def intersection(x: Interval, y: Interval) -> Interval:
    """Values in both; empty where `low > high`."""
    return Interval(torch.maximum(x.low, y.low), torch.minimum(x.high, y.high))


def unless(unknown: Tensor, x: Interval) -> Interval:
    """All integers where a result is unknown."""
    return Interval(torch.where(unknown, INT64_RANGE.low, x.low), torch.where(unknown, INT64_RANGE.high, x.high))


# Arithmetic of integers -----------------------------------------------------------------------------------------------


def add(a: Interval, b: Interval) -> Interval:
    return Interval(a.low + b.low, a.high + b.high)


def sub(a: Interval, b: Interval) -> Interval:
    return Interval(a.low - b.high, a.high - b.low)


def corners(values: list[Tensor]) -> Interval:
    """The interval of a function that is monotonic in each argument, from its values at their bounds."""
    low = high = values[0]
    for x in values[1:]:
        low, high = torch.minimum(low, x), torch.maximum(high, x)
    return Interval(low, high)


def mul(a: Interval, b: Interval) -> Interval:
    return corners([x * y for x in a for y in b])


def neg(a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def absolute(a: Interval) -> Interval:
    x, y = a.low.abs(), a.high.abs()
    crosses = (a.low <= 0) & (a.high >= 0)
    return Interval(torch.where(crosses, 0, torch.minimum(x, y)), torch.maximum(x, y))


def sign(a: Interval) -> Interval:
    return Interval(torch.sign(a.low), torch.sign(a.high))


def minimum(a: Interval, b: Interval) -> Interval:
    return Interval(torch.minimum(a.low, b.low), torch.minimum(a.high, b.high))


def maximum(a: Interval, b: Interval) -> Interval:
    return Interval(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


def floordiv(a: Interval, b: Interval) -> Interval:
    """Unknown where a divisor may be 0 or below."""
    positive = Interval(b.low.clamp(min=1), b.high.clamp(min=1))
    return unless(b.low <= 0, corners([x // y for x in a for y in positive]))


def mod(a: Interval, b: Interval) -> Interval:
    """Remainders of consecutive integers are consecutive until they wrap. Unknown where a divisor may be 0 or below."""
    divisor = b.high.clamp(min=1)
    low, high = a.low % divisor, a.high % divisor
    length = a.high.double() - a.low.double()
    consecutive = (b.low == b.high) & (length < divisor) & (low <= high)
    unchanged = (a.low >= 0) & (a.high < b.low)
    low = torch.where(unchanged, a.low, torch.where(consecutive, low, 0))
    high = torch.where(unchanged, a.high, torch.where(consecutive, high, divisor - 1))
    return unless(b.low <= 0, Interval(low, high))


def bit_and(a: Interval, b: Interval) -> Interval:
    """The interval of `a & b`, of integers."""
    high = torch.minimum(a.high, b.high)
    return unless((a.low < 0) | (b.low < 0), Interval(torch.zeros_like(high), high))


def bit_not(a: Interval) -> Interval:
    return Interval(~a.high, ~a.low)


def guarded(op: str, result: Interval, operands: Operands) -> Interval:
    """The result of an operation that may wrap past 64 bits: unknown where it is near."""
    near = result.low != result.low
    for x in ARITHMETIC[op](*(Interval(*(bound.double() for bound in y)) for y in operands)):
        near = near | (x.abs() >= LARGEST)
    return unless(near, result)


WRAPPING = ("add", "sub", "mul", "neg", "abs")
ARITHMETIC = {
    "add": add, "sub": sub, "mul": mul, "neg": neg, "abs": absolute, "sign": sign, "minimum": minimum,
    "maximum": maximum, "floordiv": floordiv, "mod": mod, "and_": bit_and, "not_": bit_not,
}  # fmt: skip


# Comparisons ----------------------------------------------------------------------------------------------------------
# A comparison with NaN is false. Therefore "ever" is the opposite of a comparison, which NaN makes true.


def lt(a: Interval, b: Interval) -> Interval:
    return Interval(a.high < b.low, ~(a.low >= b.high))


def le(a: Interval, b: Interval) -> Interval:
    return Interval(a.high <= b.low, ~(a.low > b.high))


def gt(a: Interval, b: Interval) -> Interval:
    return Interval(a.low > b.high, ~(a.high <= b.low))


def ge(a: Interval, b: Interval) -> Interval:
    return Interval(a.low >= b.high, ~(a.high < b.low))


def eq(a: Interval, b: Interval) -> Interval:
    always = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Interval(always, ~((a.high < b.low) | (a.low > b.high)))


def ne(a: Interval, b: Interval) -> Interval:
    return no(eq(a, b))


COMPARISONS = {"lt": lt, "le": le, "gt": gt, "ge": ge, "eq": eq, "ne": ne}


def has_remainder(x: Interval, divisor: Interval, remainder: Interval) -> Tensor:
    """Whether any integer of `x` may leave this remainder: exact where there is one divisor and one remainder."""
    c, r = divisor.low.clamp(min=1), remainder.low
    single = (divisor.low == divisor.high) & (r == remainder.high) & (divisor.low > 0)
    small = (x.low > -LARGEST) & (x.high < LARGEST) & (r >= 0) & (r < c)
    found = (x.high - r) // c != (x.low - r - 1) // c
    return found | ~(single & small)


def narrowed(op: str, x: Interval, y: Interval) -> Interval:
    """The values of `x` for which its comparison with a value of `y` may hold; integers."""
    match op:
        case "lt":
            return Interval(x.low, torch.minimum(x.high, y.high - 1))
        case "le":
            return Interval(x.low, torch.minimum(x.high, y.high))
        case "gt":
            return Interval(torch.maximum(x.low, y.low + 1), x.high)
        case "ge":
            return Interval(torch.maximum(x.low, y.low), x.high)
    return intersection(x, y)  # eq


MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}  # with the operands in the other order


# Logic ----------------------------------------------------------------------------------------------------------------


def both(a: Interval, b: Interval) -> Interval:
    return Interval(a.low & b.low, a.high & b.high)


def either(a: Interval, b: Interval) -> Interval:
    return Interval(a.low | b.low, a.high | b.high)


def no(a: Interval) -> Interval:
    return Interval(~a.high, ~a.low)


def differ(a: Interval, b: Interval) -> Interval:
    always = (a.low & ~b.high) | (b.low & ~a.high)
    equal = (a.low & b.low) | ~(a.high | b.high)
    return Interval(always, ~equal)


def same(a: Interval, b: Interval) -> Interval:
    return no(differ(a, b))


LOGIC = {"and_": both, "or_": either, "not_": no, "xor": differ, "ne": differ, "eq": same}


def chosen(condition: Interval, x: Interval, y: Interval) -> Interval:
    """`where(condition, x, y)`."""
    if x.low.dtype is torch.bool:
        low = (condition.low & x.low) | (~condition.high & y.low) | (x.low & y.low)
        return Interval(low, (condition.high & x.high) | (~condition.low & y.high))
    either_one = union(x, y)
    bounds = (
        torch.where(condition.low, a, torch.where(condition.high, c, b))
        for a, b, c in zip(x, y, either_one, strict=True)
    )
    return Interval(*bounds)
