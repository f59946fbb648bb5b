"""Exact sums of float32 numbers, by integer atomics: the same bits in any order (Kulisch, "Computer Arithmetic and
Validity", 2008, chapter 8).

A finite number is an integer of 24 bits times `2 ** n`, `-149 <= n <= 104`. A sum has nine words of 64 bits in units of
`2 ** -149`, `2 ** -117`, ...; a number adds less than `2 ** 32` to each of two neighbors: `2 ** 31` numbers fit. A
tenth word has a bit each for NaN, infinity and negative infinity.
"""

import triton
import triton.language as tl

WORDS = tl.constexpr(10)
WORD_BITS = tl.constexpr(32)
LEAST_EXPONENT = tl.constexpr(-149)
NAN, POSITIVE, NEGATIVE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def add(sums, position, x, mask):
    """Add numbers `x`, fp32, to the sums at `position`, int64; any shape, or one number."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    integer = tl.where(exponent > 0, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF)
    shift = tl.maximum(exponent, 1) - 1  # above LEAST_EXPONENT
    wide = integer.to(tl.int64) << (shift % WORD_BITS).to(tl.int64)
    wide_low, wide_high = wide & 0xFFFFFFFF, wide >> WORD_BITS
    negative, finite = bits < 0, exponent < 0xFF
    low, high = tl.where(negative, -wide_low, wide_low), tl.where(negative, -wide_high, wide_high)
    first = sums + position * WORDS
    word = first + shift // WORD_BITS
    tl.atomic_add(word, low, mask=mask & finite & (low != 0), sem="relaxed")
    tl.atomic_add(word + 1, high, mask=mask & finite & (high != 0), sem="relaxed")
    special = tl.where(x != x, NAN, tl.where(negative, NEGATIVE, POSITIVE)).to(tl.int64)
    tl.atomic_or(first + (WORDS - 1), special, mask=mask & (exponent == 0xFF), sem="relaxed")
