"""FlashAttention-3's order of operations: the softmax of one tile during the products of another.

Step 9's kernels of `mma.sync` wait for each product before they go on. Hopper's `wgmma` is asynchronous: four warps (a
warpgroup) issue a product of 64 rows, whose operands lie in shared memory, and go on until they ask for its result. One
thread issues the copies (TMA), so no other thread computes an address. What can run meanwhile? The softmax, on another
unit. A multiprocessor of an H100 or H200 does 4,096 floating-point operations of 16-bit products in a cycle, and 16
exponentials. A pair of a row and a key has 4 d operations of products and one exp:

    products    4 d / 4096 cycles: 1/16 at d = 64, 1/8 at d = 128          exp    1/16 of a cycle at any d

One after the other, products have half of the time at d = 64, and no more of the peak than that. Two remedies, both in
the paper (Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2):

    ping-pong     two warpgroups with rows of their own: one has the tensor cores while the other takes exponentials
    pipelined     in a warpgroup, S of the next tile is issued before the softmax of this one; P V follows a tile later

`attention` is the pipelined loop (the paper's algorithm 2) with torch operations: the same sums as step 6, in another
order. `busy` has the share of the time in which the tensor cores work, by a model with these two units and nothing
else: no copies, no maxima and sums, no instructions but products. A kernel does not reach it, and `mma.sync` stays
below even its first line: operands pass through registers, by instructions of their own. step09_hopper is
pipelined, and its two warpgroups may take turns, which nothing makes them do.

`python -m flashtile_ladder related.flash3` prints an error, and what the model has for each schedule.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._host.shapes import one_shape
from ..step06_flash2 import BLOCK_M, BLOCK_N, cut, hide_future

FLOPS_PER_CYCLE, EXPS_PER_CYCLE = 4096, 16  # of a multiprocessor of compute capability 9.0


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    block_m: int = BLOCK_M, block_n: int = BLOCK_N,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`, in tiles of `block_m` rows and `block_n` keys."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.empty_like(q), q.new_empty(n)
    for rows in cut(0, n, block_m):
        q_i = scale * q[rows]  # [Br, d]
        first, *further = cut(0, rows.stop if causal else n, block_n)
        s = hide_future(q_i @ k[first].mT, rows, first, causal)  # [Br, Bc]
        m = s.amax(dim=1)  # [Br]
        p = torch.exp(s - m[:, None])
        l, acc, before = p.sum(dim=1), torch.zeros_like(q_i), first
        for keys in further:
            s = q_i @ k[keys].mT  # issued
            acc += p @ v[before]  # issued behind it, with the weights of the tile before
            s = hide_future(s, rows, keys, causal)  # S has arrived: its softmax runs during P V
            m_new = torch.maximum(m, s.amax(dim=1))
            alpha, p = torch.exp(m - m_new), torch.exp(s - m_new[:, None])
            l, m = alpha * l + p.sum(dim=1), m_new
            acc = alpha[:, None] * acc  # P V has arrived
            before = keys
        out[rows] = (acc + p @ v[before]) / l[:, None]
        lse[rows] = m + torch.log(l)
    return out, lse


# The model: each warpgroup issues its work in order, and a unit does one thing at a time -----------------------------


class Work(NamedTuple):
    """A product or a softmax, and the earlier ones of its warpgroup whose results it needs, by their places."""

    products: bool
    cycles: float
    needs: tuple[int, ...]


def program(tiles: int, product: float, softmax: float, pipelined: bool) -> list[Work]:
    """What a warpgroup issues for a block of rows: S, softmax and P V of each tile."""
    works, last = [], ()  # last: the place of the softmax before
    for tile in range(tiles):
        works.append(Work(True, product, () if pipelined else tuple(range(len(works)))[-1:]))  # S
        if pipelined and tile:
            works.append(Work(True, product, last))  # P V of the tile before
        works.append(Work(False, softmax, (len(works) - (2 if pipelined and tile else 1), *last)))
        last = (len(works) - 1,)
        if not pipelined:
            works.append(Work(True, product, last))
    return [*works, Work(True, product, last)] if pipelined else works


def busy(d: int, *, tiles: int = 64, warpgroups: int = 1, pipelined: bool = False) -> float:
    """Share of the time in which the tensor cores work."""
    product, softmax = 2 * d / FLOPS_PER_CYCLE, 1 / EXPS_PER_CYCLE  # of a pair: S or P V, and exp
    todo = [program(tiles, product, softmax, pipelined) for _ in range(warpgroups)]
    ends: list[list[float]] = [[] for _ in todo]  # of the work that each has issued
    free = {True: 0.0, False: 0.0}  # when each unit is
    while any(len(done) < len(works) for done, works in zip(ends, todo, strict=True)):
        ready = []
        for number, (done, works) in enumerate(zip(ends, todo, strict=True)):
            if len(done) < len(works):
                work = works[len(done)]
                start = max([free[work.products], *(done[place] for place in work.needs)])
                ready.append((start, number, work))
        start, number, work = min(ready)
        free[work.products] = start + work.cycles
        ends[number].append(start + work.cycles)
    return warpgroups * tiles * 2 * product / max(free.values())


def main() -> None:
    q, k, v = torch.randn(3, 512, 64)
    exact = torch.softmax(q.double() @ k.double().mT / 8, dim=1) @ v.double()
    print(f"error {(attention(q, k, v)[0] - exact).abs().max():.1e}")
    for d in (64, 128, 256):
        shares = [busy(d), busy(d, pipelined=True), busy(d, warpgroups=2), busy(d, warpgroups=2, pipelined=True)]
        names = ("one after the other", "pipelined", "ping-pong", "both")
        print(f"d = {d:>3}:", ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True)))
