"""Products of tiles, and the running sums that they add up to.

A sum over a million keys in one float32 accumulator loses four digits. Those of float32 inputs are compensated, so that
their error does not grow with the number of terms (Kahan, "Further remarks on reducing truncation errors", 1965): the
sum of each block starts from zero. 16-bit inputs are added up by the matrix units, which truncate (docs/contract.md).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import Chunks

LARGEST = tl.constexpr(3.4028234663852886e38)


class Sum(NamedTuple):
    """A compensated sum, or a plain one, whose compensation is the number 0."""

    total: tl.tensor
    compensation: tl.tensor  # what rounding has added to `total`


class Sums(NamedTuple):
    """Running sums `[M, D]` in chunks, as `Chunks`; the excesses are the number 0 where matrix units add."""

    a: tl.tensor
    b: tl.tensor
    compensation_a: tl.tensor
    compensation_b: tl.tensor


@triton.jit
def zero_sum(zero, COMPENSATED: tl.constexpr):
    """A sum of the shape of `zero` before anything is added."""
    return Sum(zero, zero if COMPENSATED else 0.0)


@triton.jit
def add(x, part, COMPENSATED: tl.constexpr):
    """The sum with one more part."""
    return add_scaled(x, 1.0, part, COMPENSATED)


@triton.jit
def add_scaled(x, alpha, part, COMPENSATED: tl.constexpr):
    """The sum times `alpha`, with one more part. An infinite sum stays infinite: its compensation would be NaN."""
    if COMPENSATED:
        y = tl.fma(x.compensation, -alpha, part)
        total = tl.fma(x.total, alpha, y)
        compensation = tl.fma(x.total, -alpha, total) - y
        return Sum(total, tl.minimum(compensation, LARGEST))
    else:
        return Sum(x.total * alpha + part, x.compensation)


@triton.jit
def zeros(N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, COMPENSATED: tl.constexpr):
    """Sums `[N, D]` before anything is added."""
    a = tl.zeros([N, D0], tl.float32)
    b = 0.0 if D1 == 0 else tl.zeros([N, D1], tl.float32)
    compensation_a = tl.zeros([N, D0], tl.float32) if COMPENSATED else 0.0
    compensation_b = tl.zeros([N, D1], tl.float32) if COMPENSATED and D1 > 0 else 0.0
    return Sums(a, b, compensation_a, compensation_b)


@triton.jit
def scaled(x, factor, D1: tl.constexpr):
    """`x [N, D]` times `factor`, a number or `[N, 1]`."""
    if D1 == 0:
        return Chunks(x.a * factor, x.b)
    else:
        return Chunks(x.a * factor, x.b * factor)


@triton.jit
def inner_products(x, y, D1: tl.constexpr, PRECISION: tl.constexpr):
    """`x [M, D] @ y [N, D]^T`, fp32 `[M, N]`."""
    s = tl.dot(x.a, y.a.T, input_precision=PRECISION)
    if D1 > 0:
        s = tl.dot(x.b, y.b.T, s, input_precision=PRECISION)
    return s


@triton.jit
def add_product(acc, alpha, p, y, D1: tl.constexpr, PRECISION: tl.constexpr):
    """`acc [M, D] * alpha + p [M, N] @ y [N, D]`; `alpha` is `[M, 1]`, or `None` for 1."""
    a, compensation_a = add_chunk(acc.a, acc.compensation_a, alpha, p, y.a, PRECISION)
    if D1 == 0:
        return Sums(a, acc.b, compensation_a, acc.compensation_b)
    else:
        b, compensation_b = add_chunk(acc.b, acc.compensation_b, alpha, p, y.b, PRECISION)
        return Sums(a, b, compensation_a, compensation_b)


@triton.jit
def add_chunk(acc, compensation, alpha, p, y, PRECISION: tl.constexpr):
    """One chunk of `add_product`, and its compensation."""
    if y.dtype == tl.float32:
        part = tl.dot(p, y, input_precision=PRECISION)
        found = add_scaled(Sum(acc, compensation), 1.0 if alpha is None else alpha, part, True)
        return found.total, found.compensation
    else:
        acc = acc if alpha is None else acc * alpha
        return tl.dot(p.to(y.dtype), y, acc, input_precision=PRECISION), compensation
