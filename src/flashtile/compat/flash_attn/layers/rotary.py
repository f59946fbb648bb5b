"""`flash_attn.layers.rotary`: rotary position embeddings (Su et al., "RoFormer", 2021), in torch operations."""

import torch
from torch import Tensor

from ...arguments import refuse
from ...positions import rotate, token_positions

EXAMPLE = "apply_rotary_emb(x, cos, sin)  # x [B, S, H, D], cos and sin [S_rotary, rotary_dim / 2]"

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first `rotary_dim` features of x by the angles of its positions. Differentiable.

    Args:
        x: `[B, S, H, D]`, or packed `[T, H, D]` with `cu_seqlens`; floating-point.
        cos: `[S_rotary, rotary_dim / 2]`, `rotary_dim <= D`.
        sin: the same.
        interleaved: pairs are features `2n` and `2n + 1`; if False, `n` and `n + rotary_dim / 2`.
        inplace: write into x and return it.
        seqlen_offsets: position of each sequence's first token, an int or integers `[B]`. Positions of a tensor that
            lie behind the tables are not rotated.
        cu_seqlens: integers `[B + 1]`, offsets of packed sequences; needs `max_seqlen`.
        max_seqlen: an int, the longest packed sequence.

    Returns:
        x rotated, computed in float32 (float64 for float64) and rounded to x's dtype.

    Raises:
        ArgumentError: the tables are too short or too wide, or `max_seqlen` is missing.
    """
    if cos.dim() != 2 or sin.shape != cos.shape or 2 * cos.shape[1] > x.shape[-1]:
        refuse("cos", cos, f"[S_rotary, rotary_dim / 2] as sin has, rotary_dim at most {x.shape[-1]}", EXAMPLE)
    if cu_seqlens is not None and max_seqlen is None:
        refuse("max_seqlen", None, "an int with cu_seqlens", EXAMPLE)
    seqlen = x.shape[1] if max_seqlen is None or cu_seqlens is None else max_seqlen
    last = seqlen if isinstance(seqlen_offsets, Tensor) else seqlen + seqlen_offsets
    if last > cos.shape[0]:
        refuse("cos", cos, f"at least {last} positions [S_rotary, rotary_dim / 2]", EXAMPLE)
    if not isinstance(seqlen_offsets, Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        seqlen_offsets = torch.full((batch,), seqlen_offsets, device=x.device)
    rotated = rotate(x, cos, sin, token_positions(x, seqlen_offsets, cu_seqlens), interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of `qkv [B, S, 3, H, D]` or `[B, S, num_heads_q + 2 * Hkv, D]` in place, and return it.

    Args:
        qkv: queries, keys and values in one tensor.
        cos, sin: tables of `apply_rotary_emb`.
        cos_k, sin_k: tables for k; those of q if `None`.
        interleaved: as in `apply_rotary_emb`.
        seqlen_offsets: as in `apply_rotary_emb`.
        num_heads_q: query heads, for four dimensions.

    Raises:
        ArgumentError: `num_heads_q` is missing or not such a number, or the tables do not fit.
    """
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None or num_heads_q > qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            accepted = f"an int from 0 such that {qkv.shape[2]} heads are num_heads_q + 2 * Hkv"
            refuse("num_heads_q", num_heads_q, accepted, "apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=8)")
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads]
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(q, cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of `kv [B, S, 2, H, D]` in place, and return it."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return kv
