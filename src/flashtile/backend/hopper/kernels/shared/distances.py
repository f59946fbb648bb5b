"""Positions of columns of a block of scores, and their differences from those of rows.

A thread has two rows, eight apart, and two adjacent columns of every eight: its 64 pairs of a block with 128 columns
have 34 different distances. They are written as a base and constants of the registers, so that LLVM finds the equal
ones. Of the indices of `gl.arange`, which are made of bits, it finds none.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def distances(x, first, TRANSPOSED: gl.constexpr):
    """Query minus key for the pairs of `x [M, N]`, whose rows are queries, or keys if TRANSPOSED; `first` is that of
    the first pair.
    """
    base, constant = distance_parts(x, first, TRANSPOSED)
    return base + constant


@gluon.jit
def real_distances(x, first, TRANSPOSED: gl.constexpr):
    """Two parts of the distances in float32, whose sum is rounded twice where integers are."""
    base, constant = distance_parts(x, first, TRANSPOSED)
    return base.to(gl.float32), constant.to(gl.float32)


@gluon.jit
def distance_parts(x, first, TRANSPOSED: gl.constexpr):
    """The distances of `distances` as sums of a number of the thread and a constant."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    # Rows by warp, half (registers) and lane; columns by octet (registers), lane and pair (registers).
    layout: gl.constexpr = gl.reshape(x, [M // 16, 2, 8, N // 8, 4, 2]).type.layout
    base = index(M // 16, 0, layout) * 16 + index(8, 2, layout) - index(4, 4, layout) * 2
    constant = index(2, 1, layout) * 8 - index(N // 8, 3, layout) * 8 - index(2, 5, layout)
    if TRANSPOSED:
        base, constant = -base, -constant
    base, constant = first + base + constant * 0, constant + base * 0
    return (
        gl.convert_layout(gl.reshape(base, [M, N]), x.type.layout, assert_trivial=True),
        gl.convert_layout(gl.reshape(constant, [M, N]), x.type.layout, assert_trivial=True),
    )


@gluon.jit
def columns(first, N: gl.constexpr, layout: gl.constexpr):
    """`first + column` for the columns of a block of N with this layout, `[1, N]` of first's dtype."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, layout)
    octets: gl.constexpr = gl.reshape(gl.arange(0, N, LAYOUT), [N // 8, 4, 2]).type.layout
    base = first + index(4, 1, octets, 3) * 2
    column = base + (index(N // 8, 0, octets, 3) * 8 + index(2, 2, octets, 3))
    return gl.expand_dims(gl.convert_layout(gl.reshape(column, [N]), LAYOUT, assert_trivial=True), 0)


@gluon.jit
def index(n: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr, RANK: gl.constexpr = 6):
    """The index of a dimension of n entries in a tensor of RANK dimensions with a layout."""
    LAYOUT: gl.constexpr = slice_of(layout, dim, RANK)
    i = gl.arange(0, n, LAYOUT)
    for other in gl.static_range(RANK):
        if other != dim:
            i = gl.expand_dims(i, other)
    return i


@constexpr_function
def slice_of(layout, dim, rank):
    """The layout of one dimension of several."""
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout
