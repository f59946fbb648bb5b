"""Step 6. FlashAttention-2 in PyTorch: rows in the outer loop.

The change. The loops have changed places: a block of rows stays, and keys and values stream by it. Its m, l and
accumulator live in SRAM until it is done, and the accumulator is not normalised on the way:

    m_new = max(m, rowmax(S))       alpha = exp(m - m_new)       P = exp(S - m_new)
    l = alpha l + rowsum(P)         acc = alpha acc + P V        at the end: O = acc / l,  lse = m + log(l)

Why it is faster. O, l and m, which FlashAttention-1 reads and writes once for each key block, are written once, and
one division at the end takes the place of one for each tile. K and V are read once for each row block instead, all by
reads, and row blocks depend on nothing of each other: they run in parallel. Backward needs
one number of l and m.

Any N goes: the last tiles are partial. Under causal, tiles above the diagonal are skipped, and only those on it are
masked.

Backward has keys outside, since then dK and dV stay in SRAM; dQ is added to through HBM. On a GPU
that addition is atomic, or ordered: see step 10.

(Dao, "FlashAttention-2", 2023, algorithms 1 and 2. The deferred division was proposed by Rabe and Staats,
"Self-attention does not need O(n²) memory", 2021.)
"""

import math

import torch
from torch import Tensor

from ._host.shapes import one_shape

BLOCK_M, BLOCK_N = 128, 128


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    block_m: int = BLOCK_M, block_n: int = BLOCK_N,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`, in tiles of `block_m` rows and `block_n` keys."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = q.new_empty((n, d)), q.new_empty((n,))
    for rows in cut(0, n, block_m):
        q_i = scale * q[rows]  # [Br, d]
        m, l = q_i.new_full((len(q_i),), -math.inf), q_i.new_zeros(len(q_i))  # [Br]
        acc = torch.zeros_like(q_i)  # [Br, d]
        for keys in cut(0, n, block_n):
            if causal and keys.start >= rows.stop:
                break
            k_j, v_j = k[keys], v[keys]  # [Bc, d]
            s = hide_future(q_i @ k_j.mT, rows, keys, causal)  # [Br, Bc]
            m_new = torch.maximum(m, s.amax(dim=1))  # [Br]
            alpha = torch.exp(m - m_new)  # [Br]
            p = torch.exp(s - m_new[:, None])  # [Br, Bc]
            l = alpha * l + p.sum(dim=1)  # [Br]
            acc = alpha[:, None] * acc + p @ v_j  # [Br, d]
            m = m_new
        out[rows], lse[rows] = acc / l[:, None], m + torch.log(l)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *, block_m: int = BLOCK_M, block_n: int = BLOCK_N,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv `[N, d]`: five products for each tile, where forward has two.

    S = Q Kᵀ      P = exp(S - lse)      dP = dO Vᵀ      dS = P ∘ (dP - delta)
    dV += Pᵀ dO                         dK += dSᵀ Q     dQ += dS K
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    dq, dk, dv = q.new_zeros((n, d)), q.new_empty((n, d)), q.new_empty((n, d))
    delta = q.new_empty((n,))
    for rows in cut(0, n, block_m):  # a kernel of its own, before: FlashAttention-1 does this again for every tile
        delta[rows] = (dout[rows] * out[rows]).sum(dim=1)  # [Br]
    for keys in cut(0, n, block_n):
        k_j, v_j = k[keys], v[keys]  # [Bc, d]
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # [Bc, d]
        first = keys.start - keys.start % block_m if causal else 0  # the first row block that sees these keys
        for rows in cut(first, n, block_m):
            q_i, do_i, lse_i, delta_i = scale * q[rows], dout[rows], lse[rows], delta[rows]  # [Br, d] x 2, [Br] x 2
            s = hide_future(q_i @ k_j.mT, rows, keys, causal)  # [Br, Bc]
            p = torch.exp(s - lse_i[:, None])  # [Br, Bc]
            dv_j += p.mT @ do_i
            dp = do_i @ v_j.mT  # [Br, Bc]
            ds = p * (dp - delta_i[:, None])  # [Br, Bc]
            dq[rows] = dq[rows] + scale * (ds @ k_j)
            dk_j += ds.mT @ q_i  # q_i carries the scale
        dk[keys], dv[keys] = dk_j, dv_j
    return dq, dk, dv


def cut(start: int, stop: int, block: int) -> list[slice]:
    """`[start, stop)` in blocks, the last one perhaps shorter."""
    return [slice(i, min(i + block, stop)) for i in range(start, stop, block)]


def hide_future(s: Tensor, rows: slice, keys: slice, causal: bool) -> Tensor:
    """S `[Br, Bc]`, in place: -inf where key j > row i. Tiles below the diagonal run none of this."""
    if not causal or keys.stop - 1 <= rows.start:
        return s
    i = torch.arange(rows.start, rows.stop, device=s.device)[:, None]  # [Br, 1]
    j = torch.arange(keys.start, keys.stop, device=s.device)  # [Bc]
    return s.masked_fill_(j > i, -math.inf)
