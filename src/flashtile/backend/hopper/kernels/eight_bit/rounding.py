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
