"""Latent rows of 8 bits in words of 32 bits: loads, and the numbers of 16 bits that they stand for.

Feature `4 i + c` is byte `c` of word `i`, and belongs to chunk `c`: products need features in no order, so that no byte
moves. Words stay words until the block before is done: as bytes they would take four times the registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .eight_bit import numbers

LATENT = tl.constexpr(512)
GROUP = tl.constexpr(128)  # features that share a scale, of rows of 656 bytes
SCALES = tl.constexpr(4)
ROPE = tl.constexpr(64)


class Words(NamedTuple):
    """A block of rows as it is in memory."""

    latent: tl.tensor  # int32 [N, 128]
    rope: tl.tensor  # int32 [N, 16], or [N, 32] of rows of 656 bytes
    scales: tl.tensor  # float32 [N, 4] of those; else the number 0


class Quarters(NamedTuple):
    """Features whose numbers are 0, 1, 2 and 3 modulo 4."""

    a: tl.tensor
    b: tl.tensor
    c: tl.tensor
    d: tl.tensor


@triton.jit
def load_words(pointers, exists, CONFIG: tl.constexpr):
    """Load rows of bytes at `pointers [N, 1]`; 0 for those that do not exist."""
    mask = exists[:, None]
    words = pointers.to(tl.pointer_type(tl.int32), bitcast=True)
    latent = tl.load(words + tl.arange(0, LATENT // 4)[None, :], mask=mask, other=0)
    if CONFIG.KEY_FORMAT == "packed" or CONFIG.KEY_FORMAT == "packed by bits":
        behind = words + (LATENT // 4 + SCALES)
        rope = tl.load(behind + tl.arange(0, ROPE // 2)[None, :], mask=mask, other=0)
        factors = (words + LATENT // 4).to(tl.pointer_type(tl.float32), bitcast=True)
        return Words(latent, rope, tl.load(factors + tl.arange(0, SCALES)[None, :], mask=mask, other=0.0))
    else:
        return Words(latent, tl.load(words + LATENT // 4 + tl.arange(0, ROPE // 4)[None, :], mask=mask, other=0), 0.0)


@triton.constexpr_function
def words_asm(FORMAT, HALF, SCALED):
    """PTX that makes eight numbers of two words, $4 and $5: $0 to $3 have the bytes 0 to 3 of both. `SCALED`: each is
    multiplied by $6 or $7 in float32, and rounded.
    """
    asm = ".reg .b32 p; .reg .b16 l, h; .reg .f32 x, y; .reg .b32 n, m, k;"
    by_bits = FORMAT in ("packed by bits", "e4m3 by bits")
    for first, selector in ((0, "0x5140"), (2, "0x7362")):
        low, high = f"${first}", f"${first + 1}"
        asm += f"prmt.b32 p, $4, $5, {selector};"
        if FORMAT == "e5m2":
            asm += f"prmt.b32 {low}, p, 0, 0x1404; prmt.b32 {high}, p, 0, 0x3424;"
        elif FORMAT == "int8":
            asm += "xor.b32 p, p, 0x80808080; mov.b32 m, 0x64646464; mov.b32 k, 0x64806480;"
            asm += f"prmt.b32 {low}, p, m, 0x4140; sub.f16x2 {low}, {low}, k;"
            asm += f"prmt.b32 {high}, p, m, 0x4342; sub.f16x2 {high}, {high}, k;"
        elif by_bits:  # the shifted exponent is 8 too small; NaN becomes 480, and one more bit of it makes a NaN
            asm += "mov.b32 k, 0x5c005c00;"
            for out, spread in ((low, "0x4140"), (high, "0x4342")):
                asm += f"prmt.b32 m, p, 0, {spread}; and.b32 n, m, 0x007f007f; shl.b32 {out}, n, 7;"
                asm += f"and.b32 m, m, 0x00800080; shl.b32 m, m, 8; or.b32 {out}, {out}, m; mul.f16x2 {out}, {out}, k;"
                asm += f"add.u32 n, n, 0x00010001; and.b32 n, n, 0x00800080; shl.b32 n, n, 6; or.b32 {out}, {out}, n;"
        else:
            asm += "mov.b32 {l, h}, p;"
            asm += f"cvt.rn.f16x2.e4m3x2 {low}, l; cvt.rn.f16x2.e4m3x2 {high}, h;"
        for out in (low, high) if SCALED or not HALF else ():
            asm += f"mov.b32 {{l, h}}, {out}; cvt.f32.f16 x, l; cvt.f32.f16 y, h;"
            asm += "mul.f32 x, x, $6; mul.f32 y, y, $7;" if SCALED else ""
            asm += f"cvt.rn.{'f16x2' if HALF else 'bf16x2'}.f32 {out}, y, x;"
    return "{ " + asm + " }"


@triton.jit
def quarters(words, scale, dtype: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr):
    """Words `[N, W]` as numbers, four chunks `[N, W]`; times `scale [N, W]`, if `SCALED`."""
    if PTX:
        HALF: tl.constexpr = dtype == tl.float16
        ASM: tl.constexpr = words_asm(FORMAT, HALF, SCALED)
        GIVEN: tl.constexpr = "=r,=r,=r,=r,r,r,r,r" if SCALED else "=r,=r,=r,=r,r,r"
        x = [words, scale] if SCALED else [words]
        if HALF:  # Triton takes no compile-time value inside a tuple of dtypes
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, GIVEN, x, (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )
            return Quarters(a, b, c, d)
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                ASM, GIVEN, x, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
            return Quarters(a, b, c, d)
    else:
        return Quarters(
            byte_of(words, 0, scale, dtype, FORMAT, SCALED),
            byte_of(words, 1, scale, dtype, FORMAT, SCALED),
            byte_of(words, 2, scale, dtype, FORMAT, SCALED),
            byte_of(words, 3, scale, dtype, FORMAT, SCALED),
        )


@triton.jit
def byte_of(words, C: tl.constexpr, scale, dtype: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr):
    """One byte of each word as a number."""
    OF_BYTE: tl.constexpr = "e4m3 by bits" if SCALED else FORMAT
    byte = ((words >> (8 * C)) & 0xFF).to(tl.uint8)
    if FORMAT == "int8" or FORMAT == "int8 by float32":
        byte = byte.to(tl.int8, bitcast=True)
    if SCALED:
        return (numbers(byte, tl.float32, OF_BYTE) * scale).to(dtype)
    else:
        return numbers(byte, dtype, OF_BYTE)


@triton.jit
def halves(words, dtype: tl.constexpr):
    """Words as two bfloat16 numbers each, in a dtype: those with even and those with odd numbers of features."""
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def in_quarters(x):
    """A tile `[M, D]` in the chunks of `Quarters`."""
    even, odd = tl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    a, c = tl.split(even.reshape([x.shape[0], x.shape[1] // 4, 2]))
    b, d = tl.split(odd.reshape([x.shape[0], x.shape[1] // 4, 2]))
    return Quarters(a, b, c, d)


@triton.jit
def together(x):
    """The inverse of `in_quarters`."""
    W: tl.constexpr = x.a.shape[1]
    even = tl.join(x.a, x.c).reshape([x.a.shape[0], 2 * W])
    odd = tl.join(x.b, x.d).reshape([x.a.shape[0], 2 * W])
    return tl.join(even, odd).reshape([x.a.shape[0], 4 * W])


@triton.jit
def spread(scales, N: tl.constexpr):
    """The scale of each word, `[N, 128]`, from `[N, 4]`."""
    return tl.broadcast_to(scales[:, :, None], [N, SCALES, GROUP // 4]).reshape([N, LATENT // 4])
