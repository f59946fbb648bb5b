"""Online softmax of probabilities that are rounded to float8_e4m3fn, relative to the largest one of their block.

As `shared.softmax`, but `row_base`, of `p = exp2(t * scale_log2 - row_base)`, follows the largest score of each block
of keys, downward too: p of that score stays between 2 ** LEAST and 2 ** MOST, below 448, the largest number. row_base
moves by whole numbers, so alpha is a power of two, and exact. Downward it moves no further than to where the sum of p
so far is 2 ** RANGE: alpha and acc stay finite, and less than what float32 could add is lost. Results are divided by
the sum of rounded p, so that equal values come out as they are; lse is that of p before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import softmax, softmax_ptx
from ..shared.column_masks import expand_per_thread, from_thread_view, thread_view

LEAST, OFFSET, MOST, RANGE = 1.0, 7.0, 8.75, 64.0  # in base-2 logarithms; 2 ** 8.75 is 431
WHOLE = 12582912.0  # 1.5 * 2 ** 23: added and taken away, it rounds to whole numbers without the units of exponentials


def is_outside(row_base: str, largest: str, *others: str) -> str:
    """Set p if p of a row's largest score is outside of its bounds, or p has been set already (`others`)."""
    kept = "".join(f", {x}" for x in others)
    return f"""neg.f32 other, {row_base}; fma.rn.f32 other, {largest}, $10, other;
setp.gt{".or" * len(others)}.f32 p, other, {MOST}{kept}; setp.lt.or.f32 p, other, {LEAST}, p;
"""


def move(new: str, alpha: str, old: str, largest: str, l: str) -> str:  # noqa: E741
    """The new row_base of a row whose four threads have their largest scores."""
    return f"""
shfl.sync.bfly.b32 other, {largest}, 1, 31, 0xffffffff; max.f32 top, {largest}, other;
shfl.sync.bfly.b32 other, top, 2, 31, 0xffffffff; max.f32 top, top, other;
{is_outside(old, "top")}
fma.rn.f32 top, top, $10, {WHOLE}; sub.f32 top, top, {WHOLE}; sub.f32 top, top, {OFFSET};
lg2.approx.ftz.f32 other, {l}; add.f32 other, other, {old}; add.f32 other, other, {WHOLE};
sub.f32 other, other, {WHOLE}; sub.f32 other, other, {RANGE};
max.f32 top, top, other; max.f32 top, top, 0fFF7FFFFF; min.f32 top, top, 0f7F7FFFFF; selp.f32 {new}, top, {old}, p;
sub.f32 other, {old}, {new}; ex2.approx.ftz.f32 {alpha}, other;
"""


# Of a thread's two rows, $0 and $1 are the new row_base, $2 and $3 alpha, $4 and $5 whether any row_base of the warp
# has changed; $6 and $7 are the old row_base, $8 and $9 the thread's maxima, $10 scale_log2, $12 and $13 a quarter of
# the sum of p, which is the same in a row's four threads.
UPDATE_ROW_BASE = gl.constexpr(f"""{{ // update_row_base
.reg .pred p; .reg .f32 top, other;
mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;
{is_outside("$6", "$8")}{is_outside("$7", "$9", "p")}vote.sync.any.pred p, p, 0xffffffff;
selp.s32 $4, 1, 0, p; mov.s32 $5, $4;
@!p bra KEPT;
{move("$0", "$2", "$6", "$8", "$12")}{move("$1", "$3", "$7", "$9", "$13")}KEPT: }}""")
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
def update(row_base, l, t, scale_log2, SPECULATIVE: gl.constexpr):  # noqa: E741
    """Online-softmax update for scores `t [M, N]`, and l `[M, 4]` so far: row_base and alpha `[M, 4]`, and `p [M, N]`
    before it is rounded.
    """
    view = thread_view(t)
    thread_max = gl.max(gl.max(view, 3), 1)
    old = gl.convert_layout(row_base, thread_max.type.layout, assert_trivial=True)
    l = gl.convert_layout(l, thread_max.type.layout, assert_trivial=True)  # noqa: E741
    p = softmax_ptx.speculative_exps(view, expand_per_thread(old), scale_log2, SPECULATIVE, False)
    row_base, alpha, changed = update_row_base(old, thread_max, scale_log2, l)
    p = softmax_ptx.complete_exps(
        p, view, expand_per_thread(row_base), expand_per_thread(changed), scale_log2, SPECULATIVE, False
    )
    return row_base, alpha, from_thread_view(p, t)


@gluon.jit
def update_row_base(row_base, thread_max, scale_log2, l):  # noqa: E741
    """New row_base `[M, 4]`, alpha `[M, 4]`, and whether any row_base of the warp has changed."""
    return gl.inline_asm_elementwise(
        UPDATE_ROW_BASE,
        "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f,f,f,f,f",
        [row_base, thread_max, scale_log2, l],
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
