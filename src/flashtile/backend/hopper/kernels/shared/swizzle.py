"""Order of an accumulator's elements in shared memory that is free of bank conflicts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def swizzled(dq):
    """`[ROWS, 64 or 32]` in another order, in which they are added up: `rows.in_order` brings them back.

    A thread has pairs `e` of columns, 8 apart. Here it has four numbers side by side, and eight threads have the 128
    bytes that shared memory takes at once, so that no two write to the same bank. These bytes are a row of 32 columns,
    or half of one of 64, of which the halves `h` lie in two panels.
    """
    w_h_g2_g0_j2_j1_t_e = gl.reshape(dq, [4, 2, 4, 2, dq.shape[1] // 16, 2, 4, 2])
    return gl.reshape(gl.permute(w_h_g2_g0_j2_j1_t_e, [0, 2, 4, 1, 3, 6, 5, 7]), dq.shape)


@gluon.jit
def unswizzled(x, layout: gl.constexpr):
    """The order of before, for a warpgroup that reads what another one has stored."""
    w_g2_j2_h_g0_t_j1_e = gl.reshape(x, [4, 4, x.shape[1] // 16, 2, 2, 4, 2, 2])
    result = gl.reshape(gl.permute(w_g2_j2_h_g0_t_j1_e, [0, 3, 1, 4, 2, 6, 5, 7]), x.shape)
    return gl.convert_layout(result, layout, assert_trivial=True)
