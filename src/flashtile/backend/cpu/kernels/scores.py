"""Score features, one line each, in the contract's order.

Scores are multiplied by `log2(e)`, so that the softmax needs only exp2. The scale is folded into the queries, and each
feature has the factor in its own argument. With a bias scores are in natural units instead, because `finfo.min`, a
common bias for hidden pairs, times `log2(e)` would be an infinity. So they are with a score_mod, which takes natural
scores.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..variant import Variant
from .codegen import Code
from .elementary import tanh
from .fields import Arguments
from .operands import INT, Pointer, Value
from .stages import StagedCode


class ScoreTables(NamedTuple):
    """Inputs of the score features, for a vector of rows."""

    diagonal_key: Value | None
    terms: dict[str, Value]  # of heads, by symbol
    functions: StagedCode | None  # score_mod and mask function


class FinalScore(NamedTuple):
    """A vector of final scores, and the value that their gradient needs."""

    score: Value
    tanh_s: Value | None  # tanh(s / softcap)
    formula: Sequence[Any]  # results of the score_mod
    visible: Value | None  # by the mask function


def final_score(
    code: Code, a: Arguments, variant: Variant, t: ScoreTables, s: Value, bias: Pointer, j: Value
) -> FinalScore:
    """The final scores of a vector of rows with key `j`, whose biases are at `bias`."""
    tanh_s = None
    if variant.softcap:
        tanh_s = tanh(code, s)
        s = tanh_s * a.real("softcap_scale")
    if variant.bias is not None:
        s = s + bias.vector()
    if "slopes" in t.terms:
        s = s - t.terms["slopes"] * distance(code, t, j)
    formula, visible = (
        [] if t.functions is None else t.functions.at_key(code.convert(j + a.integer("j0"), INT), s),
        None,
    )
    if variant.mask_mod is not None:
        visible = code.splat(formula.pop())
    return FinalScore(formula[0] if formula else s, tanh_s, formula, visible)


def product_gradient(final: FinalScore, ds: Value) -> Value:
    """The gradient of the products from that of the scores before the score_mod. dbias gets `ds`, dslopes
    `-ds * distance`.
    """
    return ds if final.tanh_s is None else ds * (1.0 - final.tanh_s * final.tanh_s)


def distance(code: Code, t: ScoreTables, j: Value) -> Value:
    """`|i + Sk - Sq - j|`, subtracted as integers: exact up to 2**24 in float32."""
    assert t.diagonal_key is not None
    offset = t.diagonal_key - code.convert(j, INT)
    return code.convert(code.maximum(offset, 0 - offset), code.real_type)
