"""Elementary functions of vectors, in float32 and float64. All propagate NaN.

exp2 and log2 are the softmax's, for the arguments that it has. The functions of formulas take every real, infinities
and subnormal numbers included, with errors of a few ulp.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from ..variant import LOG2E
from .codegen import Code
from .operands import DOUBLE, Value

LN2 = math.log(2)
LN2_ERROR = 2.3190468138462996e-17  # log(2) - LN2


class FloatFormat:
    """Bit layout of a floating-point type, and the lengths of the approximations that its precision needs."""

    def __init__(self, code: Code):
        double = code.real_type is DOUBLE
        self.mantissa = 52 if double else 23
        self.bias = 1023 if double else 127
        self.degree = 11 if double else 5  # exp2's polynomial
        self.terms = 11 if double else 5  # terms of the logarithm's series
        # Adding this rounds to an integer and leaves it in the low bits of the mantissa; `rounding` adds the bias too.
        self.to_integer = 1.5 * 2.0**self.mantissa
        self.rounding = self.to_integer + self.bias
        # log(2) in two parts; products of the first one with exponents are exact.
        self.ln2 = math.floor(LN2 * 2.0 ** (self.mantissa - 10)) / 2.0 ** (self.mantissa - 10)
        self.ln2_rest = LN2 - self.ln2 + LN2_ERROR


@functools.cache
def exp2_coefficients(degree: int) -> tuple[float, ...]:
    """Coefficients of `1, f, f**2, ...` in `g`, where `2**f = 1 + f * g` on [-0.5, 0.5]: interpolation at Chebyshev
    points, within a factor of two of the best error. The leading 1 makes `exp2(0) == 1` exactly.
    """
    points = np.cos(np.pi * (np.arange(degree) + 0.5) / degree) / 2
    values = np.expm1(points * LN2) / np.where(points == 0, 1, points)
    values = np.where(points == 0, LN2, values)
    return tuple(np.polynomial.polynomial.polyfit(points, values, degree - 1).tolist())


def split_exp2(code: Code, x: Value, degree: int) -> tuple[Value, Value, Value]:
    """Split `2**x = 2**n * (1 + f * g)` into `2**n`, `f` and `g`, a polynomial such that `f * g` has this degree.
    `2**n` is 0 for `n <= -127` (-1023); `x` is at most 128 (1024).
    """
    fmt = FloatFormat(code)
    x = code.maximum(code.full(-fmt.bias), x)  # `maximum` returns its second operand if either is NaN
    shifted = x + fmt.rounding
    f = x - (shifted - fmt.rounding)
    g = polynomial(code, exp2_coefficients(degree), f)
    power = code.bitcast(code.bitcast(shifted, code.bits) << fmt.mantissa, code.real_type)
    return power, f, g


def exp2(code: Code, x: Value) -> Value:
    """`2**x` for `x <= 128` (1024). Results below the smallest normal number are flushed to 0."""
    power, f, g = split_exp2(code, x, FloatFormat(code).degree)
    return code.multiply_add(f, g, code.full(1.0)) * power


def tanh(code: Code, x: Value) -> Value:
    """`tanh(|x|) = -e / (2 + e)` with `e = exp(-2 |x|) - 1`, formed without cancellation; then x's sign."""
    magnitude = code.intrinsic("llvm.fabs", x)
    power, f, g = split_exp2(code, magnitude * (-2 * LOG2E), FloatFormat(code).degree + 1)  # e may be much less than 1
    e = code.multiply_add(power, f * g, power - 1.0)
    return code.intrinsic("llvm.copysign", (0.0 - e) / (e + 2.0), x)


class SplitLogarithm(NamedTuple):
    """`log(x) = exponent * log(2) + series * 2 * z`, with an integer exponent."""

    exponent: Value
    series: Value
    z: Value


