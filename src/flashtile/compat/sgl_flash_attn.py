"""The interface of SGLang's FlashAttention, module `sgl_kernel.flash_attn`, by flashtile.

Names, order and defaults of arguments, shapes and results are the original's. One function serves both versions.
"""

from typing import Any

from torch import Tensor

from ..api.varlen import attention_varlen
from .arguments import WindowSize, above, decline, descales_of, keywords, longest_of, refuse, splits_of, window_of
from .cache import attend_with_cache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

PACKED = "flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)"
CACHE = "flash_attn_with_kvcache(q, k_cache, v_cache, page_table=page_table, cache_seqlens=lengths, causal=True)"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Any:
    """Attention over packed sequences, or over pages, with SGLang's arguments.

    The arguments: as in `flashtile.compat.flash_attn_3.flash_attn_varlen_func`, and `page_table` `[B, max_pages]`
    for pages `[num_pages, page_size, Hkv, D]`; `sinks` `[Hq]`, whose exponentials join each row's denominator; `out`, a
    tensor for the result; `ver`, 3 or 4, on which nothing depends. CuTe functions are declined.

    Returns:
        `out [Tq, Hq, Dv]`; with `return_softmax_lse` `(out, softmax_lse [Hq, Tq], empty, empty)`, -inf for rows that
        see no key: results of the splits are not kept.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    check(PACKED, ver, score_mod, aux_tensors)
    descales = descales_of(PACKED, q, k, q_descale, k_descale, v_descale)
    settings = keywords(0.0, softmax_scale, causal, window_of(window_size, PACKED), softcap, None, False)
    result, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=longest_of(max_seqlen_q),
        max_seqlen_k=longest_of(max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        attention_chunk=above(0, attention_chunk),
        num_splits=splits_of(num_splits),
        sinks=sinks,
        qv=qv,
        out=out,
        return_lse=True,
        **settings,
        **descales,
    )
    return (result, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else result


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
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Any:
    """Append to a KV cache, in place, and attend over it, with SGLang's arguments.

    The arguments: as in `flashtile.compat.flash_attn_3.flash_attn_with_kvcache`, and `sinks`, `out` and `ver` as
    in `flash_attn_varlen_func`. SGLang passes `cu_seqlens_k_new`, of the whole cache, without keys to append: it is
    ignored then, as in the original.

    Returns:
        `out` in the shape of q with Dv; with `return_softmax_lse` `(out, softmax_lse, empty, empty)`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
        AttentionError: a tensor requires a gradient outside of `torch.no_grad()`: there are no derivatives.
    """
    check(CACHE, ver, score_mod, aux_tensors)
    descales = descales_of(CACHE, q, k_cache, q_descale, k_descale, v_descale)
    if only_qv:
        refuse("only_qv", only_qv, "False; pass qv as q, and v_cache as k_cache too", CACHE)
    result, lse = attend_with_cache(
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
        cu_seqlens_k_new=None if k is None else cu_seqlens_k_new,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        sinks=sinks,
        qv=qv,
        out=out,
        **descales,
    )
    return (result, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else result


def check(example: str, ver: int, score_mod: Any, aux_tensors: Any) -> None:
    """Refuse what has no equivalent."""
    decline(example, score_mod=score_mod, aux_tensors=aux_tensors)
    if ver not in (3, 4):
        refuse("ver", ver, "3 or 4", example)
