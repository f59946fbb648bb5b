"""FlashAttention-2's function for a KV cache, `[B, S, H, D]` or pages."""

from typing import Any

from torch import Tensor

from ..arguments import WindowSize, infinite_lse
from ..cache import attend_with_cache

EXAMPLE = "flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # untyped, as in flash_attn
    """Append k and v to a cache, in place, and attend over all that it then holds, with FlashAttention-2's arguments.

    Args:
        q: queries `[B, Sq, Hq, D]`.
        k_cache: `[B_cache, S_max, Hkv, D]`, or with `block_table` pages `[num_pages, page_size, Hkv, D]`, of any page
            size.
        v_cache: the same with Dv.
        k: keys to append, `[B, S_new, Hkv, D]`, with `v` and `cache_seqlens`.
        v: values to append, `[B, S_new, Hkv, Dv]`.
        rotary_cos: `[S_rotary, rotary_dim / 2]`, with `k`. Appended keys are rotated at the positions `cache_seqlens`
            onwards, and so are the queries with `causal` or a window; without them all queries are at `cache_seqlens`.
        rotary_sin: the same.
        cache_seqlens: keys before the call: an int, int32 or int64 `[B]`, or `None` for a full cache.
        cache_batch_idx: int32 or int64 `[B]`, each sequence's row of a dense cache, or of `block_table`.
        cache_leftpad: int32 or int64 `[B]`, positions at the front that hold no key.
        block_table: int32 or int64 `[B, max_pages]`.
        rotary_interleaved: pairs are features `2n` and `2n + 1`; if False, `n` and `n + rotary_dim / 2`.
        num_splits: parts that the keys are split into; up to 0 lets the backend choose.
        return_softmax_lse: also return `softmax_lse`.

    The other arguments: as in `flash_attn_func`.

    Returns:
        `out [B, Sq, Hq, Dv]`; with `return_softmax_lse` also `softmax_lse [B, Hq, Sq]`, +inf for rows that see no key.

    Raises:
        ArgumentError: an argument is not what it should be; rotary tables without keys to append, or keys to append
            without `cache_seqlens`.
        AttentionError: a tensor requires a gradient outside of `torch.no_grad()`: there are no derivatives.
    """
    out, lse = attend_with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        example=EXAMPLE,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return (out, infinite_lse(lse)) if return_softmax_lse else out
