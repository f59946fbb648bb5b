"""Lengths of a KV cache and rotary positions, as FlashAttention counts them.

flashtile's queries are the last tokens of their sequences, and are rotated there. FlashAttention rotates query i at
`cache_seqlens + i` with `causal` or a window, and all queries at `cache_seqlens` otherwise. Where the two differ, q and
k are rotated before the call.
"""

import torch
from torch import Tensor

from .arguments import refuse


def lengths_of(
    cache_seqlens: int | Tensor | None,
    k_cache: Tensor,
    page_table: Tensor | None,
    batch: int,
    *,
    appends: bool,
    example: str,
) -> Tensor:
    """Make `cache_seqlens` a tensor `[B]`. `None` is a full cache, to which nothing can be appended."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if appends:
            refuse("cache_seqlens", None, "the number of keys before the call, with keys to append", example)
        cache_seqlens = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)


def rotate_apart(
    q: Tensor,
    k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    lengths: Tensor,
    *,
    interleaved: bool,
    together: bool,
    example: str,
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return q, k and rotary tables for `flashtile.attention_with_kvcache`: as they are if its positions are those of
    FlashAttention, else q and k rotated, and no tables. `together` is False where all queries are at one position;
    `starts` are positions other than `lengths`.
    """
    if k is None:
        accepted = "None without keys to append; flash_attn.layers.rotary.apply_rotary_emb rotates q"
        refuse("rotary_cos", rotary_cos, accepted, example)
    if rotary_cos is None or rotary_sin is None:
        refuse("rotary_sin", rotary_sin, "a tensor where rotary_cos is one, and None where it is None", example)
    longest = q.shape[1] if cu_seqlens is None else 2  # which is not known
    same = starts is None and (cu_seqlens is not None or k.shape[1] == q.shape[1])
    if same and (together or longest == 1):
        return q, k, rotary_cos, rotary_sin
    starts = lengths if starts is None else starts
    positions_q = token_positions(q, starts, cu_seqlens, advance=together)
    positions_k = token_positions(k, starts, cu_seqlens, advance=True)
    if q.device.type == "cpu" and positions_k.numel() and int(positions_k.max()) >= rotary_cos.shape[0]:
        accepted = f"at least {int(positions_k.max()) + 1} positions [S_rotary, rotary_dim / 2]"
        refuse("rotary_cos", rotary_cos, accepted, example)
    tables = rotary_cos, rotary_sin
    return rotate(q, *tables, positions_q, interleaved), rotate(k, *tables, positions_k, interleaved), None, None


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
