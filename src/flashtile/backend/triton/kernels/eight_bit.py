"""Keys and values of 8 bits: as numbers that the matrix units take, and their scales.

Every number of 8 bits is one of float16, of bfloat16 and of float32, so that products are exact. Scales of keys
multiply scores; scales of values multiply probabilities or, where all keys of a head have one, the output.

Where rows allow it, two features are read as one word of 16 bits. Then rows go to shared memory and to matrix units as
those of 16-bit numbers do: the units transpose no bytes. Even and odd features are operands of their own, the chunks of
`HeadDim.PAIRS`, and one instruction converts two numbers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .keys import keys_exist, of_keys, only_page
from .rows import Chunks, elements

# Two words of 16 bits, each with an even and an odd feature, as $0 with both even features and $1 with both odd ones.
# In lop3, 0xea is `a & b | c`; the constants are in registers, since an instruction has one immediate.
E5M2_HALF = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;")
E4M3_HALF = tl.constexpr(
    ".reg .b32 x; .reg .b16 e, o; prmt.b32 x, $2, 0, 0x3120; mov.b32 {e, o}, x;"
    "cvt.rn.f16x2.e4m3x2 $0, e; cvt.rn.f16x2.e4m3x2 $1, o;"
)
# The shifted exponent is 8 too small. NaN becomes 480, which one more bit of the exponent makes a NaN.
E4M3_SHIFTED = tl.constexpr(
    ".reg .b32 x, y, n, c; mov.b32 c, 0x5c005c00; and.b32 n, $2, 0x7f7f7f7f; add.u32 n, n, 0x01010101;"
    "shl.b32 x, $2, 8; shr.u32 y, x, 1; and.b32 x, x, 0x80008000; lop3.b32 x, y, 0x3f803f80, x, 0xea;"
    "mul.f16x2 x, x, c; shl.b32 y, n, 6; lop3.b32 $0, y, 0x20002000, x, 0xea;"
    "shr.u32 y, $2, 1; and.b32 x, $2, 0x80008000; lop3.b32 x, y, 0x3f803f80, x, 0xea;"
    "mul.f16x2 x, x, c; shr.u32 y, n, 2; lop3.b32 $1, y, 0x20002000, x, 0xea;"
)
# 0x6400 is 1024, whose last bit is worth 1: 1024 + (number + 128), less 1152.
INT8_HALF = tl.constexpr(
    ".reg .b32 x, c, d; mov.b32 c, 0x64646464; mov.b32 d, 0x64806480; xor.b32 x, $2, 0x80808080;"
    "prmt.b32 $0, x, c, 0x4240; prmt.b32 $1, x, c, 0x4341; sub.f16x2 $0, $0, d; sub.f16x2 $1, $1, d;"
)
# 0x4300 is 128, whose last bit is worth 1: 128 + the lower seven bits, less 128, or 256 where the eighth is set.
INT8_BF16 = tl.constexpr(
    ".reg .b32 x, y, z, c, d, one; mov.b32 c, 0x43004300; mov.b32 d, 0xc300c300; mov.b32 one, 0x3f803f80;"
    "lop3.b32 x, $2, 0x007f007f, c, 0xea; lop3.b32 y, $2, 0x00800080, d, 0xea; fma.rn.bf16x2 $0, x, one, y;"
    "shr.u32 z, $2, 8;"
    "lop3.b32 x, z, 0x007f007f, c, 0xea; lop3.b32 y, z, 0x00800080, d, 0xea; fma.rn.bf16x2 $1, x, one, y;"
)
# By float32: the instruction that converts one number at a time is several times as slow.
HALF_TO_BF16 = tl.constexpr(
    ".reg .b16 l, h; .reg .f32 a, b;"
    "mov.b32 {l, h}, $0; cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 $0, b, a;"
    "mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 $1, b, a;"
)


class HeadScale(NamedTuple):
    """Scales of one sequence and key head. Strides that a scale does not depend on are the number 0."""

    data: tl.tensor  # pointer to the one of position 0, or of page 0 and slot 0
    stride_p: tl.tensor  # from page to page
    stride_n: tl.tensor  # from slot to slot


class Descales(NamedTuple):
    """Scales of one sequence and key head: `HeadScale`s by key, numbers by head, 1 if there are none."""

    k: tl.tensor
    v: tl.tensor
    q: tl.tensor  # of the rows of a tile, `[M]`, or 1


@triton.jit
def descales_of_head(k_descale, v_descale, of_rows, lengths, b, head, seqlen, CONFIG: tl.constexpr):
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
    return Descales(
        head_scale(k_descale, lengths, b, head, seqlen, K_SCALES, CONFIG),
        head_scale(v_descale, lengths, b, head, seqlen, V_SCALES, CONFIG),
        of_rows,
    )


@triton.jit
def row_scales(x, lengths, b, head, head_k, token, exists):
    """The scales of a tile's queries `[M]`; 1 if there are none."""
    if x.data is None:
        return 1.0
    else:
        pointers = x.data + b * elements(x.stride_b, 1) + head_k * elements(x.stride_g, 1)
        pointers += head * elements(x.stride_h, 1) + token * elements(x.stride_m, 1)
        in_sequence = head < tl.where(b < lengths.batch, 2**30, 0)  # not of tokens that belong to none
        return tl.load(pointers, mask=exists & in_sequence, other=0.0)


