"""Dropout from a counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): Philox 4x32 with 7
rounds, one counter for 8 keys of a row. Any tile of the mask can be computed alone.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """The mask of one sequence."""

    threshold: tl.tensor  # halves below it are dropped
    key_0: tl.tensor  # the seed's two words
    key_1: tl.tensor
    sequence_head: tl.tensor  # b * num_heads_q + h, a number or [M, 1]
    i0: tl.tensor  # positions of the first row and key held here in the whole sequence
    j0: tl.tensor


@triton.jit
def words_of(seed):
    word = tl.load(seed)
    return (word & 0xFFFFFFFF).to(tl.uint32), ((word >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(7):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def kept(dropout, rows, first_key, N: tl.constexpr):
    """Bool `[M, N]`: which pairs of rows `[M, 1]` and the keys from `first_key` on are kept. The first key's position
    in the whole sequence is a multiple of 8.
    """
    group = (first_key + dropout.j0) // 8 + tl.arange(0, N // 8)[None, :]  # [1, N / 8]
    zero = (rows * 0 + group * 0).to(tl.uint32)  # [M, N / 8]
    c0, c1 = zero + group.to(tl.uint32), zero + (rows + dropout.i0).to(tl.uint32)
    c2 = zero + dropout.sequence_head.to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, zero, dropout.key_0, dropout.key_1)
    # Joined in the order of the bits of j % 8: half, then the word's low and its high bit.
    pairs_0 = tl.join(halves(w0, dropout.threshold), halves(w2, dropout.threshold))  # [M, N / 8, half, high]
    pairs_1 = tl.join(halves(w1, dropout.threshold), halves(w3, dropout.threshold))
    words = tl.join(pairs_0, pairs_1)  # [M, N / 8, half, high, low]
    return tl.permute(words, (0, 1, 3, 4, 2)).reshape(zero.shape[0], N) != 0


@triton.jit
def halves(word, threshold):
    """Int8 `[..., 2]`: whether the low and the high half of each word are kept."""
    return tl.join(((word & 0xFFFF) >= threshold).to(tl.int8), ((word >> 16) >= threshold).to(tl.int8))
