"""Score modifications for tests: each feature that a backend's generated code must get right, in a few operations.

All take `(score, b, h, q_idx, k_idx, *tensors)` as described in `case.ScoreFunction`. Each reads at most one
element of a tensor for a score, as the oracle's bounds assume.
"""

import torch
from torch import Tensor

from .case import ScoreFunction

MAX_DISTANCE = 8
BOUND = 20.0


def relative_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, weight: Tensor) -> Tensor:
    """A learned slope [H] for each head, signed distance."""
    return score + weight[h] * (q_idx - k_idx)


def soft_bound(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return BOUND * torch.tanh(score / BOUND)


def distance_table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """A learned bias [H, 17] for each head and clipped distance, as in T5."""
    return score + table[h, (q_idx - k_idx).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE]


def temperature(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, factor: Tensor) -> Tensor:
    """A learned factor [H] for each head."""
    return score * factor[h]


def batch_offset_where_even(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, offset: Tensor
) -> Tensor:
    """A learned offset [B, H] on pairs of equal parity: uses every index, and a condition."""
    return torch.where((q_idx + k_idx) % 2 == 0, score + offset[b, h], score)


def tempered_table(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, factor: Tensor, table: Tensor
) -> Tensor:
    """Two tensors [H] and [H, 17]; a function may take any number of them."""
    return distance_table(temperature(score, b, h, q_idx, k_idx, factor), b, h, q_idx, k_idx, table)


def random_score_function(
    choice: int,
    batch: int,
    num_heads_q: int,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: torch.Generator,
) -> ScoreFunction:
    """One of the functions above, by any integer, with fresh tensors."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    factor, table = 1 + 0.25 * randn(num_heads_q), randn(num_heads_q, 2 * MAX_DISTANCE + 1)
    choices = (
        (relative_position, (0.05 * randn(num_heads_q),)),
        (soft_bound, ()),
        (distance_table, (table,)),
        (temperature, (factor,)),
        (batch_offset_where_even, (randn(batch, num_heads_q),)),
        (tempered_table, (factor, table)),
    )
    fn, tensors = choices[choice % len(choices)]
    return ScoreFunction(fn, tuple(tensor.to(dtype).to(device) for tensor in tensors))
