"""How numbers lie in memory: float32, float64, bfloat16, float16 and bools, read and written as the kernel's reals."""

from .codegen import Code
from .operands import BYTE, DOUBLE, FLOAT, HALF, INT, SHORT, Pointer, Value

STORED = {"float32": FLOAT, "float64": DOUBLE, "bfloat16": SHORT, "float16": SHORT, "bool": BYTE}
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "bool": 1}


def widened(code: Code, x: Value, name: str) -> Value:
    """Numbers as they are stored, a scalar or a vector, as reals."""
    if name == "bool":
        return code.convert(x, code.real, signed=False)
    if name == "bfloat16":
        x = code.same_bits(code.convert(x, INT, signed=False) << 16, FLOAT)
    elif name == "float16":
        x = half_to_float(code, x)
    return code.convert(x, code.real)


def narrowed(code: Code, x: Value, name: str) -> Value:
    """Reals, rounded to nearest even, as they are stored."""
    if name == "bfloat16":
        bits = code.same_bits(x, INT)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return code.convert(code.select(x.equals(x), rounded, 0x7FC0), SHORT)
    if name == "float16":
        return float_to_half(code, x)
    return x


def half_to_float(code: Code, x: Value) -> Value:
    if code.target.half:
        return code.convert(code.same_bits(x, HALF), FLOAT)
    # The exponent moves to its place and is 112 too small: a product mends that, for subnormal numbers too.
    wide = code.convert(x, INT, signed=False)
    magnitude = (wide & 0x7FFF) << 13
    scaled = code.same_bits(code.same_bits(magnitude, FLOAT) * 2.0**112, INT)
    special = magnitude | 0x7F800000  # infinities and NaN
    found = code.select((wide & 0x7C00).equals(0x7C00), special, scaled)
    return code.same_bits(found | ((wide & 0x8000) << 16), FLOAT)


def float_to_half(code: Code, x: Value) -> Value:
    if code.target.half:
        return code.same_bits(code.convert(x, HALF), SHORT)
    bits = code.same_bits(x, INT)
    magnitude = bits & 0x7FFFFFFF
    number = code.same_bits(magnitude, FLOAT)
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # One half has a last bit as large as the smallest half-precision number: adding it rounds there.
    subnormal = code.same_bits(number + 0.5, INT) - 0x3F000000
    found = code.select(number < 2.0**-14, subnormal, normal)
    found = code.select(number >= 65520.0, 0x7C00, found)
    found = code.select(number.equals(number), found, 0x7E00)
    return code.convert(found | ((bits >> 16) & 0x8000), SHORT)


def load(code: Code, p: Pointer, i: Value | int, name: str) -> Value:
    return widened(code, p.of(STORED[name])[i], name)


def load_vector(code: Code, p: Pointer, i: Value | int, name: str) -> Value:
    return widened(code, p.of(STORED[name]).vector(i), name)


def store(code: Code, x: Value, p: Pointer, i: Value | int, name: str) -> None:
    p.of(STORED[name])[i] = narrowed(code, x, name)


def store_vector(code: Code, x: Value, p: Pointer, i: Value | int, name: str) -> None:
    p.of(STORED[name]).store(narrowed(code, x, name), i)


def transposed(code: Code, rows: list[Value]) -> list[Value]:
    """A square of vectors turned over. In each step, blocks of `half` lanes off the diagonal change places."""
    n = len(rows)
    half = n // 2
    while half:
        turned = list(rows)
        low = [lane if not lane & half else n + lane - half for lane in range(n)]
        high = [lane + half if not lane & half else n + lane for lane in range(n)]
        for r in range(n):
            if not r & half:
                turned[r] = code.shuffle(rows[r], rows[r + half], low)
                turned[r + half] = code.shuffle(rows[r], rows[r + half], high)
        rows = turned
        half //= 2
    return rows


def lanes_summed(code: Code, vectors: list[Value]) -> Value:
    """As many vectors as each has lanes, to one vector of their sums: neighbours are folded, again and again."""
    n, half = code.lanes, 1
    while len(vectors) > 1:
        low = [lane if not lane & half else n + lane - half for lane in range(n)]
        high = [lane + half if not lane & half else n + lane for lane in range(n)]
        folded = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [code.shuffle(a, b, low) + code.shuffle(a, b, high) for a, b in folded]
        half *= 2
    return vectors[0]
