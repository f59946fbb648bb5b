"""Exponentials on two units.

The special function unit takes 16 a cycle. Where warps want theirs at the same time, one of eight is computed by
multiply-adds instead: `2**x = 2**n * 2**f` with `n` the nearest whole number, and a polynomial of `f` (Cody and Waite,
"Software Manual for the Elementary Functions", 1980, chapter 6).
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 2**f - 1 over f, from -1/2 to 1/2: 2**f is within 1e-7 of itself, as the unit's, and 2**0 is 1.
COEFFICIENTS = (0.6931469775986017, 0.24022242084451165, 0.05550733743662901, 0.009671512700157186, 0.00132647272558915)
SHIFT = 3 * 2.0**22  # added to a number, it leaves the nearest whole number in the lowest bits
LOWEST = -127.0  # of which the power is 0
COMPUTED = 5  # of eight


def number(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def powers_asm() -> str:
    """Eight results, then eight exponents. NaN remains NaN: it is multiplied, not only added to bits."""
    horner = "".join(f"fma.rn.f32 power, power, f, {number(c)};\n" for c in COEFFICIENTS[-2::-1])
    computed = f"""max.NaN.f32 x, ${8 + COMPUTED}, {number(LOWEST)};
        add.rn.f32 shifted, x, {number(SHIFT)}; sub.rn.f32 f, shifted, {number(SHIFT)}; sub.rn.f32 f, x, f;
        mov.f32 power, {number(COEFFICIENTS[-1])};
        {horner}
        mov.b32 bits, shifted; shl.b32 bits, bits, 23; add.s32 bits, bits, {number(1.0).replace("0f", "0x")};
        mov.b32 whole, bits; mul.rn.f32 f, f, whole; fma.rn.f32 ${COMPUTED}, f, power, whole;
    """
    lines = "".join(computed if i == COMPUTED else f"ex2.approx.ftz.f32 ${i}, ${8 + i};\n" for i in range(8))
    return f"{{ // powers\n.reg .f32 x, shifted, f, power, whole; .reg .b32 bits;\n{lines}}}"


POWERS = gl.constexpr(powers_asm())
REGISTERS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))


@gluon.jit
def powers(x):
    """`2**x`, for x of at most 127. That of +inf may be NaN."""
    return gl.inline_asm_elementwise(POWERS, REGISTERS, [x], dtype=gl.float32, is_pure=True, pack=8)
