"""Functions of numbers that generated code calls (`backend.gpu.formula`). Inputs are float16 or bfloat16, so that
4e-6 is a hundredth of their rounding error.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import LOG2E

KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)  # of minimum and maximum


@gluon.jit
def exp(x):
    return gl.exp2(x * LOG2E)


@gluon.jit
def sigmoid(x):
    return reciprocal(1 + exp(-x))


@gluon.jit
def tanh(x):
    """Relative error 4e-6: a quotient of two polynomials, fitted to the least relative error up to 6.5, where tanh is
    1. One special function instead of two.
    """
    x = gl.maximum(x, -6.5, propagate_nan=KEEP_NAN)
    x = gl.minimum(x, 6.5, propagate_nan=KEEP_NAN)
    square = x * x
    above = 0.9999994181878639 + square * (
        0.12382975705472646 + square * (0.002349169468988402 + square * 4.2760037824266486e-06)
    )
    below = 1 + square * (0.45715849213461746 + square * (0.02140813340500195 + square * 0.00015023561741497716))
    return (x * above) * reciprocal(below)


@gluon.jit
def reciprocal(x):
    """`1 / x` within one unit in the last place, in one instruction; a division takes eight."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scaled_distance(real_distance, factor):
    """A number of the head times distances: one multiply-add for each different one. The explicit one makes the
    constants its factor; contracted, it has them in registers.
    """
    return gl.fma(real_distance[1], factor, real_distance[0] * factor)


@gluon.jit
def unsigned(x):
    """An integer as an unsigned one of the same width."""
    return x.to(gl.uint64) if x.dtype == gl.int64 else x.to(gl.uint32)


@gluon.jit
def inside(index, size):
    """Whether `0 <= index < size`, by one comparison."""
    return unsigned(index) < (size.to(gl.uint64) if index.dtype == gl.int64 else size.to(gl.uint32))


@gluon.jit
def load_pairs(pointers, mask, OTHER: gl.constexpr, size):
    """Load an element for each pair."""
    return gl.load(pointers, mask=mask, other=OTHER)


@gluon.jit
def in_run(keys, run):
    """Indices of keys, in 64 bits: then the addresses of a run's keys are one register and constants."""
    return keys.to(gl.int64) if run is None else run.keys


@gluon.jit
def load_run(pointers, mask, OTHER: gl.constexpr, before, size, run):
    """Load an element for each key. `before`: whether the indices before the key's are inside of the tensor."""
    if run is None:
        x = gl.load(pointers, mask=mask, other=OTHER)
    elif before & (run.stop <= size):
        x = gl.load(pointers)
    else:
        x = gl.load(pointers, mask=mask, other=OTHER)
    return x


@gluon.jit
def floordiv(x, y, NONNEGATIVE: gl.constexpr):
    """Integer division that rounds down; Gluon's rounds toward zero. NONNEGATIVE: neither is below 0."""
    if NONNEGATIVE:  # unsigned, a division by a power of two is a shift
        return (unsigned(x) // unsigned(y)).to(x.dtype)
    else:
        quotient = x // y
        rest = x - quotient * y
        return gl.where((rest != 0) & ((rest ^ y) < 0), quotient - 1, quotient)


@gluon.jit
def mod(x, y, NONNEGATIVE: gl.constexpr):
    """The remainder of `floordiv`, which has the divisor's sign."""
    if NONNEGATIVE:
        return (unsigned(x) % unsigned(y)).to(x.dtype)
    else:
        rest = x % y
        return gl.where((rest != 0) & ((rest ^ y) < 0), rest + y, rest)
