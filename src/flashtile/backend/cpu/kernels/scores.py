"""Score features, one line each, in the contract's order.

Scores are multiplied by `log2(e)`, so that the softmax needs only exp2. The scale is folded into the queries, and each
feature has the factor in its own argument. With a bias scores are in natural units instead, because `finfo.min`, a
common bias for hidden pairs, times `log2(e)` would be an infinity. So they are with a score_mod, which takes natural
scores.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..variant import CAPTURED, Variant
from .codegen import Code
from .elementary import tanh
from .fields import Arguments
from .operands import INT, Pointer, Value
from .stages import StagedCode


class ScoreTables(NamedTuple):
    """Inputs of the score features, for a vector of rows."""

    diagonal_key: Value | None
    terms: dict[str, Value]  # values of heads, by symbol
    functions: StagedCode | None  # score_mod and mask function


class ScoreTangents(NamedTuple):
    """Tangents of the score features' inputs, for a vector of rows with a key. All are in the units of scores."""

    product: Value
    bias: Value | None = None
    slopes: Value | None = None


class FinalScore(NamedTuple):
    """A vector of final scores, and the values that their gradient needs."""

    score: Value
    tanh_s: Value | None  # tanh(s / softcap)
    formula: Sequence[Any]  # results of the score_mod
    visible: Value | None  # by the mask function
    tangent: Value | None  # the score's


def final_score(
    code: Code,
    a: Arguments,
    variant: Variant,
    t: ScoreTables,
    s: Value,
    bias: Pointer,
    j: Value,
    tangents: ScoreTangents | None = None,
) -> FinalScore:
    """The final scores of a vector of rows with key `j`, whose biases are at `bias`."""
    tanh_s, ds = None, None if tangents is None else tangents.product
    if variant.softcap:
        tanh_s = tanh(code, s)
        s = tanh_s * a.real("softcap_scale")
        ds = None if ds is None else ds * ((1.0 - tanh_s * tanh_s) * a.real("softcap_scale"))
    if variant.bias is not None:
        s = s + bias.vector()
        ds = added(ds, None if tangents is None else tangents.bias)
    if "slopes" in t.terms:
        away = distance(code, t, j)
        s = s - t.terms["slopes"] * away
        if tangents is not None and tangents.slopes is not None:
            ds = added(ds, tangents.slopes * (0 - away))
    formula, visible = (
        [] if t.functions is None else t.functions.at_key(code.convert(j + a.integer("j0"), INT), s),
        None,
    )
    if variant.mask_mod is not None:
        visible = code.splat(formula.pop())
    if formula and ds is not None:
        ds = ds * formula[1]
        ds = ds + formula[2] if CAPTURED in variant.tangents else ds
    return FinalScore(formula[0] if formula else s, tanh_s, formula, visible, ds)


def added(x: Value | None, y: Value | None) -> Value | None:
    return x if x is None or y is None else x + y


def product_gradient(final: FinalScore, ds: Value) -> Value:
    """The gradient of the products from the gradient of the scores before the score_mod. dbias gets `ds`, dslopes
    `-ds * distance`.
    """
    return ds if final.tanh_s is None else ds * (1.0 - final.tanh_s * final.tanh_s)


def distance(code: Code, t: ScoreTables, j: Value) -> Value:
    """`|i + Sk - Sq - j|`, subtracted as integers: exact up to 2**24 in float32."""
    assert t.diagonal_key is not None
    offset = t.diagonal_key - code.convert(j, INT)
    return code.convert(code.maximum(offset, 0 - offset), code.real_type)
