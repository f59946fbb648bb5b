"""Order of an accumulator's elements in shared memory that avoids bank conflicts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def swizzled(dq, BOX: gl.constexpr):
    """Reorder `[MMA_M, columns]` for a store to shared memory; `postprocess.unswizzled` undoes it in global memory.

    A thread of an accumulator holds pairs `e` of columns, 8 apart. In the new order it holds four adjacent elements,
    and eight threads cover the 128 bytes that shared memory serves at once, so that no two of them hit the same bank.
    These bytes are a row of 32 columns, or half a row of 64 columns, whose halves `h` lie in two panels. In boxes of 16
    columns they are two rows of a box, and each `j2` has a box of its own.
    """
    w_h_g2_g0_j2_j1_t_e = gl.reshape(dq, [4, 2, 4, 2, dq.shape[1] // 16, 2, 4, 2])
    if BOX == 16:
        return gl.reshape(gl.permute(w_h_g2_g0_j2_j1_t_e, [0, 2, 1, 3, 4, 6, 5, 7]), dq.shape)
    else:
        return gl.reshape(gl.permute(w_h_g2_g0_j2_j1_t_e, [0, 2, 4, 1, 3, 6, 5, 7]), dq.shape)


@gluon.jit
def unswizzled(x, layout: gl.constexpr):
    """The inverse of `swizzled`, for a warpgroup that reads what another one has stored."""
    w_g2_j2_h_g0_t_j1_e = gl.reshape(x, [4, 4, x.shape[1] // 16, 2, 2, 4, 2, 2])
    result = gl.reshape(gl.permute(w_g2_j2_h_g0_t_j1_e, [0, 3, 1, 4, 2, 6, 5, 7]), x.shape)
    return gl.convert_layout(result, layout, assert_trivial=True)
