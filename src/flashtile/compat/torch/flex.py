"""PyTorch's `flex_attention`, as a call of `flashtile.attention`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.attention import attention
from ...api.row_max import row_max
from ..arguments import refuse

EXAMPLE = "flex_attention(query, key, value, score_mod=lambda score, b, h, q_idx, k_idx: score / 2)"


class AuxOutput(NamedTuple):
    """Results that were requested in addition to the output.

    Attributes:
        lse: the log-sum-exp of each row `[B, Hq, L]`, by the natural logarithm; `None` unless requested.
        max_scores: the largest score of each row `[B, Hq, L]`, -inf of a row that sees no key, without a derivative;
            `None` unless requested.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with the arguments of `torch.nn.attention.flex_attention.flex_attention` of PyTorch 2.13.

    It needs no `torch.compile`. Inside of a compiled function it runs between two graphs, unless `score_mod` is a
    `flashtile.ScoreMod` and `block_mask` a `flashtile.BlockMask` or `flashtile.MaskMod`, made outside of the function.

    Args:
        query: `[B, Hq, L, E]`.
        key: `[B, Hkv, S, E]`; one sequence of keys broadcasts if there is a `block_mask`.
        value: `[B, Hkv, S, Ev]`.
        score_mod: `(score, b, h, q_idx, k_idx) -> score` of torch operations, or a `flashtile.ScoreMod`. Tensors that
            it reads may have a gradient.
        block_mask: a `torch.nn.attention.flex_attention.BlockMask` of these lengths, or one of flashtile's masks. Its
            lists count, also those that `mask_mod` alone would not give.
        scale: factor of the products; `E ** -0.5` if `None`.
        enable_gqa: key and value may have fewer heads than query.
        return_lse: also return the log-sum-exp.
        kernel_options: a dict or `None`; it tunes PyTorch's kernels, and no result depends on it here.
        return_aux: an object with the attributes `lse` and `max_scores`, as `AuxRequest` of
            `torch.nn.attention.flex_attention`. The largest scores are a pass of their own over all pairs, in torch
            operations; not inside of `torch.compile`.

    Returns:
        `[B, Hq, L, Ev]`; with `return_lse` also lse `[B, Hq, L]`, with `return_aux` an `AuxOutput`. A row that sees no
        key is 0, and its lse -inf. Both are differentiable.

    Raises:
        ArgumentError: an argument is not what it should be; other heads without `enable_gqa`; both `return_lse` and
            `return_aux`; a request for `max_scores` inside of `torch.compile`.
    """
    if return_lse and return_aux is not None:
        refuse("return_lse", return_lse, "False with return_aux, which requests the same", EXAMPLE)
    wants_max = getattr(return_aux, "max_scores", False)
    if wants_max and torch.compiler.is_compiling():
        accepted = "AuxRequest(lse=True) inside of torch.compile, which has no graph of the largest scores"
        refuse("return_aux", str(return_aux), accepted, EXAMPLE)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        refuse("kernel_options", kernel_options, "a dict or None", EXAMPLE)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            refuse(name, x, "a tensor [B, H, S, E]", EXAMPLE)
    if not enable_gqa and key.shape[1] != query.shape[1]:
        accepted = f"True where key and value have {key.shape[1]} heads and query has {query.shape[1]}"
        refuse("enable_gqa", enable_gqa, accepted, f"{EXAMPLE[:-1]}, enable_gqa=True)")
    if block_mask is not None and key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    arguments = {"score_mod": score_mod, "mask": block_mask, "scale": scale}
    wants_lse = return_lse or getattr(return_aux, "lse", False)
    out, lse = attention(query, key, value, **arguments, return_lse=True) if wants_lse else (None, None)
    if out is None:
        out = attention(query, key, value, **arguments)
    if return_aux is None:
        return out if lse is None else (out, lse)
    return out, AuxOutput(lse, row_max(query, key, value, **arguments) if wants_max else None)
