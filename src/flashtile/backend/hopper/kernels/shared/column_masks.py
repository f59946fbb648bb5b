"""Column masks as bit sets, so that ptxas emits R2P.

A thread holds 2 adjacent columns of every 8; three more threads hold the other columns of its row. ptxas turns bits
into predicates several at a time (`R2P`). Comparing each pair with its bounds would cost several times as much, in the
units that also compute maxima.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def thread_view(x):
    """`[M, N] -> [M, N // 8, 4, 2]`: the third dimension counts the four threads that hold a row."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def expand_per_thread(x):
    """`[M, 4] -> [M, 1, 4, 1]`, broadcastable to `thread_view`."""
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit
def from_thread_view(view, x):
    """The inverse of `thread_view`, in the layout of x, without moving data."""
    return gl.convert_layout(gl.reshape(view, x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def all_visible(x):
    """The mask under which every pair of `x [M, N]` is visible."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, thread_view(x).type.layout))
    return gl.full([x.shape[0], 4], -1, gl.int32, layout)


@gluon.jit
def bits_below(bound, x):
    """`[M, 4]`: for each thread of a row of `x [M, N]`, a bit for each of its columns below `bound [M]`.

    Visible columns are contiguous, and so are a thread's bits.
    """
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, thread_view(x).type.layout))
    bound = gl.expand_dims(gl.convert_layout(bound, gl.SliceLayout(1, layout), assert_trivial=True), 1)
    bound -= 2 * gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
    bound = gl.minimum(gl.maximum(bound, 0), N)
    count = bound // 8 * 2 + gl.minimum(bound % 8, 2)
    half = count // 2
    return ((gl.full_like(count, 1) << half) << (count - half)) - 1  # two shifts, as count may be 32


@gluon.jit
def bits_of(x):
    """`[M, 4]`: for each thread of a row of the conditions `x [M, N]`, a bit for each of its columns."""
    view = thread_view(x)
    return gl.sum(gl.sum(gl.where(view, 1 << column_places(view), 0), 3), 1)


@gluon.jit
def column_places(view):
    """The bit of each column of a `thread_view`."""
    layout: gl.constexpr = view.type.layout
    octet = gl.arange(0, view.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    octet = gl.expand_dims(gl.expand_dims(gl.expand_dims(octet, 0), 2), 3)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    return octet * 2 + pair


@gluon.jit
def where_bits(visible, x, other):
    """`x [M, N]` where the bit of its column is set, else `other`.

    Inline PTX keeps each test next to its select, where ptxas finds R2P; LLVM hoists the tests of a `gl.where`.
    """
    view = thread_view(x)
    return from_thread_view(where_bits_at(visible, column_places(view), view, other), x)


@gluon.jit
def where_bits_at(bits, place, view, other):
    """`view`, a `thread_view`, where the bit at a place of `bits [M, 4]` is set, else `other`."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $4, p; }",
        "=r,r,r,r,r",
        [view, expand_per_thread(bits), 1 << place, gl.full_like(view, other)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def both_where_bits_at(bits, place, x, y):
    """`where_bits_at` of two views, 0 where the bit is not set."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $4, 0f00000000, p;"
        " selp.f32 $1, $5, 0f00000000, p; }",
        "=&r,=&r,r,r,r,r",
        [expand_per_thread(bits), 1 << place, x, y],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
