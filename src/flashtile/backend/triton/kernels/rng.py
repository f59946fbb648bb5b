"""Dropout by a counter-based generator, Philox 4x32-7: one counter for 8 keys of a row, in any order of tiles.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import NamedTuple

import triton
import triton.language as tl

WIDE_TILE = tl.constexpr(8192)  # pairs of a tile that gives each thread a word of 32 keys


class Stream(NamedTuple):
    """The random numbers of one sequence and head."""

    key_0: tl.tensor  # the seed's two words
    key_1: tl.tensor
    sequence_head: tl.tensor  # b * num_heads + h in the whole call, a number or [M, 1]


@triton.jit
def block_origin(dropout):
    """Start of the blocks of keys: a key whose position in the whole sequence is a multiple of 8."""
    return 0 if dropout.threshold is None else -(dropout.j0 % 8)


@triton.jit
def load_stream(dropout, b, head):
    """The random numbers of a sequence and head, a number or `[M, 1]`."""
    word = tl.load(dropout.seed)
    key_0, key_1 = (word & 0xFFFFFFFF).to(tl.uint32), ((word >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return Stream(key_0, key_1, (b + dropout.b0) * dropout.num_heads + dropout.h0 + head)


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
def keep_mask(dropout, stream, rows, first_key, N: tl.constexpr):
    """Bool `[M, N]`: true where a pair of rows `[M, 1]` and keys from `first_key` on is kept. The position of the first
    key in the whole sequence is a multiple of 8.
    """
    M: tl.constexpr = rows.shape[0]
    EIGHTS: tl.constexpr = 4 if M * N >= WIDE_TILE and N >= 32 else 2  # of keys in one word of bits
    WORDS: tl.constexpr = N // (8 * EIGHTS)
    first = (first_key + dropout.j0) // 8 + EIGHTS * tl.arange(0, WORDS)[None, :]  # [1, W]
    bits = (rows * 0 + first * 0).to(tl.uint32)  # [M, W]
    c1, c2 = bits + (rows + dropout.i0).to(tl.uint32), bits + stream.sequence_head.to(tl.uint32)
    for n in tl.static_range(EIGHTS):
        words = philox(c1 * 0 + (first + n).to(tl.uint32), c1, c2, c1 * 0, stream.key_0, stream.key_1)
        for w in tl.static_range(4):
            bits |= keep_bits(words[w], dropout.threshold) << (8 * n + 2 * w)
    # Move words to the threads that use them. Without `gather` each of those would generate them again.
    bits = tl.gather(bits, tl.zeros([M, WORDS], tl.int32) + tl.arange(0, WORDS)[None, :], 1)
    # Key j has bit 8 n + 2 w + half. In the layout of a matrix product only w differs between threads: one shift of the
    # word serves all its pairs, and the rest of the position is constant.
    n = tl.arange(0, EIGHTS)[None, None, :, None, None]
    w = tl.arange(0, 4)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    chosen = (bits[:, :, None, None, None] >> (2 * w).to(tl.uint32)) & (1 << (8 * n + half)).to(tl.uint32)
    return (chosen != 0).reshape(M, N)


@triton.jit
def keep_bits(word, threshold):
    """Two bits: whether the low and the high half of each word are kept."""
    low, high = (word & 0xFFFF) >= threshold, (word >> 16) >= threshold
    return low.to(tl.uint32) | (high.to(tl.uint32) << 1)
