"""Score features, one line each, in the contract's order.

Scores are multiplied by `log2(e)`, so that the softmax needs only exp2. The scale is folded into the queries, and each
feature has the factor in its own argument. With a bias scores are in natural units instead, because `finfo.min`, a
common bias for hidden pairs, times `log2(e)` would be an infinity. So they are with a score_mod, which takes natural
scores.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..variant import Arguments, Variant
from .codegen import Code
from .elementary import tanh
from .operands import INT, Pointer, Value
from .products import Panel
from .stages import StagedCode


class ScoreTables(NamedTuple):
    """Inputs of the score features, for one panel and one block."""

    bias: Pointer  # [keys, rows]
    diagonal_key: Pointer  # [rows], int
    terms: dict[str, Pointer]  # of heads, by symbol: [rows]
    functions: StagedCode | None  # score_mod and mask function


class FinalScore(NamedTuple):
    """A vector of final scores, and the value that their gradient needs."""

    score: Value
    tanh_s: Value | None  # tanh(s / softcap)
    formula: Sequence[Any]  # results of the score_mod
    visible: Value | None  # by the mask function


def final_score(
    code: Code, a: Arguments, variant: Variant, t: ScoreTables, panel: Panel, s: Value, n: int, j: Value, block_j: Value
) -> FinalScore:
    """The final scores of a vector of rows, from row `n` of the panel, with key `j`, number `block_j` of the block."""
    tanh_s = None
    if variant.softcap:
        tanh_s = tanh(code, s)
        s = tanh_s * a.real("softcap_scale")
    if variant.bias is not None:
        s = s + t.bias.vector(block_j * panel.rows + n)
    if "slopes" in t.terms:
        s = s - t.terms["slopes"].vector(n) * distance(code, t.diagonal_key, n, j)
    formula, visible = [] if t.functions is None else t.functions.at_pair(n // code.lanes, s), None
    if variant.mask_mod is not None:
        visible = code.splat(formula.pop())
    return FinalScore(formula[0] if formula else s, tanh_s, formula, visible)


def product_gradient(final: FinalScore, ds: Value) -> Value:
    """The gradient of the products from that of the scores before the score_mod. dbias gets `ds`, dslopes
    `-ds * distance`.
    """
    return ds if final.tanh_s is None else ds * (1.0 - final.tanh_s * final.tanh_s)


def distance(code: Code, diagonal_key: Pointer, n: int, j: Value) -> Value:
    """`|i + Sk - Sq - j|`, subtracted as integers: exact up to 2**24 in float32."""
    offset = diagonal_key.vector(n) - code.convert(j, INT)
    return code.convert(code.maximum(offset, 0 - offset), code.real_type)
