"""Online softmax of probabilities that are rounded to float8_e4m3fn.

As `shared.softmax`, but p of the largest score is `2 ** OFFSET`, so that rounding is relative down to `2 ** -(6 +
OFFSET)` of it. `row_max` may lag by RESCALE_THRESHOLD: p stays below 448, the largest number. `row_base` is row_max
less OFFSET, `p = exp2(t * scale_log2 - row_base)`. Results are divided by the sum of rounded p, so that equal values
come out as they are; lse is that of p before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import softmax, softmax_ptx
from ..shared.column_masks import expand_per_thread, from_thread_view, thread_view
from ..shared.softmax_ptx import update_asm

OFFSET, RESCALE_THRESHOLD = 6.5, 2.25  # in base-2 logarithms: 2 ** 8.75 is 431
ABOVE = f"""fma.rn.f32 limit, $8, $10, -{OFFSET + RESCALE_THRESHOLD}; setp.gt.f32 p, limit, $6;
fma.rn.f32 limit, $9, $10, -{OFFSET + RESCALE_THRESHOLD}; setp.gt.or.f32 p, limit, $7, p;
"""
UPDATE = f"""fma.rn.f32 limit, top, $10, -{OFFSET + RESCALE_THRESHOLD}; setp.gt.f32 p, limit, {{old}};
fma.rn.f32 top, top, $10, -{OFFSET}; min.f32 top, top, 0f7F7FFFFF; selp.f32 {{new}}, top, {{old}}, p;
sub.f32 other, {{old}}, {{new}}; ex2.approx.ftz.f32 {{alpha}}, other;
"""
UPDATE_ROW_BASE = gl.constexpr(update_asm(ABOVE, UPDATE))
LARGEST_P_OF_A_SINK = gl.constexpr(2.0**OFFSET)
OFFSET_OF_P = gl.constexpr(OFFSET)


@gluon.jit
def initial_state(t, sinks, head, with_sink):
    """row_base and l `[M, 4]` before the first key, for scores shaped like `t [M, N]`. A sink has no value."""
    row_max, l = softmax.initial_state(t, sinks, head, with_sink, False)  # noqa: E741
    if sinks is None:
        return row_max, l
    else:
        return row_max - OFFSET_OF_P, l * LARGEST_P_OF_A_SINK


@gluon.jit
def update(row_base, t, scale_log2, SPECULATIVE: gl.constexpr):
    """Online-softmax update for scores `t [M, N]`: row_base and alpha `[M, 4]`, and `p [M, N]` before it is rounded."""
    view = thread_view(t)
    thread_max = gl.max(gl.max(view, 3), 1)
    old = gl.convert_layout(row_base, thread_max.type.layout, assert_trivial=True)
    p = softmax_ptx.speculative_exps(view, expand_per_thread(old), scale_log2, SPECULATIVE, False)
    row_base, alpha, changed = update_row_base(old, thread_max, scale_log2)
    p = softmax_ptx.complete_exps(
        p, view, expand_per_thread(row_base), expand_per_thread(changed), scale_log2, SPECULATIVE, False
    )
    return row_base, alpha, from_thread_view(p, t)


@gluon.jit
def update_row_base(row_base, thread_max, scale_log2):
    """New row_base `[M, 4]`, alpha `[M, 4]`, and whether any row_base of the warp has changed."""
    return gl.inline_asm_elementwise(
        UPDATE_ROW_BASE,
        "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f,f,f",
        [row_base, thread_max, scale_log2],
        dtype=(gl.float32, gl.float32, gl.int32),
        is_pure=False,  # keeps its place behind the speculative exponentials
        pack=2,
    )


@gluon.jit
def scaled_sum(acc, alpha, product):
    """`acc * alpha + product` for `alpha [M, 4]`: the sum of a block in float32."""
    view = thread_view(acc)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, view.type.layout))
    alpha = expand_per_thread(gl.convert_layout(alpha, layout, assert_trivial=True))
    return from_thread_view(gl.fma(view, alpha.broadcast_to(view.shape), thread_view(product)), acc)
