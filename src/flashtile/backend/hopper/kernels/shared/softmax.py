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

from . import branches
from .column_masks import all_seen, by_thread, of_threads, together

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INFINITY = gl.constexpr(float("inf"))
LARGEST = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def start(t, sinks, head, with_sink):
    """Level and sum `[M, 4]` before the first key of scores like `t [M, N]`. A sink is a key without a value. The level
    of what has seen nothing is the lowest one.
    """
    M: gl.constexpr = t.shape[0]
    layout: gl.constexpr = all_seen(t).type.layout
    level = gl.full([M, 4], -LARGEST, gl.float32, layout)
    l = gl.zeros([M, 4], gl.float32, layout)  # noqa: E741
    if sinks is not None:
        sink = gl.where(with_sink, gl.load(sinks + head).to(gl.float32) * LOG2E, -INFINITY)
        level = gl.full([M, 4], gl.minimum(gl.maximum(sink, -LARGEST), LARGEST), gl.float32, layout)
        l = gl.full([M, 4], gl.where(sink == -INFINITY, 0.0, 0.25), gl.float32, layout)  # noqa: E741
    return level, l


@gluon.jit
def follow(level, t, factor, GUESSED: gl.constexpr):
    """After scores `t [M, N]`: the level `[M, 4]`, what carries old sums over to it, whether any of the warp's levels
    has moved, and `p [M, N]`. GUESSED of a thread's exponentials are computed while the maximum is looked for.

    A GPU's maximum drops NaN, sums do not. Levels are finite, so that `p` of -inf is 0, that of +inf +inf and that of
    nothing but NaN is NaN: sums then tell what a row has seen.
    """
    apart = by_thread(t)
    top = gl.max(gl.max(apart, 3), 1)
    before = gl.convert_layout(level, top.type.layout, assert_trivial=True)
    p = branches.guesses(apart, of_threads(before), factor, GUESSED)
    level, alpha, moved = branches.follow(before, top, factor)
    p = branches.exponentials(p, apart, of_threads(level), of_threads(moved), factor, GUESSED)
    return level, alpha, moved, together(p, t)


@gluon.jit
def rescaled(acc, alpha, moved):
    """Chunks of sums `[M, D]` times a factor `[M, 4]`, if it is not 1."""
    found = ()
    for c in gl.static_range(len(acc)):
        found = found + (rescaled_chunk(acc[c], alpha, moved),)
    return found


@gluon.jit
def rescaled_chunk(x, alpha, moved):
    apart = by_thread(x)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, apart.type.layout))
    alpha = of_threads(gl.convert_layout(alpha, layout, assert_trivial=True))
    moved = of_threads(gl.convert_layout(moved, layout, assert_trivial=True))
    return together(branches.product(apart, alpha, moved), x)


@gluon.jit
def sums_by_thread(p):
    """`[M, N] -> [M, 4]`: the sum of what each thread of a row holds."""
    return gl.sum(gl.sum(by_thread(p), 3), 1)


@gluon.jit
def finish(level, l, layout: gl.constexpr):  # noqa: E741
    """The factor `[M]` that makes the accumulator the output, and `lse [M]`; rows that saw nothing give 0 and -inf."""
    level = gl.convert_layout(gl.max(level, 1), layout)
    l = gl.convert_layout(gl.sum(l, 1), layout)  # noqa: E741
    level = gl.where(level == LARGEST, INFINITY, level)  # that of a sink of +inf
    lse = gl.where(l == 0, -INFINITY, (level + logarithm(l)) * LN2)
    weight = gl.where(l == INFINITY, float("nan"), 1.0 / gl.where(l == 0, 1.0, l))  # a score of +inf has no share
    return weight, lse


@gluon.jit
def logarithm(x):
    """`log2(x)` by one instruction, within 2 ** -22: no more than a level near 1 is rounded by. The library's function
    would have to be linked, which takes 50 ms.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
