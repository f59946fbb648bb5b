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


class Tables(NamedTuple):
    """What the features of one panel and one block read."""

    bias: Pointer  # [keys, rows]
    place: Pointer  # [rows], int
    slope: Pointer  # [rows]


class Modified(NamedTuple):
    """A vector of final scores, and what their gradient needs."""

    score: Value
    capped: Value | None  # tanh(s / softcap)


def modified(
    code: Code, a: Arguments, variant: Variant, t: Tables, panel: Panel, s: Value, n: int, j: Value, block_j: Value
) -> Modified:
    """The final scores of a vector of rows, `n` rows into the panel, with key `j`, number `block_j` of its block."""
    capped = None
    if variant.softcap:
        capped = tanh(code, s)
        s = capped * a.real("softcap_scale")
    if variant.bias is not None:
        s = s + t.bias.vector(block_j * panel.rows + n)
    if variant.alibi:
        s = s - t.slope.vector(n) * distance(code, t.place, n, j)
    return Modified(s, capped)


def gradient_of_product(forward: Modified, ds: Value) -> Value:
    """From the gradient of the final scores to that of the products. A bias receives `ds`, a slope `-ds * distance`."""
    return ds if forward.capped is None else ds * (1.0 - forward.capped * forward.capped)


def distance(code: Code, place: Pointer, n: int, j: Value) -> Value:
    """`|i + Sk - Sq - j|`; integers, so that it is exact for as long as float32 has room."""
    apart = place.vector(n) - code.convert(j, INT)
    return code.convert(code.maximum(apart, 0 - apart), code.real)
