"""The interface of FlashAttention-4, module `flash_attn.cute`, by flashtile.

Names, order and defaults of arguments, shapes and results are the original's. `qv`, gathered keys, CuTe functions
and block sparsity are declined. Settings of its scheduler are accepted and ignored.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..api.attention import ExactWindow, attention
from ..api.varlen import attention_varlen
from .arguments import WindowSize, decline, keywords, longest_of, refuse, sides_of, splits_of
from .combine import flash_attn_combine as combine_parts

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

DENSE = "flash_attn_func(q, k, v, causal=True, window_size=(127, None))"
PACKED = "flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)"


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
        window_size: `(left, right)`, `None` is unlimited. A negative side moves the window away from the row's own key;
            a pair with a sum below 0 is unlimited.
        learnable_sink: `[Hq]`, floating-point; `exp(sink)` joins each row's denominator. It has a gradient.
        softcap: scores become `softcap * tanh(score / softcap)` if it is above 0.
        deterministic: the same bits for the same call; `False` follows `torch.use_deterministic_algorithms`.
        return_lse: also compute lse, which is differentiable.
        num_splits: parts that the keys are split into; up to 1 lets the backend choose.
        pack_gqa: accepted and ignored: it tunes the original's kernels.

    All others must have their defaults.

    Returns:
        `(out [B, Sq, Hq, Dv], lse)`: lse `[B, Hq, Sq]`, -inf for rows that see nothing; `None` without `return_lse`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    decline_others(
        DENSE, qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
        block_sparse_tensors, block_sparse_tensors_bwd,
    )  # fmt: skip
    window = window_from(window_size, causal, DENSE)
    settings = keywords(0.0, softmax_scale, causal, window, softcap, None, deterministic)
    settings["num_splits"] = splits_of(num_splits)
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
        q: queries `[Tq, Hq, D]`, or without `cu_seqlens_q` `[B, Sq, Hq, D]`.
        k: keys `[Tk, Hkv, D]`, or without `cu_seqlens_k` `[B, Sk, Hkv, D]`, or with `page_table` pages `[num_pages,
            page_size, Hkv, D]`.
        v: the same with Dv.
        cu_seqlens_q: int32 or int64 `[B + 1]`, offsets of the sequences in packed q.
        cu_seqlens_k: the same for k.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence's; `None` reads nothing back.
        seqused_q: integers `[B]`, queries of each sequence that exist: rows past them give 0, with lse -inf.
        seqused_k: the same for keys; by default all of each sequence, or of its pages.
        page_table: integers `[B, max_pages]`, without `cu_seqlens_k`.

    The other arguments: as in `flash_attn_func`. `min_seqlen_k` must be `None`. `scheduler_metadata`,
    `seqlen_k_per_split` and `disable_scheduler_metadata`, which tune the original, are accepted and ignored.

    Returns:
        `(out, lse)`: out in the shape of q with Dv, lse `[Hq, Tq]` or `[B, Hq, Sq]`; `None` without `return_lse`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    decline_others(
        PACKED, qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
        block_sparse_tensors, min_seqlen_k=min_seqlen_k,
    )  # fmt: skip
    window = window_from(window_size, causal, PACKED)
    settings = keywords(0.0, softmax_scale, causal, window, softcap, None, deterministic)
    dense = None
    if cu_seqlens_q is None:
        (q, cu_seqlens_q), dense = packed(q, "q"), q.shape[:2]
        max_seqlen_q = dense[1] if max_seqlen_q is None else max_seqlen_q
    if page_table is None and cu_seqlens_k is None:
        if v.shape[:2] != k.shape[:2]:
            refuse("v", v, f"[B, Sk, Hkv, Dv] with k's B and Sk, {list(k.shape[:2])}", PACKED)
        max_seqlen_k = k.shape[1] if max_seqlen_k is None else max_seqlen_k
        (k, cu_seqlens_k), (v, _) = packed(k, "k"), packed(v, "v")
    elif page_table is not None and cu_seqlens_k is None and seqused_k is None:
        seqused_k = page_table.new_full(page_table.shape[:1], page_table.shape[1] * k.shape[1])
    settings["max_seqlen_q"], settings["max_seqlen_k"] = longest_of(max_seqlen_q), longest_of(max_seqlen_k)
    settings["seqused_q"], settings["seqused_k"], settings["page_table"] = seqused_q, seqused_k, page_table
    settings["num_splits"] = splits_of(num_splits)
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **settings, sinks=learnable_sink, return_lse=True)
    if dense is not None:
        out, lse = out.unflatten(0, dense), lse.unflatten(1, dense).transpose(0, 1)
    return out, lse if return_lse else None


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The attention over all keys, as `flashtile.compat.flash_attn_3.flash_attn_combine`; also of packed tensors,
    `out_partial [num_splits, T, H, D]` and `lse_partial [num_splits, T, H]`, whatever `cu_seqlens` is.

    `seqused` and `virtual_batch_idx` must be `None`.

    Returns:
        `(out, lse)`, of the shapes of a part; lse is `None` without `return_lse`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    decline("flash_attn_combine(out_partial, lse_partial)", seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    if out_partial.dim() != 4:
        result, lse = combine_parts(out_partial, lse_partial, out, out_dtype)
        return result, lse if return_lse else None
    as_batch = None if out is None else out.unsqueeze(0)
    result, lse = combine_parts(out_partial.unsqueeze(1), lse_partial.unsqueeze(1), as_batch, out_dtype)
    return result.squeeze(0) if out is None else out, lse.squeeze(0) if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> None:
    """A `scheduler_metadata` for `flash_attn_varlen_func`, which ignores it: `None`."""


def decline_others(
    example: str,
    qv: Any,
    gather_kv_indices: Any,
    score_mod: Any,
    score_mod_bwd: Any,
    mask_mod: Any,
    aux_tensors: Any,
    aux_scalars: Any,
    block_sparse_tensors: Any,
    block_sparse_tensors_bwd: Any = None,
    min_seqlen_k: Any = None,
) -> None:
    """Refuse what has no equivalent. Comparing identities takes less time than `decline`."""
    if not (
        qv is gather_kv_indices is score_mod is score_mod_bwd is mask_mod is aux_tensors is aux_scalars
        is block_sparse_tensors is block_sparse_tensors_bwd is min_seqlen_k is None
    ):  # fmt: skip
        decline(
            example, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
            mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
            block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
            min_seqlen_k=min_seqlen_k,
        )  # fmt: skip


def packed(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`x [B, S, H, D]` as packed sequences of one length, and their offsets. Copied only if no view has this shape."""
    if x.dim() != 4:
        refuse(name, x, f"[B, S, H, D] without cu_seqlens_{'q' if name == 'q' else 'k'}, [T, H, D] with it", PACKED)
    return x.flatten(0, 1), torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def window_from(window_size: WindowSize, causal: bool, example: str) -> ExactWindow | None:
    """Convert FlashAttention-4's `window_size` to `window`. With `causal` its right side is 0, whatever is given."""
    left, right = sides_of(window_size, "(left, right) of integers, where None is unlimited", example)
    right = 0 if causal else right
    if left is None and (causal or right is None):
        return None
    if left is not None and right is not None and left + right < 0:
        return None
    return ExactWindow(left, right)
