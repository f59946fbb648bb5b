"""Asynchronous matrix products (wgmma) over head dimensions that are split into chunks.

A tensor has a power of two columns, so a head dimension like 96 is held in chunks 64 + 32. Products that reduce over
the head dimension sum over its chunks; products that produce it have one accumulator for each chunk.

`gemm_*` only issue the products. Nothing may read the result or write the operands before a `gemm_wait*`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ... import tile_config

MMA_M = gl.constexpr(tile_config.MMA_M)  # rows of one warpgroup's product


@gluon.jit
def gemm_nt(a, b, s, ACCUMULATE: gl.constexpr = False):
    """Issue `a @ b^T`, summed over chunks. Without ACCUMULATE, the contents of `s` are ignored."""
    for c in gl.static_range(len(a)):
        s = warpgroup_mma(a[c], b[c].permute((1, 0)), s, use_acc=ACCUMULATE or c > 0, is_async=True)
    return s


@gluon.jit
def left_operands(chunks, layout: gl.constexpr):
    """Load chunks of 16-bit numbers to registers, as left operands of products `layout`."""
    operands = ()
    for c in gl.static_range(len(chunks)):
        operands = operands + (chunks[c].load(gl.DotOperandLayout(0, layout, 2)),)
    return operands


@gluon.jit
def gemm_rs(acc, p, b, accumulate=True):
    """Issue `acc + p @ b` for each chunk, with `p` in registers; without `accumulate`, `p @ b`."""
    result = ()
    for c in gl.static_range(len(acc)):
        p_c = gl.convert_layout(p, gl.DotOperandLayout(0, acc[c].type.layout, 2), assert_trivial=True)
        result = result + (warpgroup_mma(p_c, b[c], acc[c], use_acc=accumulate, is_async=True),)
    return result


@gluon.jit
def zero_accumulators(HEAD_DIM: gl.constexpr):
    """Zero accumulators `[MMA_M, chunk]`, one for each chunk."""
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
    """Scale each row of `x` by its `factor [MMA_M]`."""
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def gemm_wait_pair(acc, x, y):
    """Wait for all products; returns `acc`, x and y. The compiler computes x and y before the wait."""
    acc, others = gemm_wait_with(acc, (x, y))
    return acc, others[0], others[1]


@gluon.jit
def gemm_wait(acc, PENDING: gl.constexpr = 0):
    """Wait until at most PENDING products are in flight; returns `acc`."""
    result = warpgroup_mma_wait(PENDING, deps=acc)
    return (result,) if len(acc) == 1 else result


@gluon.jit
def split_columns(x):
    """Left and right half of the columns, without moving data between registers."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def join_columns(left, right):
    """The inverse of `split_columns`."""
    HEIGHT: gl.constexpr = left.shape[0]
    WIDTH: gl.constexpr = 2 * left.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    x = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [HEIGHT, WIDTH])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def gemm_wait_with(acc, others):
    """Like `gemm_wait_pair`, with a tuple of any length."""
    results = warpgroup_mma_wait(0, deps=acc + others)
    return results[: len(acc)], results[len(acc) :]