@triton.jit
def head_scale(x, lengths, b, head, seqlen, KIND: tl.constexpr, CONFIG: tl.constexpr):
    if KIND == "":
        return 1.0
    else:
        exists = b < lengths.batch
        data = x.data + b * elements(x.stride_b, 1) + head * elements(x.stride_h, 1)
        stride_p, stride_n = elements(x.stride_p, 1), elements(x.stride_n, 1)
        if KIND == "head":
            return tl.load(data, mask=exists, other=0.0)
        elif CONFIG.PAGE_SIZE > 0:
            return HeadScale(data, stride_p, stride_n)
        else:
            table = lengths.page_table.data + b * elements(lengths.page_table.stride_b, 1)
            page, _ = only_page(table, lengths, seqlen, b, CONFIG)
            return HeadScale(data + page * stride_p, stride_p, stride_n)


@triton.jit
def scales_of_tile(x, kv, tile, start, KIND: tl.constexpr, CONFIG: tl.constexpr):
    """The scales of a block of keys, `[N]`, or one number."""
    if KIND != "key":
        return x
    else:
        n = tl.arange(0, CONFIG.BLOCK_N)
        exists = tile.exists
        if CONFIG.PAGE_SIZE == 0:
            exists = keys_exist(start + n, kv.seqlen.begin, kv.seqlen.end)
            pointers = x.data + (start + n) * x.stride_n
        elif CONFIG.PAGE_SIZE % CONFIG.BLOCK_N == 0:
            page = tile.page.to(tl.uint32, bitcast=True).to(tl.int64)
            pointers = (x.data + page * x.stride_p) + (tile.slot + n) * x.stride_n
        else:
            page = tile.page.to(tl.uint32, bitcast=True).to(tl.int64)
            pointers = (x.data + tile.slot * x.stride_n) + of_keys(page * x.stride_p, CONFIG)
        return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def scaled_by_key(x, scale, KIND: tl.constexpr, AXIS: tl.constexpr):
    """`x`, whose keys are along the other axis than AXIS, times its scales or one number."""
    if KIND == "":
        return x
    elif KIND == "head":
        return x * scale
    else:
        return x * tl.expand_dims(scale, AXIS)


@triton.jit
def scaled_scores(product, descales, k_scale, AXIS: tl.constexpr, CONFIG: tl.constexpr):
    """Products of queries and keys times the scales of both; keys are along the other axis than AXIS."""
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    if not CONFIG.Q_SCALES:
        return scaled_by_key(product, k_scale, K_SCALES, AXIS)
    elif K_SCALES == "key":
        return scaled_by_key(product, k_scale, "key", AXIS) * tl.expand_dims(descales.q, 1 - AXIS)
    else:  # one factor for each row
        return product * tl.expand_dims(scaled_by_key(descales.q, k_scale, K_SCALES, AXIS), 1 - AXIS)


@triton.jit
def scaled_rows(weight, sums, scale, KIND: tl.constexpr):
    """The factors `[M]` of outputs, with the scale of a head's values. Rows without keys stay 0, whatever it is."""
    if KIND == "head":
        return tl.where(sums == 0, weight, weight * scale)
    else:
        return weight


