"""Weights of a call with the sign of dropout, FlashAttention-2's `S_dmask`. For tests: memory is O(S²).

A fused kernel never has these weights. They are its results for values that are columns of the identity: once without
dropout, and once with the seed of the call, which gives 0 where a weight was dropped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...api.varlen import attention_varlen
from ..positions import places

COLUMNS = 256  # keys at a time, which are the features of the values


def new_seed(q: Tensor) -> Tensor:
    """A seed from PyTorch's generator of q's device, so that `torch.manual_seed` reproduces the mask."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


@torch.no_grad()
def dense_probabilities(q: Tensor, k: Tensor, settings: dict[str, Any]) -> Tensor:
    """Compute `S_dmask [B, Hq, Sq, Sk]` of `q [B, Hq, Sq, D]` and `k [B, Hkv, Sk, D]`, for the keywords of the call."""

    def attend(columns: Tensor, **other: Any) -> Tensor:
        return attention(q, k, columns.expand(*k.shape[:2], -1, -1), **settings | other)

    positions = torch.arange(k.shape[2], device=q.device)
    return signed(attend, positions, k.shape[2], q.dtype)


@torch.no_grad()
def packed_probabilities(q: Tensor, k: Tensor, settings: dict[str, Any]) -> Tensor:
    """Compute `S_dmask [B, Hq, max_seqlen_q, max_seqlen_k]` of packed `q [Tq, Hq, D]` and `k [Tk, Hkv, D]`."""

    def attend(columns: Tensor, **other: Any) -> Tensor:
        return attention_varlen(q, k, columns[:, None].expand(-1, k.shape[1], -1), **settings | other)

    cu_seqlens_q, longest_q, longest_k = (settings[name] for name in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k"))
    _, key_positions = places(settings["cu_seqlens_k"], k.shape[0])
    weights = signed(attend, key_positions, longest_k, q.dtype)  # [Tq, Hq, max_seqlen_k]
    tokens = int(cu_seqlens_q[-1])
    sequences, rows = places(cu_seqlens_q, tokens)
    result = q.new_zeros((len(cu_seqlens_q) - 1, q.shape[1], longest_q, longest_k))
    result[sequences, :, rows] = weights[:tokens]
    return result


def signed(attend: Callable[..., Tensor], positions: Tensor, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    """Weights `[..., seqlen_k]`, negative where dropout took them. `attend` gives the attention over values `[S, C]`
    whose row is 1 in the column of its position.
    """
    parts = []
    for start in range(0, max(seqlen_k, 1), COLUMNS):
        columns = torch.arange(start, min(start + COLUMNS, max(seqlen_k, 1)), device=positions.device)
        values = (positions[:, None] == columns).to(dtype)
        weights = attend(values, dropout_p=0.0)
        parts.append(torch.where(attend(values) == 0, -weights, weights))
    return torch.cat(parts, dim=-1)[..., :seqlen_k]
