"""Inline PTX of the online softmax: instructions that only a warp with a changed row maximum executes.

A thread holds the same columns of two rows, its warp 16 rows. `[M, 4]` has one entry for each thread of a row.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RESCALE_THRESHOLD = 8.0  # in base-2 logarithms; bounds p by 2 ** 8, while float16 ends at 2 ** 16


@constexpr_function
def constraints(*kinds, n):
    """n registers of each kind; "0" ties an input to the result's registers."""
    return ",".join(str(i) if kind == "0" else kind for kind in kinds for i in range(n))


def update_asm(is_above: str, update_row: str) -> str:
    """Of a thread's two rows, $0 and $1 are the new row_max, $2 and $3 alpha, $4 and $5 whether any row_max of the warp
    has changed; $6 and $7 are the old row_max, $8 and $9 the thread's maxima, $10 scale_log2.
    """
    update_row = f"""
shfl.sync.bfly.b32 other, {{maximum}}, 1, 31, 0xffffffff; max.f32 top, {{maximum}}, other;
shfl.sync.bfly.b32 other, top, 2, 31, 0xffffffff; max.f32 top, top, other;
{update_row}"""
    first = update_row.format(new="$0", alpha="$2", old="$6", maximum="$8")
    second = update_row.format(new="$1", alpha="$3", old="$7", maximum="$9")
    return f"""{{ // update_row_max
.reg .pred p; .reg .f32 top, other, limit;
mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;
{is_above}vote.sync.any.pred p, p, 0xffffffff;
selp.s32 $4, 1, 0, p; mov.s32 $5, $4;
@!p bra KEPT;
{first}{second}KEPT: }}"""


ABOVE = f"""fma.rn.f32 limit, $8, $10, -{RESCALE_THRESHOLD}; setp.gt.f32 p, limit, $6;
fma.rn.f32 limit, $9, $10, -{RESCALE_THRESHOLD}; setp.gt.or.f32 p, limit, $7, p;
"""
UPDATE = f"""fma.rn.f32 limit, top, $10, -{RESCALE_THRESHOLD}; setp.gt.f32 p, limit, {{old}};
mul.f32 top, top, $10; min.f32 top, top, 0f7F7FFFFF; selp.f32 {{new}}, top, {{old}}, p;
sub.f32 other, {{old}}, {{new}}; ex2.approx.ftz.f32 {{alpha}}, other;
"""
# Of natural scores, by their differences.
NATURAL_ABOVE = f"""sub.f32 limit, $8, $6; mul.f32 limit, limit, $10; setp.gt.f32 p, limit, {RESCALE_THRESHOLD};
sub.f32 limit, $9, $7; mul.f32 limit, limit, $10; setp.gt.or.f32 p, limit, {RESCALE_THRESHOLD}, p;
"""
NATURAL_UPDATE = f"""sub.f32 limit, top, {{old}}; mul.f32 limit, limit, $10; setp.gt.f32 p, limit, {RESCALE_THRESHOLD};
min.f32 top, top, 0f7F7FFFFF; selp.f32 {{new}}, top, {{old}}, p;
sub.f32 other, {{old}}, {{new}}; mul.f32 other, other, $10; ex2.approx.ftz.f32 {{alpha}}, other;
"""
UPDATE_ROW_MAX = gl.constexpr(update_asm(ABOVE, UPDATE))
UPDATE_NATURAL_ROW_MAX = gl.constexpr(update_asm(NATURAL_ABOVE, NATURAL_UPDATE))


@gluon.jit
def update_row_max(row_max, thread_max, scale_log2, NATURAL: gl.constexpr):
    """New row_max `[M, 4]`, alpha `[M, 4]`, and whether any row_max of the warp has changed."""
    return gl.inline_asm_elementwise(
        UPDATE_NATURAL_ROW_MAX if NATURAL else UPDATE_ROW_MAX,
        "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f,f,f",
        [row_max, thread_max, scale_log2],
        dtype=(gl.float32, gl.float32, gl.int32),
        is_pure=False,  # keeps its place behind the speculative exponentials
        pack=2,
    )


@constexpr_function
def exp2_asm(i, t, row_max, scale_log2, natural):
    """Register i = exp2(t * scale_log2 - row_max), or of natural scores exp2((t - row_max) * scale_log2); the arguments
    are the first registers of each operand.
    """
    if natural:
        return f"sub.f32 x, ${t + i}, ${row_max + i}; mul.f32 x, x, ${scale_log2 + i}; ex2.approx.ftz.f32 ${i}, x;\n"
    return f"neg.f32 x, ${row_max + i}; fma.rn.f32 x, ${t + i}, ${scale_log2 + i}, x; ex2.approx.ftz.f32 ${i}, x;\n"


@constexpr_function
def speculative_asm(n, speculative, natural):
    """Operands, n registers each: results, t, row_max, scale_log2."""
    computed = "".join(exp2_asm(i, n, 2 * n, 3 * n, natural) for i in range(speculative))
    zeros = "".join(f"mov.f32 ${i}, 0f00000000;\n" for i in range(speculative, n))
    return f"{{ // speculative_exps\n.reg .f32 x;\n{computed}{zeros}}}"


@gluon.jit
def speculative_exps(t, row_max, scale_log2, SPECULATIVE: gl.constexpr, NATURAL: gl.constexpr):
    """The results of `exp2_asm` for each thread's first SPECULATIVE scores; 0 for the others."""
    N: gl.constexpr = t.shape[1] * 4  # scores of a thread
    return gl.inline_asm_elementwise(
        speculative_asm(N, SPECULATIVE, NATURAL), constraints("=&f", "f", "f", "f", n=N), [t, row_max, scale_log2],
        dtype=gl.float32, is_pure=False, pack=N,
    )  # fmt: skip


@constexpr_function
def complete_asm(n, speculative, natural):
    """Operands, n registers each: results, speculative values (tied to them), t, row_max, changed, scale_log2."""
    computed = [exp2_asm(i, 2 * n, 3 * n, 5 * n, natural) for i in range(n)]
    repeated, others = "".join(computed[:speculative]), "".join(computed[speculative:])
    branch = f"setp.ne.s32 p, ${4 * n}, 0;\n@!p bra KEPT;\n{repeated}KEPT:\n" if speculative else ""
    return f"{{ // complete_exps\n.reg .pred p; .reg .f32 x;\n{branch}{others}}}"


@gluon.jit
def complete_exps(p, t, row_max, changed, scale_log2, SPECULATIVE: gl.constexpr, NATURAL: gl.constexpr):
    """The results of `exp2_asm`. The SPECULATIVE values in p are kept if no row_max of the warp has changed."""
    N: gl.constexpr = t.shape[1] * 4
    return gl.inline_asm_elementwise(
        complete_asm(N, SPECULATIVE, NATURAL), constraints("=&f", "0", "f", "f", "r", "f", n=N),
        [p, t, row_max, changed, scale_log2], dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip


@constexpr_function
def rescale_asm(n):
    """Operands, n registers each: results, x in the same registers, alpha, changed."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};\n" for i in range(n))
    return f"{{ // rescale_if_changed\n.reg .pred p;\nsetp.ne.s32 p, ${3 * n}, 0;\n@!p bra KEPT;\n{products}KEPT: }}"


@gluon.jit
def rescale_if_changed(x, alpha, changed):
    """`x * alpha`, or `x` where no row_max of the warp has changed."""
    N: gl.constexpr = x.shape[1] * 4
    return gl.inline_asm_elementwise(
        rescale_asm(N), constraints("=f", "0", "f", "r", n=N), [x, alpha, changed],
        dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip
