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

As whole kernels: triton_any_size.py, and running_lse.cu. Here is lse alone, for rows so long that attention would take
minutes. `python -m flashtile_ladder related.running_lse` prints the errors of all three.
"""

import math

import torch
from torch import Tensor

BLOCK_N = 64  # keys of a tile


def running_sum(x: Tensor, block: int = BLOCK_N) -> Tensor:
    """Scores `[R, N]` to lse `[R]` as step 6: m and l are carried, and one logarithm is taken at the end."""
    m, l = x.new_full((len(x),), -math.inf), x.new_zeros(len(x))  # [R]
    for tile in x.split(block, dim=1):
        m_new = torch.maximum(m, tile.amax(dim=1))
        l = l * torch.exp(m - m_new) + torch.exp(tile - m_new[:, None]).sum(dim=1)
        m = m_new
    return m + torch.log(l)


def running_lse(x: Tensor, block: int = BLOCK_N, shift: str = "scores") -> Tensor:
    """Scores `[R, N]` to lse `[R]` with lse carried. `shift` is "scores", the largest score so far, or "lse", the
    larger of the running lse and the tile's scores.
    """
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
