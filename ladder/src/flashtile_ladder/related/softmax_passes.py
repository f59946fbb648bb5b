"""Softmax by how often it touches each score: 3, 4 and 3 times; and attention in two passes over the keys.

A softmax of N scores that do not fit on chip is limited by its reads and writes. Counted for each element:

    naive     sum of exp(x), then exp(x) / sum                                  2 reads, 1 write
    safe      maximum, sum of exp(x - m), then exp(x - m) / sum                 3 reads, 1 write
    online    maximum and sum in one pass, then the quotient                    2 reads, 1 write

(Milakov and Gimelshein, 2018.) Attention needs the weights for its values and not for themselves, so the second pass
of the online form can take the values along: `attention` finds m and l of a row in a first pass over the keys and the
output in a second one, in which it makes each score again. It reads K twice and V once and stores no score. Step 1's
`attention` does with one pass, by correcting the output as it corrects l. That reads K once, for one multiplication of
the output for each key (or tile) more.

`python -m flashtile_ladder related.softmax_passes` prints accesses, bytes and errors.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .. import step06_flash2
from .._host.shapes import one_shape
from ..measure.counted import count

Row = Any  # a Tensor, or a Counted one


def naive(x: Row) -> tuple[Row]:
    """`[N]` to `[N]`: overflows where exp(x) does."""
    n, y = x.shape[0], x.new_empty(tuple(x.shape))
    l = sum(math.exp(x[j]) for j in range(n))
    for j in range(n):
        y[j] = math.exp(x[j]) / l
    return (y,)


def safe(x: Row) -> tuple[Row]:
    """`[N]` to `[N]`, the maximum first."""
    n, y = x.shape[0], x.new_empty(tuple(x.shape))
    m = max(float(x[j]) for j in range(n))
    l = sum(math.exp(x[j] - m) for j in range(n))
    for j in range(n):
        y[j] = math.exp(x[j] - m) / l
    return (y,)


def online(x: Row) -> tuple[Row]:
    """`[N]` to `[N]`, maximum and sum together."""
    n, y = x.shape[0], x.new_empty(tuple(x.shape))
    m, l = -math.inf, 0.0
    for j in range(n):
        x_j = float(x[j])
        m_new = max(m, x_j)
        l = l * math.exp(m - m_new) + math.exp(x_j - m_new)
        m = m_new
    for j in range(n):
        y[j] = math.exp(x[j] - m) / l
    return (y,)


def attention(
    q: Row, k: Row, v: Row, causal: bool = False, scale: float | None = None, *,
    block_m: int = step06_flash2.BLOCK_M, block_n: int = step06_flash2.BLOCK_N,
) -> tuple[Row, Row]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`, in two passes over the keys for each block of rows."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = q.new_empty((n, d)), q.new_empty((n,))
    for rows in step06_flash2.cut(0, n, block_m):
        q_i = scale * q[rows]  # [Br, d]
        key_blocks = step06_flash2.cut(0, rows.stop if causal else n, block_n)
        m, l = q_i.new_full((len(q_i),), -math.inf), q_i.new_zeros(len(q_i))  # [Br]
        for keys in key_blocks:  # pass 1: m and l
            s = step06_flash2.hide_future(q_i @ k[keys].mT, rows, keys, causal)  # [Br, Bc]
            m_new = torch.maximum(m, s.amax(dim=1))
            l = torch.exp(m - m_new) * l + torch.exp(s - m_new[:, None]).sum(dim=1)
            m = m_new
        lse_i = m + torch.log(l)
        acc = torch.zeros_like(q_i)  # [Br, d]
        for keys in key_blocks:  # pass 2: the weights are final, and nothing is corrected
            s = step06_flash2.hide_future(q_i @ k[keys].mT, rows, keys, causal)
            acc += torch.exp(s - lse_i[:, None]) @ v[keys]
        out[rows], lse[rows] = acc, lse_i
    return out, lse


def main() -> None:
    x = torch.randn(200)
    exact = torch.softmax(x.double(), dim=0)
    for function in (naive, safe, online):
        counts, (y,) = count(function, [x])
        reads, writes = (counts[name] / x.nbytes for name in ("read", "written"))
        error = (y - exact).abs().max()
        print(f"{function.__name__:>6}: {reads:.0f} reads and {writes:.0f} write of each element, error {error:.1e}")
    q, k, v = torch.randn(3, 1024, 64)
    truth: Tensor = torch.softmax(q.double() @ k.double().mT / 8, dim=1) @ v.double()
    for name, function in (("one pass", step06_flash2.attention), ("two passes", attention)):
        counts, (out, _) = count(function, [q, k, v])
        print(f"attention in {name}: {counts['read']:,} bytes read, error {(out - truth).abs().max():.1e}")