@triton.jit
def numbers(x, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of 8-bit integers as the numbers that they stand for. Conversions go by float32 where Triton's interpreter
    knows no others.
    """
    if FORMAT == "int8":
        return x.to(dtype)
    elif FORMAT == "int8 by float32":
        return x.to(tl.float32).to(dtype)
    elif FORMAT == "e5m2":  # the upper half of a float16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    elif FORMAT == "e4m3":
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # Shifted into the place of a float16's, the exponent is 8 too small; subnormal numbers are right, too.
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        half = ((magnitude << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), half).to(tl.float32).to(dtype)


@triton.constexpr_function
def pairs_asm(FORMAT, HALF):
    """PTX that converts pairs of numbers to float16 or bfloat16."""
    if FORMAT == "int8":
        return INT8_HALF.value if HALF else INT8_BF16.value
    asm = {"e5m2": E5M2_HALF, "e4m3": E4M3_HALF}.get(FORMAT, E4M3_SHIFTED).value
    return asm if HALF else asm + HALF_TO_BF16.value


@triton.jit
def pairs_of_numbers(x, dtype: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """The lower and the upper bytes of 16-bit words, each as numbers."""
    if not PTX:
        lower, upper = (x & 0xFF).to(tl.uint8), (x >> 8).to(tl.uint8)
        if FORMAT == "int8" or FORMAT == "int8 by float32":
            lower, upper = lower.to(tl.int8, bitcast=True), upper.to(tl.int8, bitcast=True)
        return Chunks(numbers(lower, dtype, FORMAT), numbers(upper, dtype, FORMAT))
    else:
        HALF: tl.constexpr = dtype == tl.float16
        ASM: tl.constexpr = "{ " + pairs_asm(FORMAT, HALF) + " }"
        if HALF:  # Triton takes no compile-time value inside a tuple of dtypes
            a, b = tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
            return Chunks(a, b)
        else:
            a, b = tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
            return Chunks(a, b)


@triton.jit
def number_rows(x, dtype: tl.constexpr, D: tl.constexpr, CONFIG: tl.constexpr):
    """Rows or columns of 8 bits as those of `dtype`."""
    KEY_FORMAT: tl.constexpr = CONFIG.KEY_FORMAT
    if CONFIG.KEY_FORMAT == "":
        return x
    elif D.PAIRS:
        return pairs_of_numbers(x.a, dtype, KEY_FORMAT, CONFIG.PTX)
    elif D.CHUNK_1 == 0:
        return Chunks(numbers(x.a, dtype, KEY_FORMAT), x.b)
    else:
        return Chunks(numbers(x.a, dtype, KEY_FORMAT), numbers(x.b, dtype, KEY_FORMAT))


@triton.jit
def bf16_remainder(p):
    """What rounding to bfloat16 takes from `p`."""
    return p - p.to(tl.bfloat16).to(tl.float32)


@triton.jit
def quantized(x, scale, FORMAT: tl.constexpr):
    """The 8-bit integers of `x / scale`, to the nearest, ties to even; beyond the largest number, that one."""
    ratio = tl.div_rn(x.to(tl.float32), scale)
    is_nan = ratio != ratio
    if FORMAT == "int8":
        whole = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, ratio), -127.0), 127.0)
        return ((whole + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23, whose last bit is worth 1
    else:
        MANTISSA: tl.constexpr = 2 if FORMAT == "e5m2" else 3
        NORMAL: tl.constexpr = 0.00006103515625 if FORMAT == "e5m2" else 0.015625  # the smallest normal number
        LARGEST: tl.constexpr = 57344.0 if FORMAT == "e5m2" else 448.0
        UNIT: tl.constexpr = 128.0 if FORMAT == "e5m2" else 16384.0  # its last bit is worth the smallest number
        UNIT_BITS: tl.constexpr = (134 if FORMAT == "e5m2" else 141) << 23
        LESS: tl.constexpr = 112 if FORMAT == "e5m2" else 120  # what the exponent of float32 is more
        SHIFT: tl.constexpr = 23 - MANTISSA
        bits = ratio.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.where(is_nan, 0.0, tl.abs(ratio)), LARGEST)
        of_size = size.to(tl.int32, bitcast=True)
        normal = (of_size + ((1 << (SHIFT - 1)) - 1) + ((of_size >> SHIFT) & 1)) >> SHIFT
        subnormal = (size + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
        code = tl.where(size < NORMAL, subnormal, normal - (LESS << MANTISSA))
        code = tl.where(is_nan, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_of_token(x, FORMAT: tl.constexpr):
    """The scale for which the largest of a token's features `x [D]` becomes the format's largest."""
    LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 57344.0 if FORMAT == "e5m2" else 448.0
    size = tl.abs(x.to(tl.float32))
    size = tl.where(size != size, 0.0, tl.minimum(size, 3.4028234663852886e38))
    scale = tl.div_rn(tl.max(size, 0), LARGEST)
    return tl.where(scale > 0, scale, 1.0)
