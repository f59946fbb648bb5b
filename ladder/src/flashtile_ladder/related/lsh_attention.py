"""Attention in buckets: each row sees the keys of its own hash bucket, as in the Reformer. O(N log N), approximate.

Large weights belong to keys in the direction of the query. A locality-sensitive hash gives vectors of near directions
the same bucket with high probability: with a random matrix R [d, b / 2], the bucket of x is the place of the largest of
the b numbers [x R, -x R]. One hash misses pairs, so several rounds are merged by their log-sum-exp (step 1's merge).

In each round rows are sorted by bucket and cut into chunks of equal size, and a row sees those of its chunk and of the
chunk before that are in its bucket: N log N for sorting, and 4 N c d operations for each key of a chunk of c and its
predecessor. A pair that several rounds have would count several times, so its weight is divided by their number.

Queries and keys share one vector, k = q / |q|, as in the Reformer: else a query's bucket would say little about keys.
A row does not see itself, for its own weight would be the largest one, unless it sees nothing else.
(Kitaev et al., "Reformer: The Efficient Transformer", 2020, sections 2 and 3.)

What is approximate is which pairs are seen; exactness is lost, and on a GPU the sort and its scattered rows cost more
than tiles of a fused kernel do, for lengths that fit. `python -m flashtile_ladder related.lsh_attention` prints error,
share of pairs and time against length and rounds.
"""

import functools
import math

import torch
from torch import Tensor

from .._host.alone import milliseconds

SELF = -1e5  # added to the score of a row with itself: it counts only where nothing else does


class Round:
    """One hash: the order of rows by bucket, and where each row went."""

    def __init__(self, q: Tensor, buckets: int, chunk: int, generator: torch.Generator):
        n, d = q.shape
        r = torch.randn(d, buckets // 2, generator=generator, dtype=torch.float64).to(q)
        x = q @ r  # [N, b / 2]
        self.bucket = torch.cat([x, -x], dim=1).argmax(dim=1)  # [N]
        self.order = torch.argsort(self.bucket, stable=True)  # [N]
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(n, device=q.device)
        self.chunk_of = place // chunk  # [N]

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether rows i see keys j in this round; shapes broadcast."""
        before = self.chunk_of[i] - self.chunk_of[j]
        return (self.bucket[i] == self.bucket[j]) & ((before == 0) | (before == 1))


def hashes(q: Tensor, buckets: int, rounds: int, chunk: int, seed: int) -> list[Round]:
    """The rounds of `attention` for these arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [Round(q, buckets, chunk, generator) for _ in range(rounds)]


def attention(
    q: Tensor, v: Tensor, *, buckets: int = 16, rounds: int = 4, chunk: int = 64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Shared queries and keys `[N, d]` and values `[N, d]` to out `[N, d]` and lse `[N]`.

    `buckets` is even. Each round takes a chunk of rows with itself and the chunk before it.
    """
    n, d = q.shape
    k = torch.nn.functional.normalize(q, dim=1)  # [N, d]
    all_rounds = hashes(q, buckets, rounds, chunk, seed)
    out, lse = torch.zeros_like(v), q.new_full((n,), -math.inf)  # [N, d], [N]
    for this in all_rounds:
        for first in range(0, n, chunk):
            i = this.order[first : first + chunk, None]  # [c, 1]
            j = this.order[max(first - chunk, 0) : first + chunk]  # [2 c]
            times = sum(other.sees(i, j).to(q.dtype) for other in all_rounds)  # [c, 2 c]
            assert isinstance(times, Tensor)
            s = (q[i[:, 0]] @ k[j].mT) / math.sqrt(d) + SELF * (i == j) - torch.log(times)
            s = s.masked_fill(~this.sees(i, j), -math.inf)
            lse_i = torch.logsumexp(s, dim=1)  # [c]
            out_i = torch.exp(s - lse_i[:, None]) @ v[j]  # [c, d]
            rows = i[:, 0]
            merged = torch.logaddexp(lse[rows], lse_i)
            old, new = torch.exp(lse[rows] - merged), torch.exp(lse_i - merged)
            out[rows], lse[rows] = old[:, None] * out[rows] + new[:, None] * out_i, merged
    return out, lse


def exact(q: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all pairs, or over those of bool `seen` `[N, N]`: out `[N, d]` and lse `[N]`."""
    n, d = q.shape
    s = (q @ torch.nn.functional.normalize(q, dim=1).mT) / math.sqrt(d)
    s = s + SELF * torch.eye(n, dtype=q.dtype, device=q.device)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    return torch.softmax(s, dim=1) @ v, torch.logsumexp(s, dim=1)


def clustered(n: int, d: int) -> Tensor:
    """`[N, d]` of norm 8 sqrt(d) in n / 64 clusters of directions: weights that are concentrated, as the hash needs."""
    centers = torch.randn(n // 64, d)
    directions = centers[torch.arange(n) % len(centers)] + 0.3 * torch.randn(n, d)
    return 8 * math.sqrt(d) * torch.nn.functional.normalize(directions, dim=1)


def main() -> None:
    d = 64
    for n in (1024, 4096):
        q, v = clustered(n, d), torch.randn(n, d)
        truth, _ = exact(q.double(), v.double())
        full = milliseconds(functools.partial(exact, q, v), q.device)
        print(f"N = {n}: all pairs {full:.1f} ms")
        for rounds in (1, 2, 4, 8):
            keywords = {"buckets": n // 64, "rounds": rounds}
            out, _ = attention(q, v, **keywords)
            error = float((out - truth).norm() / truth.norm())
            ms = milliseconds(functools.partial(attention, q, v, **keywords), q.device)
            share = min(rounds * 128 / n, 1)
            print(f"  {rounds} rounds: error {error:.3f} of the result, {share:.0%} of the pairs at most, {ms:.1f} ms")
