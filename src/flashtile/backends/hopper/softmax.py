"""How rows are normalised: the online softmax and the sink that enters it first.

Scores arrive in units of which `factor > 0` makes base-2 logarithms: `p = exp2(t * factor - m * factor)` is one
multiply-add and one exponential (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

Four threads hold a row (`bits`). Sums stay apart by thread, `[M, 4]`, until the row is finished: only the maximum is
exchanged in each step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .bits import by_thread

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INFINITY = gl.constexpr(float("inf"))
LARGEST = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def sums_by_thread(p):
    """`[M, N] -> [M, 4]`: the sum of what each thread of a row holds."""
    return gl.sum(gl.sum(by_thread(p), 3), 1)


@gluon.jit
def sums_of_rows(sums, layout: gl.constexpr):
    """`[M, 4] -> [M]`."""
    return gl.convert_layout(gl.sum(sums, 1), layout)


@gluon.jit
def start(sinks, head, factor, with_sink, M: gl.constexpr, layout: gl.constexpr):
    """The running maximum and sum `[M]` before the first key. A sink is a key without a value."""
    m = gl.full([M], -INFINITY, gl.float32, layout)
    l = gl.zeros([M], gl.float32, layout)  # noqa: E741
    if sinks is not None:
        sink = gl.where(with_sink, gl.load(sinks + head).to(gl.float32) * (LOG2E / factor), -INFINITY)
        m = gl.full([M], sink, gl.float32, layout)
        l = gl.full([M], gl.where(sink == -INFINITY, 0.0, 1.0), gl.float32, layout)  # noqa: E741
    return m, l


@gluon.jit
def spread(l, sums):  # noqa: E741
    """A sum of each row `[M]` as sums by thread `[M, 4]`."""
    return scaled_sums(gl.full_like(sums, 0.25), l)


@gluon.jit
def scaled_sums(sums, factor):
    """Sums `[M, 4]` times a factor `[M]`."""
    same = gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return sums * gl.expand_dims(same, 1)


@gluon.jit
def maxima(m, t, factor):
    """The new running maximum `[M]`, the factor `[M]` that carries old sums over to it, and what is subtracted `[M]`.

    A GPU's maximum drops NaN, sums do not. What is subtracted is finite, so that `p` of -inf is 0, that of +inf +inf
    and that of nothing but NaN is NaN: sums then tell what a row has seen.
    """
    m_new = gl.maximum(m, gl.max(t, 1))
    shift = gl.minimum(gl.maximum(m_new * factor, -LARGEST), LARGEST)
    alpha = gl.where(m == m_new, 1.0, gl.exp2(m * factor - shift))
    return m_new, alpha, shift


@gluon.jit
def probabilities(t, shift, factor):
    """`p [M, N]`."""
    return gl.exp2(t * factor - gl.expand_dims(shift, 1))


@gluon.jit
def finish(m, l, factor):  # noqa: E741
    """The factor `[M]` that makes the accumulator the output, and `lse [M]`; rows that saw nothing give 0 and -inf."""
    l = gl.where(l == 0, 1.0, l)  # noqa: E741
    weight = gl.where(l == INFINITY, float("nan"), 1.0 / l)  # a score of +inf has no share
    return weight, (m * factor + gl.log2(l)) * LN2
