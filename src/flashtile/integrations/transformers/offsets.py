"""Packed sequences by their offsets, `cu_seq_lens_q` and `cu_seq_lens_k`, which data collators make for FlashAttention.

Masks of transformers hold packed sequences that it finds in `position_ids`, but it does not look for them where there
is a cache, and a model makes one by default.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.varlen import attention_varlen
from .mask import TileMask


class Offsets(NamedTuple):
    """Offsets of the sequences in `[B * S]` tokens, int32 `[N + 1]`, and the longest ones' lengths if they are ints."""

    queries: Tensor
    keys: Tensor
    longest_query: Any
    longest_key: Any

    def same_sequence(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool `[B, 1, Sq, Sk]`: whether a key is of the query's sequence."""
        rows, columns = (numbers(*x) for x in ((self.queries, query), (self.keys, key)))
        return rows[:, None, :, None] == columns[:, None, None, :]

    def restrict(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """A dense mask that shows keys of the query's sequence alone."""
        same = self.same_sequence(query, key)
        mask = mask.dense() if isinstance(mask, TileMask) else mask
        if mask is None or mask.dtype == torch.bool:
            return same if mask is None else mask & same
        return mask.masked_fill(~same, -torch.inf)


def numbers(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """The number of the sequence of each token of `x [B, H, S, D]`: `[B, S]`."""
    tokens = torch.arange(x.shape[0] * x.shape[2], device=x.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(x.shape[0], x.shape[2])


def is_packed(mask: Any) -> bool:
    """Whether a mask has packed sequences of its own."""
    return isinstance(mask, TileMask) and mask.pattern is not None and mask.pattern.packed is not None


def window_within(mask: Any) -> tuple[int | None, int | None] | None:
    """The window of a mask of self-attention that is nothing else; `None` of others."""
    if mask is None:
        return None, None
    if not isinstance(mask, TileMask) or mask.pattern is None or mask.shape[2] != mask.shape[3]:
        return None
    left, right, *others = mask.pattern
    return None if any(x is not None for x in others) or mask.q_offset != mask.kv_offset else (left, right)


def attend_packed(query: Tensor, key: Tensor, value: Tensor, offsets: Offsets, **settings: Any) -> Tensor:
    """Attention over `[B * S]` tokens, one sequence after another: `[B, H, S, Dv]`."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    longest = {"max_seqlen_q": offsets.longest_query, "max_seqlen_k": offsets.longest_key}
    longest = {name: n for name, n in longest.items() if not isinstance(n, Tensor)}  # which would be read back
    out = attention_varlen(q, k, v, offsets.queries, offsets.keys, **longest, **settings)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)
