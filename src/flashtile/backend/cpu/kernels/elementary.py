"""exp2, log2 and tanh of vectors, in float32 and float64. All propagate NaN."""

import functools
import math

import numpy as np

from .codegen import Code
from .operands import DOUBLE, Value

LOG2E, LN2 = math.log2(math.e), math.log(2)


class FloatFormat:
    """Bit layout of a floating-point type, and the lengths of the approximations that its precision needs."""

    def __init__(self, code: Code):
        double = code.real_type is DOUBLE
        self.mantissa = 52 if double else 23
        self.bias = 1023 if double else 127
        self.degree = 11 if double else 5  # of exp2's polynomial
        self.terms = 11 if double else 5  # of the logarithm's series
        # Adding this rounds to an integer and leaves it, plus the exponent's bias, in the low bits of the mantissa.
        self.rounding = 1.5 * 2.0**self.mantissa + self.bias


@functools.cache
def exp2_coefficients(degree: int) -> tuple[float, ...]:
    """Coefficients of `1, f, f**2, ...` in `g`, where `2**f = 1 + f * g` on [-0.5, 0.5]: interpolation at Chebyshev
    points, within a factor of two of the best error. The leading 1 makes `exp2(0) == 1` exactly.
    """
    points = np.cos(np.pi * (np.arange(degree) + 0.5) / degree) / 2
    values = np.expm1(points * LN2) / np.where(points == 0, 1, points)
    values = np.where(points == 0, LN2, values)
    return tuple(np.polynomial.polynomial.polyfit(points, values, degree - 1).tolist())


def split_exp2(code: Code, x: Value) -> tuple[Value, Value, Value]:
    """Split `2**x = 2**n * (1 + f * g)` into `2**n`, `f` and `g`. `2**n` is 0 for `n <= -127` (-1023); `x` is at most
    128 (1024).
    """
    fmt = FloatFormat(code)
    x = code.maximum(code.full(-fmt.bias), x)  # `maximum` returns its second operand if either is NaN
    shifted = x + fmt.rounding
    f = x - (shifted - fmt.rounding)
    *higher, first = exp2_coefficients(fmt.degree)[::-1]
    g = code.full(higher[0])
    for c in (*higher[1:], first):
        g = code.multiply_add(g, f, code.full(c))
    power = code.bitcast(code.bitcast(shifted, code.bits) << fmt.mantissa, code.real_type)
    return power, f, g


def exp2(code: Code, x: Value) -> Value:
    """`2**x` for `x <= 128` (1024). Results below the smallest normal number are flushed to 0."""
    power, f, g = split_exp2(code, x)
    return code.multiply_add(f, g, code.full(1.0)) * power


def tanh(code: Code, x: Value) -> Value:
    """`tanh(|x|) = -e / (2 + e)` with `e = exp(-2 |x|) - 1`, formed without cancellation; then x's sign."""
    magnitude = code.intrinsic("llvm.fabs", x)
    power, f, g = split_exp2(code, magnitude * (-2 * LOG2E))
    e = code.multiply_add(power, f * g, power - 1.0)
    return code.intrinsic("llvm.copysign", (0.0 - e) / (e + 2.0), x)


def log2(code: Code, x: Value) -> Value:
    """Base-2 logarithm of normal numbers, infinity and NaN. With `x = 2**n * y`, y near 1, and `z = (y - 1) / (y + 1)`,
    `log(y) = 2 (z + z**3 / 3 + z**5 / 5 + ...)`.
    """
    fmt = FloatFormat(code)
    bits = code.bitcast(x, code.bits)
    half = round(math.sqrt(0.5) * 2**fmt.mantissa) * 2 - 2**fmt.mantissa  # y runs from sqrt(1/2) to sqrt(2)
    exponent = ((bits + (2**fmt.mantissa - half)) >> fmt.mantissa) - fmt.bias
    y = code.bitcast(bits - (exponent << fmt.mantissa), code.real_type)
    z = (y - 1.0) / (y + 1.0)
    square = z * z
    series = code.full(1 / (2 * fmt.terms + 1))
    for k in range(fmt.terms - 1, -1, -1):
        series = code.multiply_add(series, square, code.full(1 / (2 * k + 1)))
    result = code.multiply_add(series, z * (2 * LOG2E), code.convert(exponent, code.real_type))
    return code.select(x < math.inf, result, x)
