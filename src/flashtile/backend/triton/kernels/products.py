"""Products of tiles, and the running sums that they add up to.

A sum of a million terms in one float32 accumulator loses four digits. For float32 inputs each block's sum starts from
zero and is added with compensation (Kahan, "Further remarks on reducing truncation errors", 1965), so that the error
does not grow with the number of terms. For 16-bit inputs the matrix units accumulate, which truncates
(docs/contract.md).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import Chunks
from .split import split, split_product, transposed

MAX_FLOAT = tl.constexpr(3.4028234663852886e38)


class Sum(NamedTuple):
    """A running sum."""

    total: tl.tensor
    compensation: tl.tensor  # what rounding has taken from `total`; the number 0 in a plain sum


class Sums(NamedTuple):
    """Running sums `[M, D]` in chunks, as `Chunks`."""

    a: tl.tensor
    b: tl.tensor
    compensation_a: tl.tensor
    compensation_b: tl.tensor


@triton.jit
def zero_sum(zero, COMPENSATED: tl.constexpr):
    """An empty sum of the shape of `zero`."""
    return Sum(zero, zero if COMPENSATED else 0.0)


@triton.jit
def add(x, part, COMPENSATED: tl.constexpr):
    """Add `part`."""
    return add_scaled(x, 1.0, part, COMPENSATED)


@triton.jit
def add_scaled(x, alpha, part, COMPENSATED: tl.constexpr):
    """Multiply by `alpha`, then add `part`. An infinite sum stays infinite: its compensation would be NaN."""
    if COMPENSATED:
        return add_compensated(x.total, alpha, tl.fma(x.compensation, alpha, part))
    else:
        return Sum(x.total * alpha + part, x.compensation)


@triton.jit
def add_compensated(total, alpha, part):
    """`total * alpha + part`, where `part` includes the compensation."""
    new = tl.fma(total, alpha, part)
    compensation = part - tl.fma(total, -alpha, new)
    return Sum(new, tl.maximum(compensation, -MAX_FLOAT))


@triton.jit
def zeros(N: tl.constexpr, D: tl.constexpr, COMPENSATED: tl.constexpr):
    """Empty sums `[N, D]`."""
    D0: tl.constexpr = D.CHUNK_0
    D1: tl.constexpr = D.CHUNK_1
    a = tl.zeros([N, D0], tl.float32)
    b = 0.0 if D1 == 0 else tl.zeros([N, D1], tl.float32)
    compensation_a = tl.zeros([N, D0], tl.float32) if COMPENSATED else 0.0
    compensation_b = tl.zeros([N, D1], tl.float32) if COMPENSATED and D1 > 0 else 0.0
    return Sums(a, b, compensation_a, compensation_b)


@triton.jit
def scaled(x, factor, D: tl.constexpr):
    """`x [N, D]` times `factor`, a number or `[N, 1]`."""
    if D.CHUNK_1 == 0:
        return Chunks(x.a * factor, x.b)
    else:
        return Chunks(x.a * factor, x.b * factor)


@triton.jit
def inner_products(x, y, D: tl.constexpr, CONFIG: tl.constexpr):
    """`x [M, D] @ y [N, D]^T`, fp32 `[M, N]`."""
    if D.SPLIT:
        s = split_product(x.a, transposed(y.a), None)
        if D.CHUNK_1 > 0:
            s += split_product(x.b, transposed(y.b), None)
    else:
        s = tl.dot(x.a, y.a.T, input_precision=CONFIG.PRECISION)
        if D.CHUNK_1 > 0:
            s = tl.dot(x.b, y.b.T, s, input_precision=CONFIG.PRECISION)
    return s


@triton.jit
def add_product(acc, alpha, p, y, D: tl.constexpr, CONFIG: tl.constexpr):
    """`acc [M, D] * alpha + p [M, N] @ y [N, D]`; `alpha` is `[M, 1]`, or `None` for 1."""
    if D.SPLIT:
        p = split(p)
    a, compensation_a = add_chunk(acc.a, acc.compensation_a, alpha, p, y.a, D, CONFIG)
    if D.CHUNK_1 == 0:
        return Sums(a, acc.b, compensation_a, acc.compensation_b)
    else:
        b, compensation_b = add_chunk(acc.b, acc.compensation_b, alpha, p, y.b, D, CONFIG)
        return Sums(a, b, compensation_a, compensation_b)


@triton.jit
def add_chunk(acc, compensation, alpha, p, y, D: tl.constexpr, CONFIG: tl.constexpr):
    """One chunk of `add_product`, and its compensation."""
    if D.SPLIT:  # without a factor `alpha`: the compensation needs no registers of its own during the product
        x = add_compensated(acc, 1.0, split_product(p, y, compensation))
        return x.total, x.compensation
    elif y.dtype == tl.float32:
        part = tl.dot(p, y, input_precision=CONFIG.PRECISION)
        x = add_scaled(Sum(acc, compensation), 1.0 if alpha is None else alpha, part, True)
        return x.total, x.compensation
    else:
        acc = acc if alpha is None else acc * alpha
        return tl.dot(p.to(y.dtype), y, acc, input_precision=CONFIG.PRECISION), compensation
