"""Stream-K: every worker gets the same number of tiles, wherever heads and rows end; against fixed splits.

A multiprocessor computes one output tile, [Br, d] of a head, at a time, walking over its key blocks. With fewer output
tiles than multiprocessors some have nothing to do; with a few more, the last wave is nearly empty. Three schedules
for `outputs` tiles of `keys` key blocks on `workers`:

    whole        an output tile each                   time  ceil(outputs / workers) keys
    fixed split  each in s parts of its keys           time  ceil(outputs s / workers) ceil(keys / s)
    stream-K     all tiles in one line, cut evenly     time  ceil(outputs keys / workers)

A piece may begin in the middle of an output tile and end in the middle of another. Attention allows that, since parts
over different keys merge by their log-sum-exp in any grouping (step 1). FlashDecoding splits (Dao et al., 2023), Lean
Attention streams (Sanovar et al., 2024; after Osama et al., "Stream-K", 2023).

`python -m flashtile_ladder related.stream_k` prints the share of time in which workers are busy.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._host.shapes import one_shape

BLOCK_M, BLOCK_N = 64, 64


class Piece(NamedTuple):
    """Key blocks `[first, last)` of one output tile, done by one worker."""

    output: int
    first: int
    last: int


def pieces(outputs: int, keys: int, workers: int) -> list[list[Piece]]:
    """For each worker its pieces, in order: sizes in tiles differ by one at most."""
    tiles = outputs * keys
    bounds = [tiles * worker // workers for worker in range(workers + 1)]
    found = []
    for first, last in itertools.pairwise(bounds):
        own = []
        while first < last:
            output, start = divmod(first, keys)
            length = min(keys - start, last - first)
            own.append(Piece(output, start, start + length))
            first += length
        found.append(own)
    return found


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, workers: int = 6
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`; workers come one after the other here, at the same time on a GPU.

    Causal makes tiles unequal and is masked only: a schedule for it would count visible tiles.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_full((n,), -math.inf)  # [N, d], [N]
    i = torch.arange(n, device=q.device)
    for own in pieces(math.ceil(n / BLOCK_M), math.ceil(n / BLOCK_N), workers):
        for piece in own:
            rows = slice(piece.output * BLOCK_M, (piece.output + 1) * BLOCK_M)
            keys = slice(piece.first * BLOCK_N, piece.last * BLOCK_N)
            s = scale * (q[rows] @ k[keys].mT)  # [Br, keys]; a worker walks over them, with step 6's state
            if causal:
                s = s.masked_fill(i[keys] > i[rows, None], -math.inf)
            part = torch.logsumexp(s, dim=1)  # [Br]; -inf where no key is visible
            both = torch.logaddexp(lse[rows], part)
            kept = both.masked_fill(both == -math.inf, 0.0)
            own_out = torch.exp(s - kept[:, None]) @ v[keys]
            out[rows] = torch.exp(lse[rows] - kept)[:, None] * out[rows] + own_out
            lse[rows] = both
    return out, lse


def busy(outputs: int, keys: int, workers: int, splits: int = 1) -> tuple[float, float]:
    """Share of the workers' time that is work: by fixed splits (1: whole output tiles), and by stream-K."""
    work = outputs * keys / workers
    return work / (math.ceil(outputs * splits / workers) * math.ceil(keys / splits)), work / math.ceil(work)


def main() -> None:
    workers = 132
    for name, outputs, keys in (
        ("decoding, 8 sequences, 8 key heads, 8192 keys", 64, 128),
        ("decoding, 20 sequences, 8 key heads, 8192 keys", 160, 128),
        ("16 heads of 1024 rows and keys", 256, 16),
    ):
        whole, streamed = busy(outputs, keys, workers)
        fixed = {splits: busy(outputs, keys, workers, splits)[0] for splits in (2, 4, 8)}
        print(f"{name}: whole {whole:.0%}, fixed", ", ".join(f"{s} splits {x:.0%}" for s, x in fixed.items()), end="")
        print(f", stream-K {streamed:.0%}")
