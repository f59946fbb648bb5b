"""The tensors and scalars of a KV-cache call, and the numbers of keys that follow from them."""

from typing import NamedTuple

from torch import Tensor

from .call import Tensors

EXAMPLE = (
    "flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True) with "
    "q [2, 8, 1, 64], k_cache, v_cache [2, 4, 512, 64], k, v [2, 4, 1, 64] and lengths int32 [2]"
)


class CacheTensors(NamedTuple):
    """The tensors of a KV-cache call; those that modify scores are in `Tensors`, as for every call."""

    k_cache: Tensor  # [B_cache, Hkv, S_max, D], or pages [num_pages, page_size, Hkv, D]
    v_cache: Tensor
    cache_seqlens: Tensor  # int32, [B]
    page_table: Tensor | None = None  # int32, [B, max_pages]
    cache_batch_idx: Tensor | None = None  # int32, [B]; rows of a dense cache, or of the page table
    leftpad_k: Tensor | None = None  # int32, [B]
    rotary_start: Tensor | None = None  # int32, [B]
    cu_seqlens_k_new: Tensor | None = None  # int32, [B + 1]; iff new keys are packed otherwise than q
    k: Tensor | None = None  # to append: [B, Hkv, S_new, D], or packed like q [T, Hkv, D]
    v: Tensor | None = None
    rotary_cos: Tensor | None = None  # [S_rotary, rotary_dim / 2]
    rotary_sin: Tensor | None = None
    k_descale: Tensor | None = None  # float32, of caches of 8 bits; `eight_bit` has their shapes
    v_descale: Tensor | None = None


CACHE_INDICES = slice(CacheTensors._fields.index("cache_seqlens"), CacheTensors._fields.index("cu_seqlens_k_new") + 1)
CACHE_REQUIRED = ("k_cache", "v_cache", "cache_seqlens")


class RotarySettings(NamedTuple):
    """The scalars of rotary positions."""

    interleaved: bool = True  # pairs are features (0, 1), (2, 3), ...
    q_fixed: bool = False  # all queries of a sequence turn as its first one


def held(cache: CacheTensors) -> Tensor:
    """Keys of each sequence before this call, `[B]`."""
    return cache.cache_seqlens.long().clamp(min=0)


def appended(cache: CacheTensors, features: Tensors) -> int | Tensor:
    """Keys that this call adds to each sequence; an int, or `[B]`."""
    return 0 if cache.k is None else count(cache.k, new_offsets(cache, features))


def new_offsets(cache: CacheTensors, features: Tensors) -> Tensor | None:
    """The offsets of packed new keys; `None` if each sequence has as many."""
    if cache.k is None or cache.k.dim() == 4:
        return None
    return features.cu_seqlens_q if cache.cu_seqlens_k_new is None else cache.cu_seqlens_k_new


def count(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """Tokens of each sequence in `x`."""
    return x.shape[2] if cu_seqlens is None else (cu_seqlens[1:] - cu_seqlens[:-1]).long().clamp(min=0)
