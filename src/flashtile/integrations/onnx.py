"""ONNX export: dense calls become Attention, an operator of opset 23, where it computes the same.

Attention scales scores, caps them, adds a bias and hides pairs, in the contract's order (docs/contract.md).
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import private_torch
from ..errors import ArgumentError, AttentionError
from .optional import require

__all__ = ["translations"]

VERSIONS = ((0, 7), (1, 0))  # versions of onnxscript
EXAMPLE = "torch.onnx.export(..., dynamo=True, opset_version=23, custom_translation_table=translations())"
FLOAT, HALVES = 1, (10, 16)  # ONNX's numbers of float32, and of float16 and bfloat16
ABSENT: dict[str, Any] = dict.fromkeys(("alibi_slopes", "sinks", "attention_chunk", "score_mod", "mask_mod"))
ABSENT |= {"dropout_p": 0.0}
SCORES = 2  # `qk_matmul_output_mode` of scores with bias and mask


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export(..., dynamo=True, opset_version=23)`.

    Calls of `flashtile.attention` with `causal`, `window`, `scale`, `softcap`, `bias` and a tensor as `mask` become the
    operator Attention, with lengths that may be dynamic.

    Raises:
        AttentionError: onnxscript, which PyTorch's exporter needs, is not installed. During an export, as the cause of
            PyTorch's error: a packed call, one with a cache, or one with anything else.
    """
    require("onnxscript", VERSIONS)
    ops = torch.ops.flashtile
    others = (ops.attention_varlen_forward.default, ops.attention_with_kvcache.default)
    return {ops.attention_forward.default: dense, **{op: refusal(op) for op in others}}


def refusal(operator: Any) -> Callable[..., Any]:
    """The translation of an operator that has none."""
    name = operator.name().removeprefix("flashtile::").removesuffix("_forward")

    def refuse(*_: Any) -> Any:
        raise AttentionError(
            f"flashtile.{name} has no translation to ONNX.\n  accepted: flashtile.attention(q, k, v), with a mask"
        )

    return refuse


def dense(*arguments: Any) -> Any:
    """`out` and `lse` of a dense call. The exporter removes the nodes of lse where nothing uses it."""
    from onnxscript import opset23 as op  # pyright: ignore - optional

    names = private_torch.argument_names(torch.ops.flashtile.attention_forward.default)
    call = dict(zip(names, arguments, strict=True))
    refuse_others(call)
    q, k, v, bias = (call[name] for name in ("q", "k", "v", "bias"))
    dtype = q.dtype
    if bias is not None and bias.dtype != dtype:  # float32, which rounding would change
        q, k, v = (op.CastLike(x, bias) for x in (q, k, v))
        dtype = bias.dtype
    options: dict[str, Any] = {"scale": float(call["scale"]), "softcap": float(call["softcap"] or 0)}
    pairs = None
    if is_plain_causal(call):
        options["is_causal"] = 1
    else:
        pairs = visible_pairs(op, call)
    if bias is not None:
        bias = op.Expand(bias, pairs_shape(op, call))
        pairs = bias if pairs is None else op.Where(pairs, bias, op.CastLike(float("-inf"), bias))
    precision = {"softmax_precision": FLOAT} if dtype in HALVES else {}
    out = op.Attention(q, k, v, pairs, **options, **precision)[0]
    if dtype in HALVES:
        q, k, v = (op.Cast(x, to=FLOAT) for x in (q, k, v))
        pairs = pairs if pairs is None or bias is None else op.Cast(pairs, to=FLOAT)
    scores = op.Attention(q, k, v, pairs, **options, qk_matmul_output_mode=SCORES)[3]
    lse = op.ReduceLogSumExp(scores, [-1], keepdims=0)
    if pairs is not None:  # runtimes may give NaN to a row that sees no key
        values = pairs if bias is not None else op.Where(pairs, 0.0, float("-inf"))
        seen = op.Greater(op.ReduceMax(values, [-1]), op.CastLike(float("-inf"), values))
        out = op.Where(seen, out, op.CastLike(0.0, out))
        lse = op.Where(op.Squeeze(seen, [-1]), lse, op.CastLike(float("-inf"), lse))
    return op.CastLike(out, call["q"]), lse


def refuse_others(call: dict[str, Any]) -> None:
    """Refuse what Attention lacks."""
    for name, absent in ABSENT.items():
        if call[name] is not absent and call[name] != absent:
            raise ArgumentError(name, call[name], f"{absent} in an export to ONNX", EXAMPLE)
    for name in ("scale", "softcap"):
        x = call[name]
        if not isinstance(x, int | float) and x is not None:
            raise ArgumentError(name, x, "a number that is a constant of the program", EXAMPLE)
    if call["scale"] <= 0:
        raise ArgumentError("scale", call["scale"], "a number above 0 in an export to ONNX", EXAMPLE)


def is_plain_causal(call: dict[str, Any]) -> bool:
    """Whether the operator's own causal mask, which is aligned to the first query, is all that hides pairs."""
    if call["mask"] is not None or call["bias"] is not None or call["window_left"] is not None:
        return False
    if call["window_right"] is None:
        return bool(call["top_left"])
    right, lengths = call["window_right"], (call["q"].shape[2], call["k"].shape[2])
    return not call["top_left"] and isinstance(right, int) and right == 0 and lengths[0] == lengths[1]


def visible_pairs(op: Any, call: dict[str, Any]) -> Any:
    """The pairs that mask and window show, `[B|1, H|1, Sq, Sk]` or `[Sq, Sk]`; `None` if they show all."""
    rows, keys = lengths(op, call)
    i = op.Unsqueeze(op.Range(0, op.Squeeze(rows), 1), [-1])
    j = op.Range(0, op.Squeeze(keys), 1)
    distance = op.Sub(op.Sub(j, i), op.Sub(keys, rows))  # from a row's own position
    shown = [] if call["mask"] is None else [op.Expand(call["mask"], pairs_shape(op, call))]
    if call["top_left"]:
        shown.append(op.LessOrEqual(j, i))
    if call["window_left"] is not None:
        shown.append(op.GreaterOrEqual(op.Add(distance, call["window_left"]), 0))
    if call["window_right"] is not None:
        shown.append(op.LessOrEqual(distance, call["window_right"]))
    while len(shown) > 1:
        shown.append(op.And(shown.pop(), shown.pop()))
    return shown[0] if shown else None


def pairs_shape(op: Any, call: dict[str, Any]) -> Any:
    """`[1, 1, Sq, Sk]`, to which a mask or bias expands: from opset 24 on, one of fewer keys hides the others."""
    return op.Concat(op.Constant(value_ints=[1, 1]), *lengths(op, call), axis=0)


def lengths(op: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    """`Sq` and `Sk` as vectors of one number."""
    return op.Shape(call["q"], start=2, end=3), op.Shape(call["k"], start=2, end=3)
