"""Online softmax with a stale running maximum, and attention sinks.

Scores t are in units that `scale_log2 > 0` converts to base-2 logarithms, so that `p = exp2(t * scale_log2 - row_max)`
is one multiply-add and one exponential (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

`row_max` is stale: it may lag the true maximum by RESCALE_THRESHOLD, which bounds p by 2 ** RESCALE_THRESHOLD. It
rarely changes after a row's first keys. Rescaling, and repeating the exponentials that were computed speculatively with
the old row_max, stand behind a branch that is uniform in a warp (`softmax_ptx`).

Four threads hold a row (`column_masks`). row_max and l are kept per thread, `[M, 4]`, until the row is finished: the
threads of a row exchange nothing while row_max does not change.

NATURAL scores, which may have a large term in common (a bias, a score_mod), keep their unit: row_max is one of them,
and `p = exp2((t - row_max) * scale_log2)`, whose difference is taken before any factor rounds it.
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
def initial_state(t, sinks, head, with_sink, NATURAL: gl.constexpr):
    """row_max and l `[M, 4]` before the first key, for scores shaped like `t [M, N]`.

    A sink is a key without a value. A row without keys keeps the lowest float as its row_max.
    """
    M: gl.constexpr = t.shape[0]
    layout: gl.constexpr = all_visible(t).type.layout
    row_max = gl.full([M, 4], -FLOAT_MAX, gl.float32, layout)
    l = gl.zeros([M, 4], gl.float32, layout)  # noqa: E741
    if sinks is not None:
        sink = gl.load(sinks + head).to(gl.float32)
        if not NATURAL:
            sink = sink * LOG2E
        sink = gl.where(with_sink, sink, -INFINITY)
        row_max = gl.full([M, 4], gl.minimum(gl.maximum(sink, -FLOAT_MAX), FLOAT_MAX), gl.float32, layout)
        l = gl.full([M, 4], gl.where(sink == -INFINITY, 0.0, 0.25), gl.float32, layout)  # noqa: E741
    return row_max, l


@gluon.jit
def update(row_max, t, scale_log2, SPECULATIVE: gl.constexpr, NATURAL: gl.constexpr):
    """Online-softmax update for scores `t [M, N]`.

    Returns row_max `[M, 4]`, the factor alpha `[M, 4]` for l and acc, whether any row_max of the warp has changed, and
    `p [M, N]`. SPECULATIVE of a thread's exponentials use the old row_max and overlap the search for the maximum.

    The GPU's maximum drops NaN, sums keep it. row_max is finite, so p of -inf is 0, p of +inf is +inf and p of NaN is
    NaN: l shows which of them a row has met.
    """
    view = thread_view(t)
    thread_max = gl.max(gl.max(view, 3), 1)
    old_max = gl.convert_layout(row_max, thread_max.type.layout, assert_trivial=True)
    p = softmax_ptx.speculative_exps(view, expand_per_thread(old_max), scale_log2, SPECULATIVE, NATURAL)
    row_max, alpha, changed = softmax_ptx.update_row_max(old_max, thread_max, scale_log2, NATURAL)
    p = softmax_ptx.complete_exps(
        p, view, expand_per_thread(row_max), expand_per_thread(changed), scale_log2, SPECULATIVE, NATURAL
    )
    return row_max, alpha, changed, from_thread_view(p, t)


@gluon.jit
def rescale(acc, alpha, changed):
    """Scale accumulators `[M, D]`, one for each chunk, by `alpha [M, 4]` if row_max has changed."""
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
    """`[M, N] -> [M, 4]`: the sum over each thread's elements of a row."""
    return gl.sum(gl.sum(thread_view(p), 3), 1)


@gluon.jit
def finalize(row_max, l, layout: gl.constexpr, WITH_SINKS: gl.constexpr, NATURAL: gl.constexpr):  # noqa: E741
    """`1 / l [M]`, which normalizes acc, `lse [M]`, and its residual of NATURAL scores: what rounding has taken from
    `row_max + log(l)`; 0 where that is infinite. Rows without keys get 0 in acc and an lse of -inf.
    """
    row_max = gl.convert_layout(gl.max(row_max, 1), layout)
    l = gl.convert_layout(gl.sum(l, 1), layout)  # noqa: E741
    if WITH_SINKS or not NATURAL:
        row_max = gl.where(row_max == FLOAT_MAX, INFINITY, row_max)  # a sink of +inf
    residual = gl.zeros([l.shape[0]], gl.float32, layout)
    if NATURAL:
        log_l = log2(l) * LN2
        lse = gl.where(l == 0, -INFINITY, row_max + log_l)
        residual = gl.where(gl.abs(lse) == INFINITY, 0.0, (row_max - lse) + log_l)
    else:
        lse = gl.where(l == 0, -INFINITY, (row_max + log2(l)) * LN2)
    inv_l = gl.where(l == INFINITY, float("nan"), 1.0 / gl.where(l == 0, 1.0, l))  # inf / inf
    return inv_l, lse, residual


@gluon.jit
def log2(x):
    """`log2(x)` in one instruction, within 2 ** -22, the rounding error of a row_max near 1.

    Linking libdevice's function would add 50 ms to a compilation.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
