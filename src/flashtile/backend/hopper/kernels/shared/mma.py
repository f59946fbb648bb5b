"""Products and sums of a head dimension that is split into chunks, because a tensor has a power of two columns.

A product of rows with rows, as of q with k, adds up over the chunks; rows weighted by a matrix, as v by probabilities,
have a sum for each. Both are asked for here and waited for later: nothing may touch them in between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ... import tables

MMA_M = gl.constexpr(tables.MMA_M)


@gluon.jit
def gemm_nt(a, b, s, ACCUMULATE: gl.constexpr = False):
    """`a @ b^T`, a sum over chunks, in flight: added to `s`, or only of its shape."""
    for c in gl.static_range(len(a)):
        s = warpgroup_mma(a[c], b[c].permute((1, 0)), s, use_acc=ACCUMULATE or c > 0, is_async=True)
    return s


@gluon.jit
def gemm_rs(acc, p, b, accumulate=True):
    """`acc + p @ rows`, by chunks, in flight; unless `add`, only `p @ rows`."""
    result = ()
    for c in gl.static_range(len(acc)):
        p_c = gl.convert_layout(p, gl.DotOperandLayout(0, acc[c].type.layout, 2), assert_trivial=True)
        result = result + (warpgroup_mma(p_c, b[c], acc[c], use_acc=accumulate, is_async=True),)
    return result


@gluon.jit
def zero_accumulators(HEAD_DIM: gl.constexpr):
    accumulators = ()
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        accumulators = accumulators + (zero_accumulator(HEAD_DIM, c),)
    return accumulators


@gluon.jit
def zero_accumulator(HEAD_DIM: gl.constexpr, c: gl.constexpr):
    WIDTH: gl.constexpr = HEAD_DIM.chunks[c]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([MMA_M, WIDTH], gl.float32, layout)


@gluon.jit
def scale_rows(x, factor):
    """Rows times a factor `[ROWS]`."""
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def gemm_wait_pair(acc, x, y):
    """The sums `acc` when no product is in flight any more. What else was given is computed before that."""
    acc, others = gemm_wait_with(acc, (x, y))
    return acc, others[0], others[1]


@gluon.jit
def gemm_wait(acc, PENDING: gl.constexpr = 0):
    """The sums `acc` when no more than the last LEFT products are in flight."""
    result = warpgroup_mma_wait(PENDING, deps=acc)
    return (result,) if len(acc) == 1 else result


@gluon.jit
def split_columns(x):
    """The left and the right half of the columns: which registers are meant, none is moved."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def join_columns(left, right):
    """The inverse of `halves`."""
    HEIGHT: gl.constexpr = left.shape[0]
    WIDTH: gl.constexpr = 2 * left.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    x = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [HEIGHT, WIDTH])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def gemm_wait_with(acc, others):
    """As `wait_for_values`, with any number of others."""
    results = warpgroup_mma_wait(0, deps=acc + others)
    return results[: len(acc)], results[len(acc) :]
