"""PyTorch's `scaled_dot_product_attention`, as a call of `flashtile.attention`."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ...api.attention import Causal, attention
from ..arguments import refuse
from .nested import nested_attention

EXAMPLE = "scaled_dot_product_attention(query, key, value, is_causal=True)"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Tensors of four dimensions are passed on as they are. Others are viewed with four, and copied only where broadcast
    leading dimensions leave no such view.

    Args:
        query: `[..., Hq, L, E]`, or `[L, E]`; any leading dimensions, which broadcast with key's and value's.
        key: `[..., Hkv, S, E]`.
        value: `[..., Hkv, S, Ev]`; one head broadcasts, as one of key does.
        attn_mask: broadcasts to `[..., Hq, L, S]`: bool, True is visible, or of q's dtype or float32, added to the
            scores. A floating-point mask has a gradient. Or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: probability of dropping a weight, `0 <= p < 1`; applies whenever it is above 0.
        is_causal: key j is visible iff `j <= i` (top-left). With a tensor `attn_mask`, both hold.
        scale: factor of the products; `E ** -0.5` if `None`.
        enable_gqa: key and value may have fewer heads than query.

    Nested tensors of layout `torch.jagged` are `[B, H, ragged, E]`, all three and without `attn_mask`.

    Returns:
        `[..., Hq, L, Ev]` in q's dtype, nested as query; rows that see no key are 0.

    Raises:
        ArgumentError: an argument is not what it should be; a `CausalBias` with `is_causal`, or to the lower right for
            other lengths than the call's; other heads without `enable_gqa`.
    """
    causal: Causal = "top_left" if is_causal else False
    if isinstance(attn_mask, CausalBias):
        causal, attn_mask = causal_of(attn_mask, query, key, is_causal), None
    if query.is_nested or key.is_nested or value.is_nested:
        return nested_attention(query, key, value, attn_mask, dropout_p, causal, scale, enable_gqa)
    if query.dim() == key.dim() == value.dim() == 4:
        batch, heads = key.shape[0], key.shape[1]
        same = query.shape[0] == batch == value.shape[0] and value.shape[1] == heads
        if same and (enable_gqa or query.shape[1] == heads):
            if attn_mask is None:
                return attention(query, key, value, causal=causal, scale=scale, dropout_p=dropout_p)
            keyword = mask_keyword(attn_mask, query.shape[:1])
            return attention(query, key, value, causal=causal, scale=scale, dropout_p=dropout_p, **keyword)
    return with_leading_dimensions(query, key, value, attn_mask, dropout_p, causal, scale, enable_gqa)


def causal_of(bias: CausalBias, query: Tensor, key: Tensor, is_causal: bool) -> Causal:
    """The `causal` that a CausalBias stands for. Its own elements are memory that nobody has written."""
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    if is_causal:
        refuse("is_causal", is_causal, f"False with an attn_mask that is a CausalBias of {rows} and {keys}", EXAMPLE)
    if bias.variant is CausalVariant.UPPER_LEFT or rows == keys:  # as in PyTorch, whatever the lengths of the call
        return "top_left"
    given = query.shape[-2], key.shape[-2]
    if query.is_nested or (rows, keys) != given:
        accepted = f"causal_lower_right{given}, of the lengths of query and key, where these are not nested"
        refuse("attn_mask", bias, accepted, EXAMPLE)
    return True


def with_leading_dimensions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    causal: Causal,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The general case: leading dimensions are broadcast and become one, the batch."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            refuse(name, x, "a tensor of at least 2 dimensions", EXAMPLE)
    q, k, v = (x[(None,) * (3 - x.dim())] for x in (query, key, value))  # [..., H, S, E]
    heads = {q.shape[-3], k.shape[-3], v.shape[-3]} - {1}
    if not enable_gqa and len(heads) > 1:
        refuse(
            "enable_gqa",
            enable_gqa,
            "True where key and value have fewer heads than query",
            f"{EXAMPLE[:-1]}, enable_gqa=True)",
        )
    if not enable_gqa:
        q, k, v = (x.expand(*x.shape[:-3], *(heads or {1}), -1, -1) for x in (q, k, v))
    elif 0 < k.shape[-3] != v.shape[-3] > 0:
        common = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x.repeat_interleave(common // x.shape[-3], dim=-3) for x in (k, v))
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (x.expand(*lead, -1, -1, -1).reshape(math.prod(lead), *x.shape[-3:]) for x in (q, k, v))
    keyword = {} if attn_mask is None else mask_keyword(attn_mask, lead)
    out = attention(q, k, v, causal=causal, scale=scale, dropout_p=dropout_p, **keyword)
    if max(query.dim(), key.dim(), value.dim()) == 2:
        return out[0, 0]
    return out.reshape(*lead, *out.shape[1:])


def mask_keyword(attn_mask: Tensor, lead: torch.Size) -> dict[str, Any]:
    """Make `attn_mask` a `mask` or `bias` of four dimensions; those that it broadcasts stay 1 where possible."""
    mask = attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask.dim() < 4 else attn_mask
    if len(lead) != 1 or mask.dim() > 4:
        same = all(n == 1 for n in mask.shape[:-3])
        mask = mask if same else mask.expand(*lead, -1, -1, -1)
        mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
    return {"mask" if mask.dtype is torch.bool else "bias": mask}
