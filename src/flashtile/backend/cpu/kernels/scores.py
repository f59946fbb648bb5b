"""What a score becomes: one line for each feature, in the contract's order.

Scores are in units of `log2(e)`, so that the softmax is a matter of exp2 alone; the products come with their scale,
which is folded into the queries, and each feature brings its own factor. Only with a bias are scores as the contract
has them: `finfo.min` times `log2(e)` would be an infinity.

A `score_mod` will be one more line, emitted from its expression.
"""

from typing import NamedTuple

from ..variant import Arguments, Variant
from .codegen import Code
from .elementary import tanh
from .operands import INT, Pointer, Value
from .products import Panel


class ScoreTables(NamedTuple):
    """What the features of one panel and one block read."""

    bias: Pointer  # [keys, rows]
    diagonal_key: Pointer  # [rows], int
    slope: Pointer  # [rows]


class FinalScore(NamedTuple):
    """A vector of final scores, and what their gradient needs."""

    score: Value
    tanh_s: Value | None  # tanh(s / softcap)


def final_score(
    code: Code, a: Arguments, variant: Variant, t: ScoreTables, panel: Panel, s: Value, n: int, j: Value, block_j: Value
) -> FinalScore:
    """The final scores of a vector of rows, `n` rows into the panel, with key `j`, number `block_j` of its block."""
    tanh_s = None
    if variant.softcap:
        tanh_s = tanh(code, s)
        s = tanh_s * a.real("softcap_scale")
    if variant.bias is not None:
        s = s + t.bias.vector(block_j * panel.rows + n)
    if variant.alibi:
        s = s - t.slope.vector(n) * distance(code, t.diagonal_key, n, j)
    return FinalScore(s, tanh_s)


def product_gradient(final: FinalScore, ds: Value) -> Value:
    """From the gradient of the final scores to that of the products. A bias receives `ds`, a slope `-ds * distance`."""
    return ds if final.tanh_s is None else ds * (1.0 - final.tanh_s * final.tanh_s)


def distance(code: Code, diagonal_key: Pointer, n: int, j: Value) -> Value:
    """`|i + Sk - Sq - j|`; integers, so that it is exact for as long as float32 has room."""
    offset = diagonal_key.vector(n) - code.convert(j, INT)
    return code.convert(code.maximum(offset, 0 - offset), code.real_type)
