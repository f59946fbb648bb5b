"""p rounded to float8_e4m3fn, four numbers in a word of 32 bits: a loop that carried single bytes would pack them again
in each step.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounded(p):
    """`p [M, N]` as words `[M, N // 16, 4]` of four keys each, in the order of transposed values (`transpose`): of each
    16 keys those that a thread holds, without moving data. Above 448, p is 448.
    """
    x = gl.reshape(p, [p.shape[0], p.shape[1] // 16, 2, 4, 2])
    even, odd = gl.split(gl.permute(x, [0, 1, 3, 2, 4]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ // rounded
        .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3;
        mov.b32 $0, {x, y}; }""",
        "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mma_operand(words, acc):
    """Rounded p `[M, N]` as the left operand of a product that `acc` is like, in the registers that hold it."""
    pairs = gl.join(words, words)
    x = gl.convert_layout(gl.join(pairs, pairs), bytes_of_words(words.shape[1]), assert_trivial=True)
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1; // mma_operand", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
    layout: gl.constexpr = acc.type.layout
    x = gl.reshape(x, [x.shape[0], 16 * x.shape[1]])
    return gl.convert_layout(x, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)


@constexpr_function
def bytes_of_words(n):
    """Layout of `[64, n, 4, 2, 2]` like that of p, in which a thread's first four elements are the bytes of a word."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [8, 0, 0, 0, 0]]
    registers += [[0, 1 << k, 0, 0, 0] for k in range(n.bit_length() - 1)]
    lanes = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    warps = [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, n, 4, 2, 2])


@gluon.jit
def thread_sums(words):
    """`[M, 4]` of words `[M, n, 4]`: the sum of the numbers of each thread, in float16, which holds their exponents."""
    N: gl.constexpr = words.shape[1]
    x = gl.convert_layout(words, words_by_row(N), assert_trivial=True)
    x = gl.inline_asm_elementwise(sums_asm(N), sums_constraints(N), [x], dtype=gl.float32, is_pure=True, pack=2 * N)
    return gl.sum(x, 1)


@constexpr_function
def words_by_row(n):
    """Layout of words in which a thread's registers alternate between its two rows."""
    registers = [[8, 0, 0], *([0, 1 << k, 0] for k in range(n.bit_length() - 1))]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, n, 4])


@constexpr_function
def sums_constraints(n):
    return ",".join(["=&f"] * (2 * n) + ["r"] * (2 * n))


@constexpr_function
def sums_asm(n):
    """Registers 0 and 1 are the sums of the two rows, the others 0."""
    lines = "{ // thread_sums\n.reg .b16 a, b; .reg .b32 x, y, s; .reg .f32 f, h;\n"
    for row in range(2):
        for k in range(n):
            lines += f"mov.b32 {{a, b}}, ${2 * n + 2 * k + row}; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;\n"
            lines += "add.rn.f16x2 s, x, y;\n" if k == 0 else "add.rn.f16x2 x, x, y; add.rn.f16x2 s, s, x;\n"
        lines += f"mov.b32 {{a, b}}, s; cvt.f32.f16 f, a; cvt.f32.f16 h, b; add.f32 ${row}, f, h;\n"
    return lines + "".join(f"mov.f32 ${k}, 0f00000000;\n" for k in range(2, 2 * n)) + "}"
