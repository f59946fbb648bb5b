"""Functions of numbers that generated code calls (`backend.gpu.formula`), and those of the softcap."""

import triton
import triton.language as tl

from .softmax import LN2, LOG2E

KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)  # of minimum and maximum


@triton.jit
def tanh(x):
    """Within 3 units in the last place: a series where `1 - 2 / (e^2x + 1)` would cancel (Abramowitz and Stegun,
    4.5.64).
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    quotient = 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)
    return tl.where(square < 0.04, series, quotient)


@triton.jit
def fast_tanh(x):
    """Relative error 4e-6, a hundredth of the rounding of float16 inputs: a quotient of two polynomials, fitted to the
    least relative error up to 6.5, where tanh is 1. One special function instead of two.
    """
    x = tl.maximum(x, -6.5, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 6.5, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    above = 0.9999994181878639 + square * (
        0.12382975705472646 + square * (0.002349169468988402 + square * 4.2760037824266486e-06)
    )
    below = 1 + square * (0.45715849213461746 + square * (0.02140813340500195 + square * 0.00015023561741497716))
    root = tl.rsqrt(below)  # its square is the reciprocal, by one instruction: a division takes eight
    return (x * above) * (root * root)


@triton.jit
def exp(x):
    """Within 3 units in the last place: the rounding error of `x * log2(e)` is a factor of its own. Clamped, because
    that error of an infinity would be NaN.
    """
    x = tl.maximum(x, -110.0, propagate_nan=tl.PropagateNan.ALL)  # 0
    x = tl.minimum(x, 100.0, propagate_nan=tl.PropagateNan.ALL)  # infinity
    log2 = x * LOG2E
    error = tl.fma(x, LOG2E, -log2) + x * 1.9259629911266175e-08  # of LOG2E in float32
    return tl.exp2(log2) * (1 + error * LN2)


@triton.jit
def fast_exp(x):
    return tl.exp(x)


@triton.jit
def sigmoid(x):
    return 1 / (1 + exp(-x))


@triton.jit
def fast_sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def unsigned(x):
    """An integer as an unsigned one of the same width."""
    return x.to(tl.uint64) if x.dtype == tl.int64 else x.to(tl.uint32)


@triton.jit
def inside(index, size):
    """Whether `0 <= index < size`, by one comparison."""
    small = unsigned(index) < (size.to(tl.uint64) if index.dtype == tl.int64 else size.to(tl.uint32))
    return tl.where(small, True, False)  # Triton's interpreter (3.9) broadcasts a number's comparison as an integer


@triton.jit
def load_pairs(pointers, mask, OTHER: tl.constexpr, size):
    """Load an element for each pair, in a branch that is always taken unless the tensor is empty.

    Triton (3.6 to 3.9) starts other loads of a loop an iteration ahead, by copies to shared memory. For elements from
    all over a table that costs a tile of memory and the registers of all addresses, and gains nothing.
    """
    found = tl.where(mask, OTHER, OTHER).to(pointers.dtype.element_ty)  # in the layout of a caller in Gluon too
    if size > 0:
        found = tl.load(pointers, mask=mask, other=OTHER)
    return found


@triton.jit
def floordiv(x, y, NONNEGATIVE: tl.constexpr):
    """Integer division that rounds down; Triton's rounds toward zero. NONNEGATIVE: neither is below 0."""
    if NONNEGATIVE:  # unsigned, a division by a power of two is a shift
        return (unsigned(x) // unsigned(y)).to(x.dtype)
    else:
        quotient = x // y
        rest = x - quotient * y
        return tl.where((rest != 0) & ((rest ^ y) < 0), quotient - 1, quotient)


@triton.jit
def mod(x, y, NONNEGATIVE: tl.constexpr):
    """The remainder of `floordiv`, which has the divisor's sign."""
    if NONNEGATIVE:
        return (unsigned(x) % unsigned(y)).to(x.dtype)
    else:
        rest = x % y
        return tl.where((rest != 0) & ((rest ^ y) < 0), rest + y, rest)
