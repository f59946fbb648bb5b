"""The public function for KV caches: what each argument means, and nothing else."""

from __future__ import annotations  # not evaluated at `import flashtile`

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ..call.advice import public, refuse
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors
from ..dispatch.cache_operator import attend_with_cache
from .latent import cache_with_query_of_values
from .latent_rows import packed_cache
from .normalize import lengths_of, normalize
from .out import direct_out
from .public_call import Request, public_call
from .settings import rotary_of, values_of
from .signatures import (
    CacheKeywords,
    Causal,
    Lengths,
    MaskArgument,
    ScoreModArgument,
    WindowArgument,
)


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[CacheKeywords],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *, return_lse: Literal[True], **keywords: Unpack[CacheKeywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *, return_lse: bool, **keywords: Unpack[CacheKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@public
@public_call
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *more: Any,
    cache_seqlens: Lengths,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_start: Lengths | None = None,
    rotary_q_fixed: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    qv: Tensor | None = None,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    v_dim: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    **unknown: Any,
) -> Request:
    """Append new keys and values to a cache, in place, and attend over all that it then holds; for inference.

    Sequence b has `Sk[b] = cache_seqlens[b] + appended keys`; its queries are its last tokens, at the positions
    `Sk[b] - Sq[b] + i`, for causal and window as for rotary. `cache_seqlens` itself is not changed: add the number of
    appended keys before the next step. Under `torch.compile` and in CUDA graphs it is one operator that reads
    nothing back. docs/kvcache.md has what a cache means, and a decode loop.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 512, 64), torch.zeros(2, 2, 512, 64)  # room for 512 keys each
        >>> lengths = torch.tensor([7, 300], dtype=torch.int32)  # keys that are there
        >>> q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)  # one token each
        >>> out = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True)
        >>> lengths += 1
        >>> torch.equal(k_cache[1, :, 300], k[1, :, 0])
        True

    Args:
        q: queries `[B, Hq, Sq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`; dtypes as in `attention`. Those of 8
            bits have caches of 8 bits, and new k and v in bfloat16, float16 or float32, and no rotary positions.
        k_cache: `[B_cache, Hkv, S_max, D]`, or with `page_table` pages `[num_pages, page_size, Hkv, D]`, of any page
            size (Kwon et al., "PagedAttention", section 4.1); any strides; q's device, and its dtype or float8_e4m3fn,
            float8_e5m2 or int8, in which new keys are quantized.
        v_cache: the same with Dv; `None` with `v_dim`.
        cache_seqlens: int32 or int64 `[B]`, as all lengths and indices here, or an int for all; keys in each sequence's
            cache before this call.
        page_table: int32 `[B, max_pages]`, as in `attention_varlen`; with `cache_batch_idx`, any number of rows.
        cache_batch_idx: int32 `[B]`, each sequence's row of a dense cache, or of `page_table`; `None` is 0, 1, 2, ...
        leftpad_k: int32 `[B]`, positions at the front of each cache that hold no key. They count as positions, so
            that indices and rotary angles count the cache's slots.
        cu_seqlens_q: int32 `[B + 1]`, offsets of the sequences in packed q, and in k and v that are packed alike.
        cu_seqlens_k_new: int32 `[B + 1]`, offsets in k and v that are packed by other lengths than q.
        k, v: keys and values to append, `[B, Hkv, S_new, D]` and Dv, or packed `[T_new, Hkv, D]` and Dv.
        rotary_cos, rotary_sin: `[S_rotary, rotary_dim / 2]`, q's dtype or float32, rotary_dim at most D; q and the
            appended k are turned by the angles of their positions (Su et al., "RoFormer", section 3.2.2). Kept in q's
            dtype after it.
        rotary_interleaved: pairs are features (0, 1), (2, 3), ... (GPT-J); if False, (n, n + rotary_dim / 2)
            (GPT-NeoX).
        rotary_start: int32 `[B]`, or an int for all: the position, for rotary alone, of each sequence's first query and
            of its first appended key. `None`: `Sk - Sq` and `cache_seqlens`.
        rotary_q_fixed: turn all queries of a sequence as its first one.
        q_descale: as in `attention`; `[Hkv]`, `[B, Hkv]`, `[B, Hq, Sq]`, or packed `[Hq, Tq]`.
        k_descale, v_descale: float32, the scales of caches of 8 bits: `k = k_cache * k_descale`; 1 if `None`. One for
            each head, `[Hkv]` or `[B, Hkv]`, for each page and head, `[num_pages, Hkv]`, or for each token and head,
            `[B_cache, Hkv, S_max]` or `[num_pages, page_size, Hkv]`: these are computed for new tokens, and written in
            place.
        v_dim: as in `attention`: values are columns of k_cache, and k alone is appended. `v_descale` is k_descale, and
            not given. With 512 and 576 features of q, k_cache may have rows of 656 bytes, uint8 or float8_e4m3fn, as of
            `pack_latent_rows` (docs/kvcache.md), into which new keys are packed.
        qv: as in `attention_varlen`, in the shape of q with Dv. k and v are appended as they are without it.

    The other arguments: as in `attention`; `mask` and `bias` broadcast to `[B, H, Sq, S_max]` (pages:
    `max_pages * page_size`).

    Returns:
        `out` in the shape of q with Dv; with `return_lse` also `lse`, `[B, Hq, Sq]` or `[Hq, Tq]`.

    Raises:
        ArgumentError: an argument is not what it should be; one that the function does not have is also a `TypeError`.
            On a CPU also a cache, page table or rotary table that is too small, and entries outside the pages; on a
            GPU such keys do not exist and are not written.
        AttentionError: a tensor requires a gradient, or forward-mode is active: this call has no derivatives.
        BackendError: no backend takes the call, or the named one does not.
    """
    if more or unknown:
        refuse("attention_with_kvcache", more, unknown)
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, q, cu_seqlens_q)
    if rotary_start is not None and not isinstance(rotary_start, Tensor):
        rotary_start = lengths_of("rotary_start", rotary_start, q, cu_seqlens_q)
    if qv is not None:
        joined, k = cache_with_query_of_values(q, k_cache, v_cache, k, v, qv, rotary_cos)
        (q, k_cache, v_dim, _), v_cache, v = joined, None, None
    if v_dim is not None:
        k_cache = packed_cache(q, k_cache, v_dim)
    values: Tensor
    values, v_descale, v_dim = values_of(
        "attention_with_kvcache", k_cache, v_cache, k_descale, v_descale, v_dim, appends=v is not None
    )
    cache = CacheTensors(
        k_cache, values, cache_seqlens, page_table, cache_batch_idx, leftpad_k, rotary_start, cu_seqlens_k_new, k, v,
        rotary_cos, rotary_sin, k_descale, v_descale,
    )  # fmt: skip
    rotary = rotary_of(rotary_interleaved, rotary_q_fixed)
    tensors = {"q": q, "k": k_cache, "v": values, "mask": mask, "bias": bias}
    tensors |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "q_descale": q_descale}
    direct = None
    if out is not None:
        inputs = (*tensors.values(), *cache, score_mod)
        direct = direct_out("attention_with_kvcache", out, q, values, inputs, out_dtype)
        if direct is not None:
            tensors["out"] = direct
    call = normalize(
        "attention_with_kvcache",
        tensors,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        out_dtype=out_dtype,
        backend=backend,
        num_splits=num_splits,
        cache=cache,
        v_dim=v_dim,
    )
    return Request(CacheCall(call, cache, rotary), return_lse, out, direct, attend_with_cache)
