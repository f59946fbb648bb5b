"""The interface of FlashAttention-4, module `flash_attn.cute`, by flashtile.

Names, order and defaults of arguments, shapes and results are the original's. `qv`, gathered keys, CuTe functions,
block sparsity and its scheduler's settings are declined.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..api.attention import attention, attention_varlen
from .arguments import decline, keywords, refuse

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

DENSE = "flash_attn_func(q, k, v, causal=True, window_size=(127, None))"
PACKED = "flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)"
WindowSize = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over `[B, S, H, D]` with FlashAttention-4's arguments; tensors are viewed, never copied.

    Args:
        q: queries `[B, Sq, Hq, D]`, on any device, of every dtype and head dimension of `flashtile.attention`.
        k: keys `[B, Sk, Hkv, D]`; Hq is a multiple of Hkv.
        v: values `[B, Sk, Hkv, Dv]`.
        softmax_scale: factor of the products; `D ** -0.5` if `None`.
        causal: key j is visible iff `j <= i + Sk - Sq`.
        window_size: `(left, right)`, `None` is unlimited; negative sides are declined, but for `(-1, -1)`.
        learnable_sink: `[Hq]`, q's dtype or float32; `exp(sink)` joins each row's denominator. It has a gradient.
        softcap: scores become `softcap * tanh(score / softcap)` if it is above 0.
        deterministic: the same bits for the same call; `False` follows `torch.use_deterministic_algorithms`.
        return_lse: also compute lse, which is differentiable.

    All others must have their defaults, or 0 for `num_splits`.

    Returns:
        `(out [B, Sq, Hq, Dv], lse)`: lse `[B, Hq, Sq]`, -inf for rows that see nothing; `None` without `return_lse`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    if not (
        qv
        is gather_kv_indices
        is pack_gqa
        is score_mod
        is score_mod_bwd
        is mask_mod
        is aux_tensors
        is aux_scalars
        is block_sparse_tensors
        is block_sparse_tensors_bwd
        is None
        and num_splits == 1
    ):  # which takes less time than the answer
        decline(
            DENSE,
            qv=qv,
            gather_kv_indices=gather_kv_indices,
            num_splits=None if num_splits == 1 else num_splits,
            pack_gqa=pack_gqa,
            score_mod=score_mod,
            score_mod_bwd=score_mod_bwd,
            mask_mod=mask_mod,
            aux_tensors=aux_tensors,
            aux_scalars=aux_scalars,
            block_sparse_tensors=block_sparse_tensors,
            block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        )
    settings = keywords(0.0, softmax_scale, causal, window_from(window_size, DENSE), softcap, None, deterministic)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attention(q, k, v, **settings, sinks=learnable_sink, return_lse=True)
    return out.transpose(1, 2), lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over packed sequences with FlashAttention-4's arguments.

    Args:
        q: queries `[Tq, Hq, D]`; `[B, Sq, Hq, D]`, which the original takes without `cu_seqlens_q`, is declined.
        k: keys `[Tk, Hkv, D]`, or with `page_table` pages `[num_pages, page_size, Hkv, D]`.
        v: the same with Dv.
        cu_seqlens_q: int32 or int64 `[B + 1]`, offsets of the sequences in q.
        cu_seqlens_k: the same for k; may be `None` if both `page_table` and `seqused_k` are given.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence's; `None` reads nothing back.
        seqused_k: integers `[B]`, keys of each sequence that exist.
        page_table: integers `[B, max_pages]`.

    The other arguments are those of `flash_attn_func`. `seqused_q` and `min_seqlen_k` must be `None`.

    Returns:
        `(out [Tq, Hq, Dv], lse)`: lse `[Hq, Tq]`; `None` without `return_lse`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    if not (
        qv
        is min_seqlen_k
        is seqused_q
        is gather_kv_indices
        is pack_gqa
        is score_mod
        is score_mod_bwd
        is mask_mod
        is block_sparse_tensors
        is aux_tensors
        is aux_scalars
        is scheduler_metadata
        is seqlen_k_per_split
        is None
        and num_splits == 1
        and disable_scheduler_metadata is False
    ):  # which takes less time than the answer
        decline(
            PACKED,
            qv=qv,
            min_seqlen_k=min_seqlen_k,
            seqused_q=seqused_q,
            gather_kv_indices=gather_kv_indices,
            num_splits=None if num_splits == 1 else num_splits,
            pack_gqa=pack_gqa,
            score_mod=score_mod,
            score_mod_bwd=score_mod_bwd,
            mask_mod=mask_mod,
            block_sparse_tensors=block_sparse_tensors,
            aux_tensors=aux_tensors,
            aux_scalars=aux_scalars,
            scheduler_metadata=scheduler_metadata,
            seqlen_k_per_split=seqlen_k_per_split,
            disable_scheduler_metadata=disable_scheduler_metadata,
        )
    if cu_seqlens_q is None:
        accepted = "offsets [B + 1] of packed q; for q [B, Sq, Hq, D], flash_attn_func, or flashtile's KV cache"
        refuse("cu_seqlens_q", None, accepted, PACKED)
    settings = keywords(0.0, softmax_scale, causal, window_from(window_size, PACKED), softcap, None, deterministic)
    settings["max_seqlen_q"], settings["max_seqlen_k"] = max_seqlen_q, max_seqlen_k
    settings["seqused_k"], settings["page_table"] = seqused_k, page_table
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **settings, sinks=learnable_sink, return_lse=True)
    return out, lse if return_lse else None


def window_from(window_size: WindowSize, example: str) -> WindowSize | None:
    """Convert FlashAttention-4's `window_size` to `window`. Negative sides, which shift a window, are declined."""
    if window_size in ((None, None), (-1, -1)):
        return None
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not pair or any(n is not None and n < 0 for n in window_size):
        refuse("window_size", window_size, "(left, right) of integers from 0, where None is unlimited", example)
    return window_size[0], window_size[1]
