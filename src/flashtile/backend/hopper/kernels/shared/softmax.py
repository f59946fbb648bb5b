"""How rows are normalised: the online softmax and the sink that enters it first.

Scores arrive in units of which `factor > 0` makes base-2 logarithms: `p = exp2(t * factor - level)` is one multiply-add
and one exponential (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A row's level need not
be its maximum: it follows only a score that exceeds it by more than SLACK, and `p` is 2 ** SLACK at most. So few levels
move after a row's first keys, and what a moved level asks for stands behind a branch of the warp (`branches`): sums are
rescaled there, and exponentials that were computed before the new level was known are computed again.

Four threads hold a row (`bits`). Levels and sums stay apart by thread, `[M, 4]`, until the row is finished: where no
level moves, the threads of a row exchange nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import softmax_ptx
from .column_masks import all_visible, expand_per_thread, from_thread_view, thread_view

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INFINITY = gl.constexpr(float("inf"))
FLOAT_MAX = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def initial_state(t, sinks, head, with_sink):
    """Level and sum `[M, 4]` before the first key of scores like `t [M, N]`. A sink is a key without a value. The level
    of what has seen nothing is the lowest one.
    """
    M: gl.constexpr = t.shape[0]
    layout: gl.constexpr = all_visible(t).type.layout
    row_max = gl.full([M, 4], -FLOAT_MAX, gl.float32, layout)
    l = gl.zeros([M, 4], gl.float32, layout)  # noqa: E741
    if sinks is not None:
        sink = gl.where(with_sink, gl.load(sinks + head).to(gl.float32) * LOG2E, -INFINITY)
        row_max = gl.full([M, 4], gl.minimum(gl.maximum(sink, -FLOAT_MAX), FLOAT_MAX), gl.float32, layout)
        l = gl.full([M, 4], gl.where(sink == -INFINITY, 0.0, 0.25), gl.float32, layout)  # noqa: E741
    return row_max, l


@gluon.jit
def update(row_max, t, scale_log2, SPECULATIVE: gl.constexpr):
    """After scores `t [M, N]`: the level `[M, 4]`, what carries old sums over to it, whether any of the warp's levels
    has moved, and `p [M, N]`. GUESSED of a thread's exponentials are computed while the maximum is looked for.

    A GPU's maximum drops NaN, sums do not. Levels are finite, so that `p` of -inf is 0, that of +inf +inf and that of
    nothing but NaN is NaN: sums then tell what a row has seen.
    """
    view = thread_view(t)
    thread_max = gl.max(gl.max(view, 3), 1)
    old_max = gl.convert_layout(row_max, thread_max.type.layout, assert_trivial=True)
    p = softmax_ptx.speculative_exps(view, expand_per_thread(old_max), scale_log2, SPECULATIVE)
    row_max, alpha, changed = softmax_ptx.update_row_max(old_max, thread_max, scale_log2)
    p = softmax_ptx.complete_exps(
        p, view, expand_per_thread(row_max), expand_per_thread(changed), scale_log2, SPECULATIVE
    )
    return row_max, alpha, changed, from_thread_view(p, t)


@gluon.jit
def rescale(acc, alpha, changed):
    """Chunks of sums `[M, D]` times a factor `[M, 4]`, if it is not 1."""
    chunks = ()
    for c in gl.static_range(len(acc)):
        chunks = chunks + (rescale_chunk(acc[c], alpha, changed),)
    return chunks


@gluon.jit
def rescale_chunk(x, alpha, changed):
    view = thread_view(x)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, view.type.layout))
    alpha = expand_per_thread(gl.convert_layout(alpha, layout, assert_trivial=True))
    changed = expand_per_thread(gl.convert_layout(changed, layout, assert_trivial=True))
    return from_thread_view(softmax_ptx.rescale_if_changed(view, alpha, changed), x)


@gluon.jit
def thread_row_sum(p):
    """`[M, N] -> [M, 4]`: the sum of what each thread of a row holds."""
    return gl.sum(gl.sum(thread_view(p), 3), 1)


@gluon.jit
def finalize(row_max, l, layout: gl.constexpr):  # noqa: E741
    """The factor `[M]` that makes the accumulator the output, and `lse [M]`; rows that saw nothing give 0 and -inf."""
    row_max = gl.convert_layout(gl.max(row_max, 1), layout)
    l = gl.convert_layout(gl.sum(l, 1), layout)  # noqa: E741
    row_max = gl.where(row_max == FLOAT_MAX, INFINITY, row_max)  # that of a sink of +inf
    lse = gl.where(l == 0, -INFINITY, (row_max + log2(l)) * LN2)
    inv_l = gl.where(l == INFINITY, float("nan"), 1.0 / gl.where(l == 0, 1.0, l))  # a score of +inf has no share
    return inv_l, lse


@gluon.jit
def log2(x):
    """`log2(x)` by one instruction, within 2 ** -22: no more than a level near 1 is rounded by. The library's function
    would have to be linked, which takes 50 ms.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
