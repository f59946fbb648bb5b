"""Step 1. Softmax: naive, safe, online, in blocks; then attention in several passes and in one.

Where we start. For one query row with scores x_1 .. x_N, attention is the mean of the values with weights

    p_j = exp(x_j) / sum_i exp(x_i)                                                                     (softmax)

`naive_softmax` is that line, and overflows: exp(89) is more than float32 holds. It underflows too: if all scores are
below -104, every exp is 0, and 0 / 0 is NaN. `safe_softmax` subtracts the maximum first, which changes nothing, for
exp(x - m) / sum exp(x - m) has exp(-m) above and below. But it reads the scores three times: for m, for the sum, for
the result. `online_softmax` finds m and the sum in one pass: when a larger score turns up, the sum so far is multiplied
by exp(m_old - m_new) (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3). `merge`
does so for two blocks of any size and is associative: blocks can be taken in any grouping, also at the same time.

`attention` carries the output along in the same way, so one pass over keys and values is enough and no row of scores is
ever stored. All later steps do this with tiles in place of single keys.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._host.shapes import one_shape


def naive_softmax(x: Tensor) -> Tensor:
    """`[N]` to `[N]`, as defined: inf / inf = NaN as soon as one score exceeds log(largest number), 88.7 in
    float32, and 0 / 0 = NaN where all are below the logarithm of the smallest, -104.
    """
    e = torch.exp(x)  # [N]
    return e / e.sum()


def safe_softmax(x: Tensor) -> Tensor:
    """`[N]` to `[N]` in three passes: p_j = exp(x_j - m) / l with m = max x and l = sum exp(x - m)."""
    m = x.max()  # pass 1
    l = torch.exp(x - m).sum()  # pass 2
    return torch.exp(x - m) / l  # pass 3


def online_softmax(x: Tensor) -> Tensor:
    """`[N]` to `[N]` in two passes: m and l come out of the first one together.

    m_j = max(m_{j-1}, x_j)         l_j = l_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)
    """
    m, l = -math.inf, 0.0
    for x_j in x.tolist():  # pass 1
        m_new = max(m, x_j)
        l = l * math.exp(m - m_new) + math.exp(x_j - m_new)
        m = m_new
    return torch.exp(x - m) / l  # pass 2


class Normalizer(NamedTuple):
    """The state of softmax after a block of scores: sum of exp(x) = l * exp(m)."""

    m: Tensor  # [] maximum
    l: Tensor  # [] sum of exp(x - m)


def normalizer(x: Tensor) -> Normalizer:
    """The normalizer of one block, `[B]`."""
    m = x.max()
    return Normalizer(m, torch.exp(x - m).sum())


def merge(a: Normalizer, b: Normalizer) -> Normalizer:
    """The normalizer of the union of two blocks. Both sides are l * exp(m), and sums are associative and commutative:

    m = max(m_a, m_b)               l = l_a exp(m_a - m) + l_b exp(m_b - m)
    """
    m = torch.maximum(a.m, b.m)
    return Normalizer(m, a.l * torch.exp(a.m - m) + b.l * torch.exp(b.m - m))


def blockwise_softmax(x: Tensor, block: int = 4) -> Tensor:
    """`[N]` to `[N]`: blocks are summed up on their own, then merged in pairs, as a tree of processors would."""
    parts = [normalizer(part) for part in x.split(block)]
    while len(parts) > 1:
        pairs = [merge(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return torch.exp(x - parts[0].m) / parts[0].l


def attention_in_passes(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with the safe softmax: for each row, scores are made once and read three times, then the values."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_zeros(n)  # [N, d], [N]
    for i in range(n):
        visible = i + 1 if causal else n
        x = scale * (k[:visible] @ q[i])  # [visible]
        m = x.max()  # pass 1
        l = torch.exp(x - m).sum()  # pass 2
        p = torch.exp(x - m) / l  # [visible], pass 3
        out[i] = p @ v[:visible]  # [d], pass 4, over the values
        lse[i] = m + torch.log(l)
    return out, lse


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in one pass: each key and value is read once for a row, and only m, l and o are kept.

        x_j = scale q . k_j
        m_j = max(m_{j-1}, x_j)
        l_j = l_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)
        o_j = o_{j-1} (l_{j-1} / l_j) exp(m_{j-1} - m_j) + exp(x_j - m_j) / l_j v_j

    After every key, o_j is the attention over the keys seen so far.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = q.new_empty((n, d)), q.new_empty((n,))
    for i in range(n):
        q_i = q[i]  # [d]
        m, l, o = -math.inf, 0.0, torch.zeros_like(q_i)  # [], [], [d]
        for j in range(i + 1 if causal else n):
            x = scale * float(q_i @ k[j])
            m_new = max(m, x)
            kept, new = l * math.exp(m - m_new), math.exp(x - m_new)
            l = kept + new
            o = o * (kept / l) + (new / l) * v[j]  # [d]
            m = m_new
        out[i], lse[i] = o, m + math.log(l)
    return out, lse
