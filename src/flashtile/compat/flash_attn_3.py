"""The interface of FlashAttention-3, module `flash_attn_interface` (Shah et al., 2024), by flashtile.

Names, order and defaults of arguments, shapes and results are the original's. Settings of its scheduler are accepted
and ignored.
"""

from typing import Any

import torch
from torch import Tensor

from ..api.attention import attention
from ..api.varlen import attention_varlen
from .arguments import WindowSize, above, decline, descales_of, keywords, longest_of, refuse, splits_of, window_of
from .cache import attend_with_cache
from .combine import flash_attn_combine

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

DENSE = "flash_attn_func(q, k, v, causal=True)"
PACKED = "flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)"
CACHE = "flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over `[B, S, H, D]` with FlashAttention-3's arguments; tensors are viewed, never copied.

    The arguments: as in `flashtile.compat.flash_attn.flash_attn_func`. With `attention_chunk`, query
    i sees the keys of one chunk of so many positions, the one with `i + Sk - Sq`. `num_splits`
    are parts that the keys are split into; up to 1 lets the backend choose. `pack_gqa` and `sm_margin`, which tune the
    original's kernels, are accepted and ignored. Scores are
    the products of q and k plus the products of `qv [B, Sq, Hq, Dv]` and v. q, k and v in float8_e4m3fn have descales
    `[B, Hkv]`, float32, and a result in bfloat16.

    Returns:
        `out [B, Sq, Hq, Dv]`; with `return_attn_probs` `(out, softmax_lse [B, Hq, Sq])`, -inf for rows that see no key.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    descales = descales_of(DENSE, q, k, q_descale, k_descale, v_descale)
    if qv is not None and q.element_size() == 1:
        decline(DENSE, qv=qv)
    if qv is not None:
        q, k = torch.cat((qv, q), -1), torch.cat((v, k), -1)
    settings = keywords(0.0, softmax_scale, causal, window_of(window_size, DENSE), softcap, None, deterministic)
    settings["attention_chunk"], settings["num_splits"] = above(0, attention_chunk), splits_of(num_splits)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attention(q, k, v, **settings, **descales, return_lse=True)
    return (out.transpose(1, 2), lse) if return_attn_probs else out.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as by `flash_attn_func`, of one tensor `qkv [B, S, 3, H, D]` or `[B, S, num_heads_q + 2 * Hkv, D]`."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None or num_heads_q > qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            accepted = f"an int from 0 such that {qkv.shape[2]} heads are num_heads_q + 2 * Hkv"
            refuse("num_heads_q", num_heads_q, accepted, "flash_attn_qkvpacked_func(qkv, num_heads_q=8)")
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads, heads), dim=2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over packed sequences with FlashAttention-3's arguments, `q [Tq, Hq, D]`, `k [Tk, Hkv, D]`.

    `seqused_k`, integers `[B]`, are the keys of each sequence that exist, and `seqused_q` its queries: rows past them
    give 0, with lse -inf. The other arguments: as in `flash_attn_func`.

    Returns:
        `out [Tq, Hq, Dv]`; with `return_attn_probs` `(out, softmax_lse [Hq, Tq])`, -inf for rows that see no key.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    descales = descales_of(PACKED, q, k, q_descale, k_descale, v_descale)
    settings = keywords(0.0, softmax_scale, causal, window_of(window_size, PACKED), softcap, None, deterministic)
    settings["max_seqlen_q"], settings["max_seqlen_k"] = longest_of(max_seqlen_q), longest_of(max_seqlen_k)
    settings["attention_chunk"], settings["num_splits"] = above(0, attention_chunk), splits_of(num_splits)
    settings["seqused_q"], settings["seqused_k"] = seqused_q, seqused_k
    if qv is not None:
        settings["qv"] = qv
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **settings, **descales, return_lse=True)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append to a KV cache, in place, and attend over it, with FlashAttention-3's arguments.

    Args:
        q: queries `[B, Sq, Hq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`.
        k, v: keys and values to append, `[B, S_new, Hkv, D]` and Dv, or packed `[T_new, Hkv, D]` and Dv.
        cu_seqlens_q: integers `[B + 1]`, offsets of packed sequences in q.
        cu_seqlens_k_new: the same for packed k and v; without it, they are packed like q.
        max_seqlen_q: an int with `cu_seqlens_q`; no result depends on it.
        rotary_seqlens: integers `[B]`, rotary positions of the first token, in place of `cache_seqlens`.

    The other arguments: as in `flashtile.compat.flash_attn.flash_attn_with_kvcache`, where `block_table` is
    called `page_table`, and as in `flash_attn_func`. Caches of 8 bits, float8_e4m3fn as the original's or others of
    flashtile's, are read under q of 16 bits or in float8_e4m3fn, with descales `[B, Hkv]`.
    `scheduler_metadata` is accepted and ignored. `qv` is in the shape of q with Dv; k_cache is read in place where its
    rows are right behind the rows of v_cache, as parts of one tensor, and new tokens need that.

    Returns:
        `out` in the shape of q with Dv; with `return_softmax_lse` `(out, softmax_lse, out_accum, softmax_lse_accum)`:
        lse `[B, Hq, Sq]` or `[Hq, Tq]`, -inf for rows that see no key, and two empty tensors: results of the splits are
        not kept.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
        AttentionError: a tensor requires a gradient outside of `torch.no_grad()`: there are no derivatives.
    """
    descales = descales_of(CACHE, q, k_cache, q_descale, k_descale, v_descale)
    out, lse = attend_with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        example=CACHE,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        qv=qv,
        **descales,
    )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A `scheduler_metadata` for `flash_attn_with_kvcache`, which ignores it: an empty int32 tensor."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)
