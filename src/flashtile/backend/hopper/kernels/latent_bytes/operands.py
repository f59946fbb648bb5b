"""Latent rows of 8 bits as left operands of products, in registers.

Products are transposed: keys or values on the left, queries or probabilities on the right. So a number of the cache is
an element of a left operand, which registers may hold: it goes from memory through one conversion to the matrix units,
and never back. 64 keys and 512 features are the rows of one product, and the queries of 16 heads are its columns.

A thread reads words of four features. Which place of a product a feature has is free, as long as both operands agree:
features of scores have the order of `in_words`, and the rows of sums that of `features_of_rows`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.mma import MMA_M

CHUNK, CHUNKS, REST = gl.constexpr(128), gl.constexpr(4), gl.constexpr(64)  # features of values; the others
HALF = gl.constexpr(gl.float16)

# Of a chunk `[64 keys, 128 or 64 features]` in shared memory: a row of scores is a key, and four threads hold it.
OF_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
OF_REST = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
# A row of sums is a feature, and four threads hold its keys. The words of a warp lie in different banks.
OF_VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [64, 128],
    )
)
# Scales `[64, 1]` of those rows.
KEY_SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 1])
)
VALUE_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [64, 1]
    )
)


@gluon.constexpr_function
def product_layout(N):
    """The layout of a product with N columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def operand_layout(N):
    return gl.DotOperandLayout(0, product_layout(N), 2)


@gluon.jit
def in_words(x):
    """Reorder features `[rows, D]`, of each 16 those that a thread holds as one word, to the places that it holds."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [R, D // 16, 4, 2, 2]), [0, 1, 3, 2, 4]), [R, D])


@gluon.jit
def key_operand(smem, scale, dtype: gl.constexpr, N: gl.constexpr):
    """Keys `[64, D]` of 8 bits as the left operand of scores, in float16 or bfloat16; rows of 656 bytes have a
    `scale`.
    """
    LAYOUT: gl.constexpr = OF_KEYS if smem.shape[1] == CHUNK else OF_REST
    x = in_words(numbers(smem.load(LAYOUT), scale, dtype))
    return gl.convert_layout(x, operand_layout(N), assert_trivial=True)


@gluon.jit
def value_operand(smem, scale, dtype: gl.constexpr, N: gl.constexpr):
    """Values `[64 keys, 128]` of 8 bits as the left operand `[128, 64]` of sums."""
    x = numbers(smem.load(OF_VALUES), scale, dtype)
    x = gl.reshape(gl.permute(gl.reshape(x, [MMA_M, 4, 8, 2, 2]), [3, 1, 4, 2, 0]), [CHUNK, MMA_M])
    return gl.convert_layout(x, operand_layout(N), assert_trivial=True)


@gluon.jit
def scale_of(scales, c: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale `[64]` of a block's rows of 656 bytes in chunk c, as `numbers` takes it; of other rows nothing."""
    result = ()
    if len(scales) > 0:
        result = (gl.reshape(scales[0].slice(c, 1, dim=1).load(LAYOUT), [MMA_M]),)
    return result


@gluon.jit
def scales_of_keys(scales):
    """`scale_of` all chunks."""
    result = ()
    if len(scales) > 0:
        for c in gl.static_range(CHUNKS):
            result = result + scale_of(scales, c, KEY_SCALES)
    return result


@gluon.jit
def scale_of_chunk(scales, c):
    """One of `scales_of_keys`, by a number that is not a constant."""
    if len(scales) > 0:
        first = gl.where(c == 0, scales[0], scales[1])
        return (gl.where(c < 2, first, gl.where(c == 2, scales[2], scales[3])),)
    else:
        return ()


@gluon.jit
def numbers(x, scale, dtype: gl.constexpr):
    """Numbers of 8 bits `[64, D]` in float16 or bfloat16: exactly, or each times its row's scale, rounded."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    INTEGER: gl.constexpr = x.dtype == gl.int8
    x = of_int8(x) if INTEGER else x.to(HALF)
    if len(scale) > 0:
        of_rows = gl.convert_layout(scale[0], layout, assert_trivial=True)
        x = (x.to(gl.float32) * gl.expand_dims(of_rows, 1)).to(dtype)
    elif dtype != HALF:
        x = x.to(gl.float32).to(dtype)
    return x


@gluon.jit
def of_int8(x):
    """Integers as float16 numbers: the instruction that converts one takes several times as long. 0x6400 is 1024, whose
    last bit is worth 1: 1024 + (number + 128), less 1152.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 x, c, d; xor.b32 x, $2, 0x80808080; mov.b32 c, 0x64646464; mov.b32 d, 0x64806480;
        prmt.b32 $0, x, c, 0x4140; prmt.b32 $1, x, c, 0x4342; sub.f16x2 $0, $0, d; sub.f16x2 $1, $1, d; }""",
        "=r,=r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def features_of_rows(x):
    """Sums `[128, N]` in the order of features."""
    N: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [2, 4, 2, 8, N]), [1, 3, 0, 2, 4]), [CHUNK, N])
