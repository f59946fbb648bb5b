"""Lengths of a KV cache, rotary positions and chunks, as FlashAttention counts them.

flashtile's queries are the last tokens of their sequences, and are rotated there by default. FlashAttention rotates
query i at `cache_seqlens + i` with `causal`, a window or chunks, and all queries at `cache_seqlens` otherwise. Chunks
of flashtile begin at the first position of a cache, FlashAttention's at its first key.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arguments import refuse


def lengths_of(
    cache_seqlens: int | Tensor | None,
    k_cache: Tensor,
    page_table: Tensor | None,
    *,
    appends: bool,
    example: str,
) -> int | Tensor:
    """`cache_seqlens` as flashtile takes it. `None` is a full cache, to which nothing can be appended."""
    if cache_seqlens is not None:
        return cache_seqlens
    if appends:
        refuse("cache_seqlens", None, "the number of keys before the call, with keys to append", example)
    return k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])


def rotary_arguments(
    k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    starts: int | Tensor,
    *,
    together: bool,
    example: str,
) -> dict[str, Any]:
    """Keywords of `flashtile.attention_with_kvcache` for queries and new keys that are rotated from `starts` on.
    `together` is False where all queries are at one position.
    """
    if k is None:
        accepted = "None without keys to append; flash_attn.layers.rotary.apply_rotary_emb rotates q"
        refuse("rotary_cos", rotary_cos, accepted, example)
    if rotary_cos is None or rotary_sin is None:
        refuse("rotary_sin", rotary_sin, "a tensor where rotary_cos is one, and None where it is None", example)
    return {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_start": starts, "rotary_q_fixed": not together
    }  # fmt: skip


def chunks_of_keys(
    chunk: int,
    leftpad: Tensor,
    lengths: int | Tensor,
    q: Tensor,
    k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> Callable[..., Tensor]:
    """A mask function `(b, h, q_idx, k_idx)` of chunks of `chunk` tokens that begin at key `leftpad [B]` of a cache.
    `lengths` are the keys before the call; q and `k`, the keys to append, are `[B, S, H, D]` or packed.
    """
    offsets = cu_seqlens_q if cu_seqlens_k_new is None else cu_seqlens_k_new
    keys = lengths if k is None else lengths + (k.shape[1] if k.dim() == 4 or offsets is None else offsets.diff())
    first = keys - leftpad - (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff())  # [B], of query 0

    def same_chunk(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (first[b] + q_idx) // chunk == (k_idx - leftpad[b]) // chunk

    return same_chunk


def token_positions(x: Tensor, starts: Tensor, cu_seqlens: Tensor | None, *, advance: bool = True) -> Tensor:
    """Positions `[B, S]` of the tokens of `x [B, S, H, D]`, `[T]` of packed `x [T, H, D]`, from `starts [B]` on."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device)
        return starts[:, None] + (steps if advance else torch.zeros_like(steps))
    sequence, position = places(cu_seqlens, x.shape[0])
    return starts[sequence] + (position if advance else torch.zeros_like(position))


def places(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and its position there. Tokens behind the last sequence count as its own."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].long(), token, right=True)
    return sequence, token - cu_seqlens[sequence]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` features of `x [..., S, H, D]` (Su et al., "RoFormer", section 3.2.2), computed in
    float32 (float64 for float64). `cos`, `sin [S_rotary, rotary_dim / 2]`; `positions [..., S]`. Tokens at positions
    behind the tables are not rotated.
    """
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    positions = positions.clamp(0, max(cos.shape[0] - 1, 0))
    c = torch.where(inside, cos[positions], 1).to(dtype)[..., None, :]  # [..., S, 1, rotary_dim / 2]
    s = torch.where(inside, sin[positions], 0).to(dtype)[..., None, :]
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
