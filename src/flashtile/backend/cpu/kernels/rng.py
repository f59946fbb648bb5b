"""Counter-based dropout: Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), for a vector of rows at a time. Eight keys share a counter, so any block of the mask can be computed alone.
"""

from collections.abc import Sequence

from ..workspace import DROPOUT_KEYS
from .codegen import Code
from .kernel import Kernel
from .operands import INT, LONG, Pointer, Value

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7


def wide_product(code: Code, x: Value, factor: int) -> tuple[Value, Value]:
    """The high and low word of a 64-bit product of words."""
    wide = code.convert(x, LONG, signed=False) * factor
    return code.convert(wide >> 32, INT), code.convert(wide, INT)


def philox(code: Code, counter: list[Value], key: tuple[Value, Value]) -> list[Value]:
    """Four random words for each counter: vectors of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = wide_product(code, c0, MULTIPLIER_0)
        high_1, low_1 = wide_product(code, c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return [c0, c1, c2, c3]


def apply_dropout(kernel: Kernel, p: Value, weights: Sequence[Pointer], first: Value, count: Value) -> None:
    """Multiply the probabilities, and all other `weights [count, panel]` of panel `p` and the keys from `first` on, by
    `keep_scale`, or by 0 to drop them.

    All eight keys of a counter are written, so up to seven rows before the first and after the last must be writable.
    """
    code, a, w, pitch = kernel.code, kernel.a, kernel.w, kernel.panel.rows
    seed, threshold = a.pointer("seed", LONG)[0], code.convert(a.integer("threshold"), INT)
    key = (code.convert(seed, INT), code.convert(seed >> 32, INT))
    keep_scale = a.real("keep_scale")
    begin = first + a.integer("j0")  # positions in the whole sequence
    first_group, end = begin // DROPOUT_KEYS, begin + count
    with code.loop(first_group, (end + (DROPOUT_KEYS - 1)) // DROPOUT_KEYS) as group:
        j = group * DROPOUT_KEYS - begin
        with kernel.columns(p) as column:
            row, zero = p * pitch + column, code.splat(code.constant(0, INT))
            c0 = code.splat(code.convert(group, INT))
            words = philox(code, [c0, w.position.vector(row), w.sequence_head.vector(row), zero], key)
            for e in range(DROPOUT_KEYS):
                half = (words[e // 2] >> (16 * (e % 2))) & 0xFFFF
                for x in weights:
                    at = x + (j + e) * pitch + column
                    at.store(code.select(half >= threshold, at.vector() * keep_scale, 0.0))
