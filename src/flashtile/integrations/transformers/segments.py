"""Tokens that see only their own segment: padding, packed sequences and chunks as one packed call.

A batch of rows becomes one sequence of tokens, cut wherever the visible keys change as a whole. So no mask is read, and
fused kernels without a `mask` take the call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .patterns import Pattern


class Segments(NamedTuple):
    """The segments of `[B, S]` tokens: consecutive ones, in the order of memory.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`, where segments begin.
        seqused_k: int32 `[N]`, their keys, or 0 of padding; `None` without padding.
        longest_q, longest_k: the longest segment's length.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    longest_q: int
    longest_k: int


def segments_of(pattern: Pattern, batch: int, length: int, device: torch.device) -> Segments | None:
    """The segments of `length` queries and as many keys, at the same positions; `None` if there are none.

    Values are read back: the number of segments decides a shape. There are none where visible keys are not consecutive,
    and none of padding under a window that is not causal, since the window of a packed call is aligned to the last
    visible key.

    A causal mask is one of self-attention, so padding is cut out of queries and keys, and its queries see no key. Other
    masks may belong to cross-attention, where the query at the place of a padded key is a token as others: padding is
    cut out of the keys alone.
    """
    causal = pattern.right == 0
    if pattern.padding is not None and not causal and (pattern.left, pattern.right) != (None, None):
        return None
    position = torch.arange(length, device=device).expand(batch, length)
    features, in_order = [torch.arange(batch, device=device)[:, None].expand(batch, length)], []
    if pattern.chunk is not None:
        size, begin = pattern.chunk
        features.append((position - begin.to(device)[:, None]) // size)
    if pattern.packed is not None:
        features.append(pattern.packed.to(device).expand(batch, length))
        in_order.append((features[-1].diff(dim=1) >= 0).all())
    groups = begins_of(features)
    if pattern.padding is not None:
        features.append(pattern.padding[:, :length])
        begins = features[-1].to(torch.int8).diff(dim=1, prepend=features[-1].new_zeros(batch, 1).to(torch.int8)) == 1
        in_order.append((begins.sum(1) <= 1).all())
    if not torch.stack(in_order).all() if in_order else False:
        return None
    offsets = torch.cat([begins_of(features), groups.new_full((1,), batch * length)])
    lengths = offsets.diff()
    if pattern.padding is None:
        longest = int(lengths.max())
        return Segments(offsets.int(), offsets.int(), None, longest, longest)
    visible = features[-1].flatten()[offsets[:-1]]
    used = torch.where(visible, lengths, 0).int()
    queries = lengths if causal else queries_of(groups, offsets, visible)
    cu_seqlens_q = torch.cat([queries.new_zeros(1), queries.cumsum(0)])
    longest_q, longest_k = torch.stack([queries.max(), lengths.max()]).tolist()
    return Segments(cu_seqlens_q.int(), offsets.int(), used, longest_q, longest_k)


def begins_of(features: list[Tensor]) -> Tensor:
    """Where one of the features `[B, S]` differs from the token before: int64 `[N]`, 0 first."""
    tokens = torch.stack([x.flatten().long() for x in features])
    begins = (tokens.diff(dim=1) != 0).any(0).nonzero().flatten() + 1
    return torch.cat([begins.new_zeros(1), begins])


def queries_of(groups: Tensor, offsets: Tensor, visible: Tensor) -> Tensor:
    """The queries of each segment, int64 `[N]`: all of a group belong to its visible segment, or to its first one.

    Args:
        groups: int64 `[M]`, where the tokens begin that see each other but for padding.
        offsets: int64 `[N + 1]`, where segments begin; each begin of a group is one.
        visible: bool `[N]`, whether a segment's keys are visible; one of a group at most.
    """
    group = torch.searchsorted(groups, offsets[:-1], right=True) - 1
    first = torch.searchsorted(offsets[:-1], groups)
    chosen = first.scatter(0, group[visible], visible.nonzero().flatten())
    sizes = torch.cat([groups, offsets[-1:]]).diff()
    return torch.zeros_like(offsets[:-1]).scatter(0, chosen, sizes)
