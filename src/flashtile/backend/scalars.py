"""Kernel arguments that several backends compute from a call: strides, window bounds, score units, dropout."""

import math
from typing import Any

import torch
from torch import Tensor

from ..call.call import FEATURES, HEAD_TERMS, SCORE_TERMS, Call, Tensors
from ..call.features import PER_SEQUENCE_AND_HEAD
from ..call.problem import LONGEST, accumulation_dtype, power_of_two

# Strides between sequences of score terms that may be `[B, H]`: names, and the places of the terms in `Tensors`.
HEAD_STRIDES = [
    (f"stride_{symbol}_b", n)
    for symbol, n in HEAD_TERMS.items()
    if PER_SEQUENCE_AND_HEAD in FEATURES[Tensors._fields[n]].shapes
]
LOG2E = math.log2(math.e)


def rows_last(x: Tensor) -> Tensor:
    """The tensor with contiguous features; a copy if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def strides_of(x: Tensor, paged: bool = False) -> tuple[int, int, int]:
    """Strides of `[B, H, S, D]`, `[T, H, D]` or pages `[P, page_size, H, D]`: sequences (or pages), heads, rows."""
    if paged:
        batch, row, head = x.stride()[:3]
    elif x.dim() == 4:
        batch, head, row = x.stride()[:3]
    else:
        batch, (row, head) = 0, x.stride()[:2]
    return batch, head, row


def strides(name: str, x: Tensor, align: int, *, keys: bool = False, paged: bool = False) -> dict[str, Any]:
    """Strides as kernel arguments `stride_{name}_{b,h,m or n}`, in units of `align` elements (see `strides_of`)."""
    batch, head, row = strides_of(x, paged)
    steps = {"b": batch, "h": head, "n" if keys else "m": row}
    return {f"stride_{name}_{dim}": stride // align for dim, stride in steps.items()}


def lse_strides(x: Tensor | None) -> dict[str, Any]:
    """Strides of row statistics, contiguous `[B, H, S]` or `[H, T]`."""
    if x is None:
        return {"stride_lse_b": None, "stride_lse_h": None}
    return {"stride_lse_b": x.stride(0) if x.dim() == 3 else 0, "stride_lse_h": x.stride(-2)}


def dlse_strides(dlse: Tensor | None) -> dict[str, Any]:
    """Strides of a gradient of lse, which need not be contiguous."""
    if dlse is None:
        return {"stride_dlse_b": None, "stride_dlse_h": None, "stride_dlse_m": None}
    *batch, head, row = dlse.stride()
    return {"stride_dlse_b": batch[0] if batch else 0, "stride_dlse_h": head, "stride_dlse_m": row}


def head_terms(t: Tensors) -> dict[str, Tensor | None]:
    """Score terms with a value for each head, by symbol."""
    inputs = t[:-1]
    return {symbol: inputs[n] for symbol, n in HEAD_TERMS.items()}


def head_strides(t: Tensors, absent: int | None = None) -> dict[str, int | None]:
    """The strides `stride_{symbol}_b` of contiguous score terms; 0 for `[H]`."""
    inputs, strides = t[:-1], {}
    for name, n in HEAD_STRIDES:
        x = inputs[n]
        strides[name] = absent if x is None else x.shape[1] if x.dim() == 2 else 0
    return strides


def finite_softcap(call: Call) -> float | None:
    """The softcap in the range in which its quotients and products with the other factors of scores are finite: beyond
    it a cap changes no score, and below it scores are 0 to any weight.
    """
    if call.settings.softcap is None:
        return None
    range_of = torch.finfo(accumulation_dtype(call.tensors.q.dtype))
    return min(max(call.settings.softcap, range_of.tiny * 2**40), range_of.max / 4)


def score_units(call: Call) -> dict[str, Any]:
    """Factors between products, scores and the argument of exp2: `multiplier` turns products into scores, `factor`
    scores into base-2 exponents. Without score features, `factor` includes the scale and there is no multiplier.
    """
    t, s = call.tensors, call.settings
    added = any(getattr(t, name) is not None for name in SCORE_TERMS)
    folded = not added and s.softcap is None and s.score_mod is None and s.scale > 0
    return {
        "factor": s.scale * LOG2E if folded else LOG2E,
        "multiplier": None if folded else s.scale,
        "softcap": finite_softcap(call),
    }


def splits_of(call: Call, planned: int, block_n: int) -> int:
    """Parts that the keys of a row are split into: those that the call asks for, or the plan's; at most one for each
    block of as many keys as share a plan, so that a growing sequence does not recompile.
    """
    k, page_table = call.tensors.k, call.tensors.page_table
    keys = k.shape[1] * page_table.shape[1] if page_table is not None else k.shape[-2 if k.dim() == 4 else 0]
    return min(call.settings.requested_splits or planned, max(-(-power_of_two(keys) // block_n), 1))


def window_numbers(call: Call) -> dict[str, Any]:
    """The window's sides, `None` where unlimited, and the shift of the diagonal against `seqlen_k - seqlen_q`."""
    s = call.settings
    return {
        "window_left": None if s.window_left is None else max(min(s.window_left, LONGEST), -LONGEST),
        "window_right": None if s.window_right is None else max(min(s.window_right, LONGEST), -LONGEST),
        "top_left": s.i0 - s.j0 if s.top_left else None,
        "diagonal": s.diagonal + s.i0 - s.j0,
    }


def threshold(dropout_p: float) -> int:
    """The 16-bit threshold below which a probability is dropped."""
    return round(dropout_p * 65536)


def keep_scale(limit: int) -> float:
    """The factor of kept probabilities. At a threshold of 65536 none are kept, and the factor is finite."""
    return 65536 / max(65536 - limit, 1)
