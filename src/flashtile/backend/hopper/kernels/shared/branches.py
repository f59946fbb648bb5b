"""What a warp does only if one of its rows asks for it: instructions that Gluon has no name for.

A thread holds the same columns of two rows, and its warp 16 rows. `[M, 4]` has a number for each thread of a row.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = 8.0  # by which scores may exceed a level, in base-2 logarithms: `p` of float16 ends at 2 ** 16


@constexpr_function
def registers(*kinds, n):
    """n registers of each kind; "0": those of the results."""
    return ",".join(str(i) if kind == "0" else kind for kind in kinds for i in range(n))


# Of a thread's two rows: $0 and $1 are new levels, $2 and $3 what carries sums over to them, $4 and $5 whether any of
# the warp's has moved; $6 and $7 are old levels, $8 and $9 maxima of what the thread holds, $10 the factor.
OF_ITS_ROW = """
shfl.sync.bfly.b32 other, {maximum}, 1, 31, 0xffffffff; max.f32 top, {maximum}, other;
shfl.sync.bfly.b32 other, top, 2, 31, 0xffffffff; max.f32 top, top, other;
fma.rn.f32 limit, top, $10, -{slack}; setp.gt.f32 p, limit, {old};
mul.f32 top, top, $10; min.f32 top, top, 0f7F7FFFFF; selp.f32 {new}, top, {old}, p;
sub.f32 other, {old}, {new}; ex2.approx.ftz.f32 {carry}, other;
"""
FIRST = OF_ITS_ROW.format(new="$0", carry="$2", old="$6", maximum="$8", slack=SLACK)
SECOND = OF_ITS_ROW.format(new="$1", carry="$3", old="$7", maximum="$9", slack=SLACK)
FOLLOW = gl.constexpr(f"""{{ // follow
.reg .pred p; .reg .f32 top, other, limit;
mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;
fma.rn.f32 limit, $8, $10, -{SLACK}; setp.gt.f32 p, limit, $6;
fma.rn.f32 limit, $9, $10, -{SLACK}; setp.gt.or.f32 p, limit, $7, p;
vote.sync.any.pred p, p, 0xffffffff;
selp.s32 $4, 1, 0, p; mov.s32 $5, $4;
@!p bra KEPT;
{FIRST}{SECOND}KEPT: }}""")


@gluon.jit
def follow(level, top, factor):
    """Of levels and maxima `[M, 4]`: the new levels, what carries sums over to them, and whether the warp's moved."""
    return gl.inline_asm_elementwise(
        FOLLOW,
        "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f,f,f",
        [level, top, factor],
        dtype=(gl.float32, gl.float32, gl.int32),
        is_pure=False,  # it stays behind the guesses
        pack=2,
    )


@constexpr_function
def exponential(i, score, level, factor):
    return f"neg.f32 x, ${level + i}; fma.rn.f32 x, ${score + i}, ${factor + i}, x; ex2.approx.ftz.f32 ${i}, x;\n"


@constexpr_function
def guesses_asm(n, guessed):
    """For n numbers of a thread: results, then scores, levels and factors."""
    guesses = "".join(exponential(i, n, 2 * n, 3 * n) for i in range(guessed))
    others = "".join(f"mov.f32 ${i}, 0f00000000;\n" for i in range(guessed, n))
    return f"{{ // guesses\n.reg .f32 x;\n{guesses}{others}}}"


@gluon.jit
def guesses(t, level, factor, GUESSED: gl.constexpr):
    """`exp2(t * factor - level)` for each thread's first GUESSED numbers; 0 for the others."""
    N: gl.constexpr = t.shape[1] * 4  # numbers of a thread
    return gl.inline_asm_elementwise(
        guesses_asm(N, GUESSED), registers("=&f", "f", "f", "f", n=N), [t, level, factor],
        dtype=gl.float32, is_pure=False, pack=N,
    )  # fmt: skip


@constexpr_function
def exponentials_asm(n, guessed):
    """Results, then guesses in the same registers, scores, levels, whether they have moved, factors."""
    computed = [exponential(i, 2 * n, 3 * n, 5 * n) for i in range(n)]
    again, others = "".join(computed[:guessed]), "".join(computed[guessed:])
    branch = f"setp.ne.s32 p, ${4 * n}, 0;\n@!p bra KEPT;\n{again}KEPT:\n" if guessed else ""
    return f"{{ // exponentials\n.reg .pred p; .reg .f32 x;\n{branch}{others}}}"


@gluon.jit
def exponentials(guessed, t, level, moved, factor, GUESSED: gl.constexpr):
    """`exp2(t * factor - level)`, of which GUESSED are there if no level has moved."""
    N: gl.constexpr = t.shape[1] * 4
    return gl.inline_asm_elementwise(
        exponentials_asm(N, GUESSED), registers("=&f", "0", "f", "f", "r", "f", n=N),
        [guessed, t, level, moved, factor], dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip


@constexpr_function
def product_asm(n):
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};\n" for i in range(n))
    return f"{{ // product\n.reg .pred p;\nsetp.ne.s32 p, ${3 * n}, 0;\n@!p bra KEPT;\n{products}KEPT: }}"


@gluon.jit
def product(x, factor, moved):
    """`x * factor`, or `x` where the warp's levels have not moved."""
    N: gl.constexpr = x.shape[1] * 4
    return gl.inline_asm_elementwise(
        product_asm(N), registers("=f", "0", "f", "r", n=N), [x, factor, moved],
        dtype=gl.float32, is_pure=True, pack=N,
    )  # fmt: skip
