"""The running log-sum-exp: step 6 with one number for each row where it has two, and why that loses digits.

Some kernels carry lse itself from tile to tile, in place of the denominator l that step 6 carries:

    m_new = max(m, rowmax(S))       P = exp(S - m_new)       acc = exp(m - m_new) acc + P V
    lse = m_new + log(exp(lse - m_new) + rowsum(P))          at the end: O = exp(m - lse) acc

In exact arithmetic lse = m + log(l), so this is the same attention. In float32 it is not. Each tile rounds lse, which
is near log N + m, to half a unit of its last place: 5e-7 at lse = 13. That is an absolute error of a logarithm and thus
a *relative* error of the sum, eight times as large as the 6e-8 of adding to l. It comes back with every tile, and exp
and log of every tile add theirs. At the end O is multiplied by exp(m - lse) and has the whole error.

Two remedies. Carry l and take one logarithm at the end, as steps 6 to 9 do: l is at most N, so nothing can overflow.
Or shift by m_new = max(lse, rowmax(S)), as early Triton kernels of the FlashAttention library did: then the argument of
log is 1 and a small number, and little more than the rounding of lse is left (`shift="lse"`).

`python -m flashtile_ladder.related.running_lse` prints the errors of all three.
"""

import math

import torch
from torch import Tensor

from .._host.shapes import one_shape
from ..step06_flash2 import cut, hide_future

BLOCK_M, BLOCK_N = 64, 64


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    shift: str = "scores",
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`, in tiles of `block_m` rows and `block_n` keys.

    `shift` is "scores", the largest score so far, or "lse", the larger of the running lse and the tile's scores.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.empty_like(q), q.new_empty(n)  # [N, d], [N]
    for rows in cut(0, n, block_m):
        q_i = scale * q[rows]  # [Br, d]
        m, lse_i = q_i.new_full((len(q_i),), -math.inf), q_i.new_full((len(q_i),), -math.inf)  # [Br] x 2
        acc = torch.zeros_like(q_i)  # [Br, d]
        for keys in cut(0, rows.stop if causal else n, block_n):
            s = hide_future(q_i @ k[keys].mT, rows, keys, causal)  # [Br, Bc]
            m_new = torch.maximum(m if shift == "scores" else lse_i, s.amax(dim=1))  # [Br]
            p = torch.exp(s - m_new[:, None])  # [Br, Bc]
            acc = torch.exp(m - m_new)[:, None] * acc + p @ v[keys]
            lse_i = m_new + torch.log(torch.exp(lse_i - m_new) + p.sum(dim=1))  # a logarithm for each tile
            m = m_new
        out[rows], lse[rows] = torch.exp(m - lse_i)[:, None] * acc, lse_i
    return out, lse


# Only lse, for rows so long that attention would take minutes ---------------------------------------------------------


def running_sum(x: Tensor, block: int = BLOCK_N) -> Tensor:
    """Scores `[R, N]` to lse `[R]` as step 6: m and l are carried, and one logarithm is taken at the end."""
    m, l = x.new_full((len(x),), -math.inf), x.new_zeros(len(x))  # [R]
    for tile in x.split(block, dim=1):
        m_new = torch.maximum(m, tile.amax(dim=1))
        l = l * torch.exp(m - m_new) + torch.exp(tile - m_new[:, None]).sum(dim=1)
        m = m_new
    return m + torch.log(l)


def running_lse(x: Tensor, block: int = BLOCK_N, shift: str = "scores") -> Tensor:
    """Scores `[R, N]` to lse `[R]` with lse carried; `shift` as for `attention`."""
    m, lse = x.new_full((len(x),), -math.inf), x.new_full((len(x),), -math.inf)  # [R]
    for tile in x.split(block, dim=1):
        m = torch.maximum(m if shift == "scores" else lse, tile.amax(dim=1))
        lse = m + torch.log(torch.exp(lse - m) + torch.exp(tile - m[:, None]).sum(dim=1))
    return lse


def errors(n: int, rows: int = 16, seed: int = 0) -> dict[str, float]:
    """Largest error of lse in float32, over rows of `n` standard normal scores, in tiles of 64."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))  # [rows, n]
    exact = torch.logsumexp(x.double(), dim=1)
    found = {
        "running sum": running_sum(x),
        "running lse": running_lse(x),
        "running lse, shifted by lse": running_lse(x, shift="lse"),
    }
    return {name: float((lse - exact).abs().max()) for name, lse in found.items()}


def main() -> None:
    for n in (1024, 16384, 262144):
        found = errors(n)
        print(f"N = {n:>7,}: " + "; ".join(f"{name} {error:.1e}" for name, error in found.items()))


if __name__ == "__main__":
    main()
