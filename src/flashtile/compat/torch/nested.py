"""Nested tensors of the jagged layout: their values are packed sequences, their offsets `cu_seqlens`."""

from typing import Any

import torch
from torch import Tensor

from ...api.attention import Causal
from ...api.varlen import attention_varlen
from ..arguments import refuse

EXAMPLE = (
    "scaled_dot_product_attention(q, k, v) with q, k and v nested tensors [B, H, ragged, E] of layout torch.jagged"
)


def nested_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    causal: Causal,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention of `[B, H, ragged, E]`, which are transposed `[B, ragged, H, E]`; nothing is copied or read back.

    Returns:
        A nested tensor `[B, Hq, ragged, Ev]` with the lengths of query.

    Raises:
        ArgumentError: one of the tensors is not nested, or ragged in another dimension; key and value have other
            offsets; query has gaps between its sequences; `attn_mask`; other heads without `enable_gqa`.
    """
    if attn_mask is not None:
        accepted = "None with nested tensors; flashtile.attention_varlen takes `mask` or `bias`"
        refuse("attn_mask", attn_mask, accepted, EXAMPLE)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout is not torch.jagged or x.dim() != 4 or not is_ragged_in(x, 2):
            accepted = "a nested tensor [B, H, ragged, E] of layout torch.jagged, as query, key and value all are"
            refuse(name, str(x.layout) if x.is_nested else x, accepted, EXAMPLE)
    heads, heads_kv = query.shape[1], key.shape[1]
    if not enable_gqa and heads != heads_kv:
        refuse("enable_gqa", enable_gqa, "True where key and value have fewer heads than query", EXAMPLE)
    q, offsets, gaps, max_q = packed(query)
    k, offsets_k, lengths, max_k = packed(key)
    v, offsets_v, lengths_v, _ = packed(value)
    if gaps is not None:
        refuse("query", "a nested tensor with gaps", "query.contiguous()", EXAMPLE)
    if offsets_k is not offsets_v or lengths is not lengths_v:
        refuse("value", "a nested tensor of other offsets", "the offsets of key, the same tensor", EXAMPLE)
    out = attention_varlen(
        q,
        k,
        v,
        offsets,
        offsets_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        seqused_k=lengths,
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
    )
    return torch.nested.nested_tensor_from_jagged(out, offsets, max_seqlen=max_q).transpose(1, 2)


def is_ragged_in(x: Any, dimension: int) -> bool:
    return x._ragged_idx == dimension


def packed(x: Any) -> tuple[Tensor, Tensor, Tensor | None, int | None]:
    """Values `[T, H, E]`, offsets, lengths if there are gaps, and the longest length if it is known without reading."""
    return x.values().transpose(0, 1), x.offsets(), x.lengths(), x._maybe_max_seqlen
