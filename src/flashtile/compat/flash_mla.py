"""The interface of DeepSeek's FlashMLA, module `flash_mla`, by flashtile: decoding over latent rows.

Names, order and defaults of arguments, shapes and results are the original's of 2026; `get_mla_metadata` also takes the
arguments that it had before, and its results go into every call. Selected keys are declined.
"""

from typing import Any

import torch
from torch import Tensor

from ..api.kvcache import attention_with_kvcache
from .arguments import decline, infinite_lse, refuse

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

FEATURES, ROW_BYTES = 576, 656  # a packed row has so many
EXAMPLE = (
    "flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, get_mla_metadata()[0], causal=True, "
    "softmax_scale=192**-0.5)"
)


class FlashMLASchedMeta:
    """The schedule that the original keeps from call to call. Here calls plan themselves, and it is empty."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The `tile_scheduler_metadata` and the `num_splits` of `flash_mla_with_kvcache`, which ignores both. All
    arguments are ignored: the lengths, tokens and heads of older programs, and none of newer ones.
    """
    return FlashMLASchedMeta(), None


def bytes_of(q: Tensor, k_cache: Tensor) -> Tensor:
    """Pages of rows of 656 bytes as `attention_with_kvcache` takes them."""
    if k_cache.dim() != 4 or k_cache.element_size() != 1 or k_cache.shape[2:] != (1, ROW_BYTES):
        accepted = f"[num_pages, page_size, 1, {ROW_BYTES}] of bytes, with is_fp8_kvcache"
        refuse("k_cache", k_cache, accepted, EXAMPLE)
    if q.shape[-1] != FEATURES:
        refuse("q", q, f"{FEATURES} features, with is_fp8_kvcache", EXAMPLE)
    return k_cache.view(torch.uint8)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pages of latent rows, whose first `head_dim_v` features are the values.

    Args:
        q: queries `[B, Sq, Hq, D]`, the last tokens of their sequences.
        k_cache: pages `[num_pages, page_size, Hkv, D]` of q's dtype, of any page size; Hkv is 1 in DeepSeek's models.
        block_table: integers `[B, max_pages]`.
        cache_seqlens: integers `[B]`, keys of each sequence.
        head_dim_v: features of the values, 512 in DeepSeek's models.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returns; ignored.
        softmax_scale: by default `D ** -0.5`, as the original's. No model means it: DeepSeek-V3's is `192 ** -0.5`
            times the factor of its rotary scaling.
        attn_sink: `[Hq]`; `out` is multiplied by `exp(lse) / (exp(lse) + exp(attn_sink))`, and lse stays.
        is_fp8_kvcache: rows are 656 bytes, as DeepSeek-V3.2 keeps them: 512 numbers of float8_e4m3fn, the four float32
            scales of each 128 of them, and 64 numbers of bfloat16 (docs/kvcache.md).
        indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: must be `None`.

    Returns:
        `out [B, Sq, Hq, head_dim_v]` and `softmax_lse [B, Hq, Sq]`; rows that see no key give 0 and +inf.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
        AttentionError: a tensor requires a gradient outside of `torch.no_grad()`: there are no derivatives.
    """
    decline(
        EXAMPLE, indices=indices, extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length, extra_topk_length=extra_topk_length,
    )  # fmt: skip
    if block_table is None or cache_seqlens is None:
        name = "block_table" if block_table is None else "cache_seqlens"
        refuse(name, None, "integers: pages and lengths of the sequences", EXAMPLE)
    assert block_table is not None
    assert cache_seqlens is not None
    if is_fp8_kvcache:
        k_cache = bytes_of(q, k_cache)
    out, lse = attention_with_kvcache(
        q.transpose(1, 2),
        k_cache,
        None,
        v_dim=head_dim_v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        scale=softmax_scale,
        causal=causal,
        return_lse=True,
    )
    if attn_sink is not None:
        share = torch.sigmoid(lse - attn_sink.to(lse.dtype)[:, None])  # [B, Hq, Sq]
        share = share.masked_fill(lse == -torch.inf, 0.0)
        out = (out * share[..., None]).to(out.dtype)
    return out.transpose(1, 2), infinite_lse(lse)
