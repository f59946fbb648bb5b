"""Products of float32 numbers on matrix units of 16-bit numbers.

`x = hi + mid + low` with 8 bits each, all of one float32 number. Six products of parts leave out those below `2 ** -22`
of a product. Unlike TF32, bfloat16 operands may lie in memory in any order, so one copy of a tile serves both of the
products that it takes part in, and inputs are split once, ahead of the kernels that read them many times.
"""

from typing import NamedTuple

import triton
import triton.language as tl

UPPER, HALF = tl.constexpr(-65536), tl.constexpr(0x8000)  # bits of a bfloat16 number; half a unit in its last place


class Split(NamedTuple):
    """The parts of float32 numbers, bfloat16. `hi` has all of an infinity or NaN; then `low` is NaN."""

    hi: tl.tensor
    mid: tl.tensor
    low: tl.tensor


@triton.jit
def split(x):
    """Split numbers. `hi` is truncated, because rounding could make an infinity of a finite number; `mid` is rounded.
    Integer instructions: a conversion of single numbers takes four times as long.
    """
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & UPPER).to(tl.float32, bitcast=True)
    rounded = rest.to(tl.int32, bitcast=True) + HALF
    low = rest - (rounded & UPPER).to(tl.float32, bitcast=True)
    return Split(upper_half(bits), upper_half(rounded), low.to(tl.bfloat16))


@triton.jit
def upper_half(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def transposed(x):
    return Split(x.hi.T, x.mid.T, x.low.T)


@triton.jit
def split_product(x, y, acc):
    """`x [M, K] @ y [K, N] + acc`, fp32; `acc` is small, or `None`.

    The small products come first. They are NaN where a factor is not finite, and then the large one is the result.
    """
    s = tl.dot(x.low, y.hi, acc)
    s = tl.dot(x.hi, y.low, s)
    s = tl.dot(x.mid, y.mid, s)
    s = tl.dot(x.mid, y.hi, s)
    s = tl.dot(x.hi, y.mid, s)
    return tl.dot(x.hi, y.hi, tl.where(s == s, s, 0.0))
