"""FlashAttention-2's forward and backward passes by themselves, which rings of ranks and other libraries call.

The names are private in `flash_attn`, and their arguments follow version 2.8. Nothing is differentiable here:
whoever calls a pass saves its results for the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...api.gradients import gradients
from ...api.varlen import attention_varlen
from ..arguments import above, infinite_lse, keywords, longest_of, refuse, window_of
from .probabilities import dense_probabilities, new_seed, packed_probabilities

Results = tuple[Tensor, Tensor, Tensor, Tensor]
FORWARD = "_flash_attn_forward(q, k, v, 0.0, scale, True, -1, -1, 0.0, None, False)"
PACKED_FORWARD = "_flash_attn_varlen_forward(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, scale, True)"
BACKWARD = (
    "_flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, 0.0, scale, True, -1, -1, 0.0, None, False)"
)


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Results:
    """The forward pass of `flash_attn_func`.

    Returns:
        `(out [B, Sq, Hq, Dv], softmax_lse [B, Hq, Sq], S_dmask, rng_state)`: `S_dmask` is empty without dropout and
        `return_softmax`; `rng_state`, int64 `[2]`, has the seed of the dropout for the backward pass.
    """
    window = window_of((window_size_left, window_size_right), FORWARD)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    settings["dropout_seed"], rng_state = seeds(dropout_p, q)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attention(q, k, v, **settings, return_lse=True)
    probabilities = dense_probabilities(q, k, settings) if return_softmax and dropout_p > 0 else q.new_empty(0)
    return out.transpose(1, 2), infinite_lse(lse), probabilities, rng_state


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Results:
    """The forward pass of `flash_attn_varlen_func`. `seqused_k [B]` are the keys of each sequence that exist;
    `zero_tensors` changes nothing: rows of no sequence are always 0. `leftpad_k` must be `None`.

    Returns:
        As `_flash_attn_forward`, with `out [Tq, Hq, Dv]` and `softmax_lse [Hq, Tq]`.
    """
    if leftpad_k is not None:
        refuse("leftpad_k", leftpad_k, "None: begin each sequence of cu_seqlens_k at its first key", PACKED_FORWARD)
    window = window_of((window_size_left, window_size_right), FORWARD)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    settings |= offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    settings["page_table"], settings["seqused_k"] = block_table, seqused_k
    settings["num_splits"] = above(0, num_splits)
    settings["dropout_seed"], rng_state = seeds(dropout_p, q)
    wanted = return_softmax and dropout_p > 0
    if wanted and (block_table is not None or seqused_k is not None):
        refuse("return_softmax", True, "False with `block_table` or `seqused_k`", PACKED_FORWARD)
    out, lse = attention_varlen(q, k, v, **settings, return_lse=True)
    probabilities = packed_probabilities(q, k, settings) if wanted else q.new_empty(0)
    return out, infinite_lse(lse), probabilities, rng_state


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The backward pass of `flash_attn_func`. Its gradients are written into `dq`, `dk` and `dv`, where they are given.

    `out` and `softmax_lse` may be those over more keys than k has, as in a ring of ranks.

    Returns:
        The row sums of `out * dout`, `[B, Hq, Sq]`; the original rounds Sq up to a multiple of 128.
    """
    window = window_of((window_size_left, window_size_right), FORWARD)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    settings["dropout_seed"] = seed_of(dropout_p, rng_state)
    q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    found = gradients(q, k, v, out, softmax_lse, dout, **settings)
    store((dq, dk, dv), [x.transpose(1, 2) for x in found])
    return row_sums(out, dout, softmax_lse.dtype)


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The backward pass of `flash_attn_varlen_func`, as `_flash_attn_backward`.

    Returns:
        The row sums of `out * dout`, `[Hq, Tq]`; the original pads each sequence.
    """
    window = window_of((window_size_left, window_size_right), FORWARD)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    settings |= offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    settings["dropout_seed"] = seed_of(dropout_p, rng_state)
    store((dq, dk, dv), gradients(q, k, v, out, softmax_lse, dout, **settings))
    return row_sums(out, dout, softmax_lse.dtype).T


def offsets_of(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor
) -> dict[str, Any]:
    """Keywords of `flashtile.attention_varlen` for sequences."""
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": longest_of(max_seqlen_q),
        "max_seqlen_k": longest_of(max_seqlen_k),
    }


def seeds(dropout_p: float, q: Tensor) -> tuple[Tensor | None, Tensor]:
    """The seed of a call's dropout, and the `rng_state` that has it: int64 `[2]`, as the original's."""
    if dropout_p > 0:
        seed = new_seed(q)
        return seed, torch.cat((seed, torch.zeros_like(seed)))
    return None, torch.zeros(2, dtype=torch.int64, device=q.device)


def seed_of(dropout_p: float, rng_state: Tensor | None) -> Tensor | None:
    if dropout_p > 0 and rng_state is None:
        refuse("rng_state", None, "the fourth result of the forward pass, with dropout", BACKWARD)
    return rng_state[:1] if dropout_p > 0 and rng_state is not None else None


def store(places: tuple[Tensor | None, ...], found: Sequence[Tensor]) -> None:
    for place, gradient in zip(places, found, strict=True):
        if place is not None:
            place.copy_(gradient)


def row_sums(out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
    return (out.to(dtype) * dout).sum(-1)
