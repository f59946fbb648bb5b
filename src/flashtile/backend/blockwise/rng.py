"""Counter-based dropout: any tile of the mask can be computed alone, in any order, on any device.

Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Words are unsigned
32-bit numbers in int64 tensors, because torch has no unsigned arithmetic. A product of two words wraps modulo 2**64,
which preserves its 64 bits.
"""

import torch
from torch import Tensor

from ..scalars import keep_scale, threshold

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
WORD = 0xFFFFFFFF
KEYS_PER_COUNTER = 8  # four words of two 16-bit halves


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter. All arguments are int64 with values below 2**32, and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        high_0, low_0 = (product_0 >> 32) & WORD, product_0 & WORD
        high_1, low_1 = (product_1 >> 32) & WORD, product_1 & WORD
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def keep_factor(
    seed: Tensor,  # int64, one element
    dropout_p: float,
    sequence_head: Tensor,  # b * num_heads_q + h, [B, H, 1, 1]
    rows: Tensor,  # [M, 1]
    first_key: int,
    num_keys: int,
    dtype: torch.dtype,
) -> Tensor:  # [B, H, M, num_keys]
    """The dropout factor of each pair: 0 if it is dropped, else `65536 / (65536 - threshold)`."""
    first_group = first_key // KEYS_PER_COUNTER
    last_group = -(-(first_key + num_keys) // KEYS_PER_COUNTER)
    groups = torch.arange(first_group, last_group, device=seed.device)  # [G]
    seed = seed.reshape(())
    key = (seed & WORD, (seed >> 32) & WORD)
    counter = (groups & WORD, rows & WORD, sequence_head & WORD, torch.zeros_like(groups))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)  # [B, H, M, G, 4]
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)  # [B, H, M, G, 4, 2], low half first
    halves = halves.flatten(-3)  # [B, H, M, 8 G]
    skip = first_key - first_group * KEYS_PER_COUNTER
    limit = threshold(dropout_p)
    kept = halves[..., skip : skip + num_keys] >= limit
    return kept.to(dtype) * keep_scale(limit)
