"""Mask functions for tests, as `score_functions`: each feature that generated code must get right, in a few operations.

All take `(b, h, q_idx, k_idx, *tensors)` as described in `case.MaskFunction`. They compare integers, or reals that are
exact in every dtype: rounding decides about no pair.
"""

import torch
from torch import Tensor

from .case import MaskFunction

MAX_DISTANCE = 8
PERIOD = 24


def causal_by_head(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """Another diagonal for each head. Some rows see nothing."""
    return (k_idx <= q_idx - 3 + 2 * h) & (q_idx % 7 != 5)


def first_keys(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, lengths: Tensor) -> Tensor:
    """A number of keys for each sequence, `[B]`; it may be 0, or more than there are."""
    return k_idx < lengths[b]


def documents(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, ids: Tensor) -> Tensor:
    """Equal ids, `[PERIOD]`: each PERIOD-th position has the same."""
    return ids[q_idx % PERIOD] == ids[k_idx % PERIOD]


def allowed_distances(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, allowed: Tensor) -> Tensor:
    """A condition `[H, 17]` for each head and clipped distance."""
    return allowed[h, (q_idx - k_idx).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE]


def reach(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, reach: Tensor) -> Tensor:
    """Distances below a number `[H]` that is no integer, and every fourth key."""
    return ((q_idx - k_idx).abs() < reach[h]) | (k_idx // 4 * 4 == k_idx)


def of_heads(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """All pairs of odd heads, and of others those whose positions differ in two bits."""
    return (h % 2 == 1) | (((q_idx ^ k_idx) & 3) != 0)


def random_mask_function(
    choice: int, batch: int, num_heads_q: int, device: torch.device | str, generator: torch.Generator
) -> MaskFunction:
    """One of the functions above, by any integer, with fresh tensors."""

    def randint(end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, end, shape, generator=generator).to(dtype)

    choices = (
        (causal_by_head, ()),
        (first_keys, (randint(120, batch, dtype=torch.int32),)),
        (documents, (randint(6, PERIOD),)),
        (allowed_distances, (randint(4, num_heads_q, 2 * MAX_DISTANCE + 1) > 0,)),
        (reach, (randint(60, num_heads_q) + 0.5,)),
        (of_heads, ()),
    )
    fn, tensors = choices[choice % len(choices)]
    return MaskFunction(fn, tuple(tensor.to(device) for tensor in tensors))
