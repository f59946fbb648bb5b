"""The call with a KV cache behind FlashAttention-2's, FlashAttention-3's and SGLang's functions, in their layouts."""

from typing import Any

from torch import Tensor

from ..api.kvcache import attention_with_kvcache
from .arguments import WindowSize, above, window_of
from .positions import chunks_of_keys, lengths_of, rotary_arguments


def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    example: str,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    window_size: WindowSize,
    softmax_scale: float | None,
    softcap: float,
    num_splits: int,
    causal: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    attention_chunk: int | None = 0,
    qv: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Append to a cache and attend over it, with FlashAttention's arguments.

    Args:
        example: a call that works, for errors.
        qv: queries of their own for the values, in the layout of q.
        out: a tensor `[B, Sq, Hq, Dv]`, or packed, for the result.
        others: keywords of `flashtile.attention_with_kvcache` as they are.

    Returns:
        `out [B, Sq, Hq, Dv]` or packed, and `lse`, -inf for rows that see no key.
    """
    packed, paged = cu_seqlens_q is not None, page_table is not None
    lengths = lengths_of(cache_seqlens, k_cache, page_table, appends=k is not None, example=example)
    window, chunk = window_of(window_size, example), above(0, attention_chunk)
    rotary = {}
    if rotary_cos is not None or rotary_sin is not None:
        starts = lengths if rotary_seqlens is None else rotary_seqlens
        together = causal or window is not None or chunk is not None
        rotary = rotary_arguments(k, rotary_cos, rotary_sin, starts, together=together, example=example)
    mask = None
    if chunk is not None and cache_leftpad is not None:
        mask = chunks_of_keys(chunk, cache_leftpad, lengths, q, k, cu_seqlens_q, cu_seqlens_k_new)
    dense = k is not None and k.dim() == 4
    result, lse = attention_with_kvcache(
        q if packed else q.transpose(1, 2),
        k_cache if paged else k_cache.transpose(1, 2),
        v_cache if paged else v_cache.transpose(1, 2),
        k=k.transpose(1, 2) if dense and k is not None else k,
        v=v.transpose(1, 2) if dense and v is not None else v,
        **rotary,
        cache_seqlens=lengths,
        qv=qv if packed or qv is None else qv.transpose(1, 2),
        leftpad_k=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=None if cu_seqlens_k_new is cu_seqlens_q else cu_seqlens_k_new,
        attention_chunk=chunk if mask is None else None,
        mask=mask,
        scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=above(0, softcap),
        num_splits=above(0, num_splits),
        out=out if packed or out is None else out.transpose(1, 2),
        return_lse=True,
        **others,
    )
    if out is not None:
        return out, lse
    return result if packed else result.transpose(1, 2), lse
