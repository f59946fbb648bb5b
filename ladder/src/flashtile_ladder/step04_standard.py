"""Step 4. Standard attention in PyTorch: three lines, with S and P in memory.

    S = scale Q Kᵀ        P = softmax(S)        O = P V

The change. Whole matrices instead of loops: two matrix products and a softmax, each a tuned kernel.

Why it is faster. Matrix products use vector units or tensor cores at nearly their full rate. And why it is not enough:
each of the three kernels reads its operands from HBM and writes its result back, S and P among them:

    kernel         reads       writes      elements
    S = Q Kᵀ       Q, K        S           2 N d + N²
    P = softmax    S           P           2 N²
    O = P V        P, V        O           2 N d + N²

Eight matrices, 4 N² + 4 N d elements, for 4 N² d operations: for d = 64 about 15 operations for each byte of float32,
where processors offer several times as many. `attention_in_kernels` is this account as code: `x[...]` on the right is a
read of HBM, and `x[...] =` a write.

(Dao et al., "FlashAttention", 2022, algorithm 0 and section 3.2; backward is algorithm 3 of appendix B.)
"""

import math

import torch
from torch import Tensor

from ._host.shapes import one_shape


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`."""
    one_shape(q, k, v)
    s = hide_future(scaled(q, scale) @ k.mT, causal)  # [N, N]
    lse = torch.logsumexp(s, dim=-1)  # [N]; before P, for it needs N² numbers for a moment
    p = torch.softmax(s, dim=-1)  # [N, N]
    return p @ v, lse  # [N, d], [N]


def attention_in_kernels(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out `[N, d]`, lse `[N]` and p `[N, N]` by three kernels that meet only in HBM."""
    n, d = one_shape(q, k, v)
    s, p, out, lse = q.new_empty((n, n)), q.new_empty((n, n)), q.new_empty((n, d)), q.new_empty((n,))
    s[:] = hide_future(scaled(q[:], scale) @ k[:].mT, causal)  # reads Q, K; writes S
    p[:], lse[:] = softmax_and_lse(s[:])  # reads S; writes P, and N numbers
    out[:] = p[:] @ v[:]  # reads P, V; writes O
    return out, lse, p


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *, p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv `[N, d]` by five kernels, with P `[N, N]` kept from forward; without it, P is made from lse first.

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP - delta)        dQ = scale dS K        dK = scale dSᵀ Q
    """
    n, d = one_shape(q, k, v)
    factor = 1 / math.sqrt(d) if scale is None else scale
    dq, dk, dv = (q.new_empty((n, d)) for _ in range(3))
    dp, ds = q.new_empty((n, n)), q.new_empty((n, n))
    if p is None:
        p = q.new_empty((n, n))
        p[:] = torch.exp(hide_future(scaled(q[:], scale) @ k[:].mT, causal) - lse[:, None])  # reads Q, K; writes P
    dv[:] = p[:].mT @ dout[:]  # reads P, dO; writes dV
    dp[:] = dout[:] @ v[:].mT  # reads dO, V; writes dP
    ds[:] = softmax_backward(p[:], dp[:])  # reads P, dP; writes dS
    dq[:] = factor * (ds[:] @ k[:])  # reads dS, K; writes dQ
    dk[:] = factor * (ds[:].mT @ q[:])  # reads dS, Q; writes dK
    return dq, dk, dv


def scaled(q: Tensor, scale: float | None) -> Tensor:
    """The scale goes to q `[N, d]`, not to S `[N, N]`: fewer multiplications, and no second copy of S."""
    return q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def hide_future(s: Tensor, causal: bool) -> Tensor:
    """S `[N, N]`, in place: -inf where key j > row i."""
    if not causal:
        return s
    return s.masked_fill_(torch.ones(s.shape, dtype=torch.bool, device=s.device).triu_(1), -torch.inf)


def softmax_and_lse(s: Tensor) -> tuple[Tensor, Tensor]:
    """One pass of a softmax kernel gives both: `[N, N]` and `[N]`."""
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse[:, None]), lse


def softmax_backward(p: Tensor, dp: Tensor) -> Tensor:
    """dS = P ∘ (dP - delta) with delta_i = sum_j P_ij dP_ij, `[N, N]`."""
    return p * (dp - (p * dp).sum(dim=-1, keepdim=True))