def split_log(code: Code, x: Value) -> SplitLogarithm:
    """Split the logarithm of a normal number. With `x = 2**n * y`, y near 1, and `z = (y - 1) / (y + 1)`,
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
    return SplitLogarithm(exponent, series, z)


def log2(code: Code, x: Value) -> Value:
    """Base-2 logarithm of normal numbers, infinity and NaN."""
    exponent, series, z = split_log(code, x)
    result = code.multiply_add(series, z * (2 * LOG2E), code.convert(exponent, code.real_type))
    return code.select(x < math.inf, result, x)


# Functions of formulas ------------------------------------------------------------------------------------------------


def log(code: Code, x: Value) -> Value:
    """Natural logarithm; NaN of negative numbers."""
    fmt = FloatFormat(code)
    subnormal = x < 2.0 ** (1 - fmt.bias)
    shift = fmt.mantissa + 1
    exponent, series, z = split_log(code, code.select(subnormal, x * 2.0**shift, x))
    n = code.convert(exponent, code.real_type) - code.select(subnormal, code.full(shift), 0.0)
    result = code.multiply_add(n, code.full(fmt.ln2), code.multiply_add(series, z * 2.0, n * fmt.ln2_rest))
    of_other = code.select(x.equals(0), code.full(-math.inf), math.nan)
    return code.select(x < math.inf, code.select(x > 0, result, of_other), x)


def exp(code: Code, x: Value) -> Value:
    """`e**x = 2**n * 2**f`, where `n` is an integer and `f = (x - n log(2)) / log(2)`. The product `n log(2)` is exact
    in two parts (Cody and Waite, "Software manual for the elementary functions", 1980, chapter 6), and `2**n` has two
    factors, since it may be subnormal or infinite.
    """
    fmt = FloatFormat(code)
    x = code.maximum(code.full(-(fmt.bias + fmt.mantissa + 2) * LN2), x)  # the second operand if either is NaN
    x = code.minimum(code.full((fmt.bias + 3) * LN2), x)
    shifted = x * LOG2E + fmt.to_integer
    n = shifted - fmt.to_integer
    f = ((x - n * fmt.ln2) - n * fmt.ln2_rest) * LOG2E
    g = polynomial(code, exp2_coefficients(fmt.degree + 1), f)
    integer = code.bitcast(shifted, code.bits) - code.bitcast(code.full(fmt.to_integer), code.bits)
    half = ((integer + 2**12) >> 1) - 2**11
    powers = [code.bitcast((k + fmt.bias) << fmt.mantissa, code.real_type) for k in (half, integer - half)]
    return code.multiply_add(f, g, code.full(1.0)) * powers[0] * powers[1]


def sigmoid(code: Code, x: Value) -> Value:
    """`1 / (1 + e**-x)`; of negative numbers `e**x / (1 + e**x)`, which does not overflow."""
    e = exp(code, code.intrinsic("llvm.fabs", x) * -1.0)
    return code.select(x < 0, e, 1.0) / (e + 1.0)


def erf(code: Code, x: Value) -> Value:
    """Error function: up to 1 its series (Abramowitz and Stegun, "Handbook of mathematical functions", 1964, 7.1.5),
    from there `1 - e**(-x**2) * P(t)`, the form of 7.1.26 with a longer polynomial.
    """
    magnitude = code.intrinsic("llvm.fabs", x)
    small = code.minimum(code.full(1.0), magnitude)  # the second operand if either is NaN
    of_small = small * polynomial(code, erf_series(code.real_type is DOUBLE), small * small)
    large = code.minimum(code.full(ERF_RANGE[1]), code.maximum(code.full(ERF_RANGE[0]), magnitude))
    first, last = (1 / (1 + y / 2) for y in ERF_RANGE)
    t = (1.0 / (large * 0.5 + 1.0)) * (2 / (last - first)) - (last + first) / (last - first)
    scaled_erfc = polynomial(code, erfc_coefficients(20 if code.real_type is DOUBLE else 9), t)
    of_large = 1.0 - exp(code, large * large * -1.0) * scaled_erfc
    return code.intrinsic("llvm.copysign", code.select(magnitude < 1.0, of_small, of_large), x)


def floor(code: Code, x: Value) -> Value:
    """The largest integer up to x. Processors without an instruction for it add and subtract a number whose last bit is
    worth 1; reals that large are integers.
    """
    if code.target.fma:
        return code.intrinsic("llvm.floor", x)
    magnitude, first_integer = code.intrinsic("llvm.fabs", x), 2.0 ** FloatFormat(code).mantissa
    nearest = code.intrinsic("llvm.copysign", (magnitude + first_integer) - first_integer, x)
    result = nearest - code.select(nearest > x, code.full(1.0), 0.0)
    return code.select(magnitude < first_integer, result, x)


ERF_RANGE = (0.8, 6.0)  # more than where `erf` is neither its series nor 1: interpolation is worst at the ends


@functools.cache
def erf_series(double: bool) -> tuple[float, ...]:
    """Coefficients of `1, x**2, x**4, ...` in `erf(x) / x`, as many as numbers up to 1 need."""
    terms = 20 if double else 12
    return tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(terms))


@functools.cache
def erfc_coefficients(count: int) -> tuple[float, ...]:
    """Coefficients of a polynomial for `e**(x**2) erfc(x)` in `t`, which is `1 / (1 + x / 2)` scaled from [-1, 1] to
    `ERF_RANGE`: interpolation at Chebyshev points.
    """
    first, last = (1 / (1 + y / 2) for y in ERF_RANGE)

    def of_point(t: float) -> float:
        x = 2 / ((last + first) / 2 + t * (last - first) / 2) - 2
        return math.exp(x * x) * math.erfc(x)

    series = np.polynomial.chebyshev.chebinterpolate(np.vectorize(of_point), count - 1)
    return tuple(np.polynomial.chebyshev.cheb2poly(series).tolist())


def polynomial(code: Code, coefficients: tuple[float, ...], x: Value) -> Value:
    """A polynomial by Horner's rule, from the coefficients of `1, x, x**2, ...`."""
    total = code.full(coefficients[-1])
    for c in coefficients[-2::-1]:
        total = code.multiply_add(total, x, code.full(c))
    return total
