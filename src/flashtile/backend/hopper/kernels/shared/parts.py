"""Products of float32 numbers: six of their bfloat16 parts, and sums that keep their rounding errors.

`x = hi + mid + low` as in `backend.triton.kernels.split`. Parts of rows lie side by side in memory; in shared memory,
the chunks of `hi` come first, then those of `mid` and of `low`. With one part, numbers have 16 bits: a product is one
product, and a sum is its accumulator.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .mma import gemm_nt, gemm_rs, gemm_wait, scale_rows, zero_accumulators

UPPER, HALF = gl.constexpr(-65536), gl.constexpr(0x8000)  # bits of a bfloat16 number; half a unit in its last place
MAX_FLOAT = gl.constexpr(3.4028234663852886e38)
# Parts of the left and right factor of all products but the largest, the smallest first; by the number of parts.
LEFT, RIGHT = gl.constexpr(((), (), (1, 0), (2, 0, 1, 1, 0))), gl.constexpr(((), (), (0, 1), (0, 2, 1, 0, 1)))


@gluon.jit
def small_products(a, b, s, PARTS: gl.constexpr):
    """Issue all products of parts of `a @ b^T` but the largest, summed over chunks; with one part, the whole product.
    The contents of `s` are ignored.
    """
    if PARTS == 1:
        return gemm_nt(a, b, s)
    else:
        CHUNKS: gl.constexpr = len(a) // PARTS
        for n in gl.static_range(len(LEFT[PARTS])):
            for c in gl.static_range(CHUNKS):
                x, y = a[LEFT[PARTS][n] * CHUNKS + c], b[RIGHT[PARTS][n] * CHUNKS + c]
                s = warpgroup_mma(x, y.permute((1, 0)), s, use_acc=n + c > 0, is_async=True)
        return s


@gluon.jit
def large_product(a, b, s, PARTS: gl.constexpr):
    """Add the largest product of parts to the small ones, and wait for it."""
    if PARTS == 1:
        return s
    else:
        return warpgroup_mma_wait(0, deps=(issue_large_product(a, b, s, PARTS),))


@gluon.jit
def issue_large_product(a, b, s, PARTS: gl.constexpr):
    s = finite(s)
    for c in gl.static_range(len(a) // PARTS):
        s = warpgroup_mma(a[c], b[c].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def zero_sums(HEAD_DIM: gl.constexpr):
    """Empty sums `[MMA_M, chunk]`: accumulators, and of products of parts their compensations after them."""
    sums = zero_accumulators(HEAD_DIM)
    return sums if HEAD_DIM.parts == 1 else sums + zero_accumulators(HEAD_DIM)


@gluon.jit
def add_product(sums, p, b, dtype: gl.constexpr, HEAD_DIM: gl.constexpr, alpha=None):
    """Add `p @ b`, and wait for it; `p` is in registers. `alpha [M]`, powers of two, first scales sums of products of
    parts.
    """
    if HEAD_DIM.parts == 1:
        return gemm_wait(gemm_rs(sums, p.to(dtype), b))
    else:
        CHUNKS: gl.constexpr = len(HEAD_DIM.chunks)
        if alpha is not None:
            sums = scaled(sums, alpha)
        parts = split(p, HEAD_DIM.parts)
        products = ()  # they start where the compensations are, which needs no other registers
        for c in gl.static_range(CHUNKS):
            products = products + (issue_small_products(parts, b, sums[CHUNKS + c], c, CHUNKS),)
        small, products = gemm_wait(products), ()
        for c in gl.static_range(CHUNKS):
            products = products + (issue_product(parts[0], b[c], finite(small[c])),)
        products = gemm_wait(products)
        new, compensations = (), ()
        for c in gl.static_range(CHUNKS):
            total = sums[c] + products[c]
            new = new + (total,)
            compensations = compensations + (gl.maximum(products[c] - (total - sums[c]), -MAX_FLOAT),)
        return new + compensations


@gluon.jit
def scaled(sums, alpha):
    result = ()
    for c in gl.static_range(len(sums)):
        result = result + (scale_rows(sums[c], alpha),)
    return result


@gluon.jit
def issue_small_products(parts, b, acc, c: gl.constexpr, CHUNKS: gl.constexpr):
    """Issue `acc` plus all products of parts but the largest for chunk `c`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    PARTS: gl.constexpr = len(parts)
    for n in gl.static_range(len(LEFT[PARTS])):
        left = gl.convert_layout(parts[LEFT[PARTS][n]], layout, assert_trivial=True)
        acc = warpgroup_mma(left, b[RIGHT[PARTS][n] * CHUNKS + c], acc, is_async=True)
    return acc


@gluon.jit
def issue_product(p, b, acc):
    """Issue `acc + p @ b`, with `p` in registers."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(p, b, acc, is_async=True)


@gluon.jit
def finite(small):
    """The sum of small products, which is NaN where a factor is not finite; then the large product is the result."""
    return gl.where(small == small, small, 0.0)


@gluon.jit
def split(x, PARTS: gl.constexpr):
    """The parts of numbers. `hi` is truncated, because rounding could make an infinity of a finite number."""
    bits = x.to(gl.int32, bitcast=True)
    parts = (upper_half(bits),)
    if PARTS == 3:
        x = x - (bits & UPPER).to(gl.float32, bitcast=True)
        bits = x.to(gl.int32, bitcast=True) + HALF
        parts = parts + (upper_half(bits),)
    return parts + ((x - (bits & UPPER).to(gl.float32, bitcast=True)).to(gl.bfloat16),)


@gluon.jit
def upper_half(bits):
    return (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
