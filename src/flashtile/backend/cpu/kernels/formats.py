"""Conversion between dtypes in memory (float32, float64, bfloat16, float16, bool, three of 8 bits) and the kernel's
reals.
"""

import math

from .codegen import Code
from .operands import BYTE, DOUBLE, FLOAT, HALF, INT, SHORT, Pointer, Value

STORAGE_TYPES = {"float32": FLOAT, "float64": DOUBLE, "bfloat16": SHORT, "float16": SHORT, "bool": BYTE}
EIGHT_BITS = ("e4m3", "e5m2", "int8")
STORAGE_TYPES |= dict.fromkeys(EIGHT_BITS, BYTE)
ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "bool": 1} | dict.fromkeys(EIGHT_BITS, 1)


def widen(code: Code, x: Value, dtype: str) -> Value:
    """Convert a loaded scalar or vector to reals."""
    if dtype == "bool":
        return code.convert(x, code.real_type, signed=False)
    if dtype == "bfloat16":
        x = code.bitcast(code.convert(x, INT, signed=False) << 16, FLOAT)
    elif dtype == "float16":
        x = half_to_float(code, x)
    elif dtype == "e5m2":  # the upper half of a float16
        x = half_to_float(code, code.convert(x, SHORT, signed=False) << 8)
    elif dtype == "e4m3":
        x = e4m3_to_float(code, x)
    return code.convert(x, code.real_type)


def e4m3_to_float(code: Code, x: Value) -> Value:
    """Shifted into the place of a float16's, the exponent is 8 too small; subnormal numbers are right, too."""
    half = (code.convert(x, SHORT) << 7) & ~0x4000  # the sign is extended into the next bit
    return code.select((x & 0x7F).equals(0x7F), math.nan, half_to_float(code, half) * 256.0)


def narrow(code: Code, x: Value, dtype: str) -> Value:
    """Convert reals to the dtype in memory, rounding to nearest even."""
    if dtype == "bfloat16":
        bits = code.bitcast(x, INT)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return code.convert(code.select(x.equals(x), rounded, 0x7FC0), SHORT)
    if dtype == "float16":
        return float_to_half(code, x)
    return x


def half_to_float(code: Code, x: Value) -> Value:
    if code.target.half:
        return code.convert(code.bitcast(x, HALF), FLOAT)
    # Shifted into place, the exponent is 112 too small. A multiplication corrects it, for subnormal numbers too.
    wide = code.convert(x, INT, signed=False)
    magnitude = (wide & 0x7FFF) << 13
    scaled = code.bitcast(code.bitcast(magnitude, FLOAT) * 2.0**112, INT)
    special = magnitude | 0x7F800000  # infinities and NaN
    result = code.select((wide & 0x7C00).equals(0x7C00), special, scaled)
    return code.bitcast(result | ((wide & 0x8000) << 16), FLOAT)


def float_to_half(code: Code, x: Value) -> Value:
    if code.target.half:
        return code.bitcast(code.convert(x, HALF), SHORT)
    bits = code.bitcast(x, INT)
    magnitude = bits & 0x7FFFFFFF
    number = code.bitcast(magnitude, FLOAT)
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # The last bit of 0.5 + x, in float32, is worth the smallest subnormal half: the addition rounds x to that.
    subnormal = code.bitcast(number + 0.5, INT) - 0x3F000000
    result = code.select(number < 2.0**-14, subnormal, normal)
    result = code.select(number >= 65520.0, 0x7C00, result)
    result = code.select(number.equals(number), result, 0x7E00)
    return code.convert(result | ((bits >> 16) & 0x8000), SHORT)


def load(code: Code, p: Pointer, i: Value | int, dtype: str) -> Value:
    return widen(code, p.cast(STORAGE_TYPES[dtype])[i], dtype)


def load_vector(code: Code, p: Pointer, i: Value | int, dtype: str) -> Value:
    return widen(code, p.cast(STORAGE_TYPES[dtype]).vector(i), dtype)


def store(code: Code, x: Value, p: Pointer, i: Value | int, dtype: str) -> None:
    p.cast(STORAGE_TYPES[dtype])[i] = narrow(code, x, dtype)


def store_vector(code: Code, x: Value, p: Pointer, i: Value | int, dtype: str) -> None:
    p.cast(STORAGE_TYPES[dtype]).store(narrow(code, x, dtype), i)


def transpose(code: Code, rows: list[Value]) -> list[Value]:
    """Transpose a square of vectors in registers. Each step swaps the off-diagonal blocks of `half` lanes."""
    n = len(rows)
    half = n // 2
    while half:
        swapped = list(rows)
        low = [lane if not lane & half else n + lane - half for lane in range(n)]
        high = [lane + half if not lane & half else n + lane for lane in range(n)]
        for r in range(n):
            if not r & half:
                swapped[r] = code.shuffle(rows[r], rows[r + half], low)
                swapped[r + half] = code.shuffle(rows[r], rows[r + half], high)
        rows = swapped
        half //= 2
    return rows


def sum_lanes(code: Code, vectors: list[Value]) -> Value:
    """Horizontal sums of as many vectors as each has lanes, as one vector, by a tree of shuffles and additions."""
    n, half = code.lanes, 1
    while len(vectors) > 1:
        low = [lane if not lane & half else n + lane - half for lane in range(n)]
        high = [lane + half if not lane & half else n + lane for lane in range(n)]
        folded = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [code.shuffle(a, b, low) + code.shuffle(a, b, high) for a, b in folded]
        half *= 2
    return vectors[0]
