"""The dropout mask of docs/contract.md, section "Dropout": Philox 4x32 with 7 rounds, in numpy.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) define the generator and
publish known-answer vectors. Every 32-bit word is kept in a uint64 so that the 32 x 32 -> 64 bit products are
exact.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
HALVES_PER_COUNTER = 8  # four 32-bit words, two 16-bit halves each
HALF_RANGE = 1 << 16

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter; the counter's words broadcast against one another."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> WORD_BITS) ^ c1 ^ np.uint64(k0),
            product1 & LOW_WORD,
            (product0 >> WORD_BITS) ^ c3 ^ np.uint64(k1),
            product0 & LOW_WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_halves(seed: int, heads: NDArray[np.uint64], seqlen_q: int, seqlen_k: int) -> NDArray[np.uint64]:
    """16-bit halves [H, Sq, Sk] for the global head numbers `heads` = b * num_heads_q + h."""
    counters_per_row = -(-seqlen_k // HALVES_PER_COUNTER)
    counter = (
        np.arange(counters_per_row, dtype=np.uint64)[None, None, :],  # j // 8
        np.arange(seqlen_q, dtype=np.uint64)[None, :, None],  # i
        heads.astype(np.uint64)[:, None, None],  # b * num_heads_q + h
        np.zeros((1, 1, 1), dtype=np.uint64),
    )
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    halves = [half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]  # low half first
    shape = (len(heads), seqlen_q, counters_per_row, HALVES_PER_COUNTER)
    by_counter = np.stack([np.broadcast_to(half, shape[:3]) for half in halves], axis=-1)  # [H, Sq, counters, 8]
    return by_counter.reshape(len(heads), seqlen_q, counters_per_row * HALVES_PER_COUNTER)[:, :, :seqlen_k]


def keep_factors(
    dropout_p: float, seed: int, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int
) -> NDArray[np.float64]:
    """Dropout's factor for each probability of sequence `batch`, float64 [Hq, Sq, Sk]: 0 or 65536 / (65536 - t)."""
    threshold = round(dropout_p * HALF_RANGE)
    if threshold >= HALF_RANGE:  # rounds to "drop everything": no half reaches the threshold
        return np.zeros((num_heads_q, seqlen_q, seqlen_k))
    heads = np.arange(batch * num_heads_q, (batch + 1) * num_heads_q, dtype=np.uint64)
    kept = random_halves(seed, heads, seqlen_q, seqlen_k) >= np.uint64(threshold)
    return kept.astype(np.float64) * (HALF_RANGE / (HALF_RANGE - threshold))
