"""The running log-sum-exp as a Triton kernel: step08_triton_lse.py with one statistic less to carry, and less accurate.

    m_new = max(m, rowmax(S))       P = exp(S - m_new)       acc = exp(m - m_new) acc + P V
    lse = m_new + log(exp(lse - m_new) + rowsum(P))          at the end: O = exp(m - lse) acc

The kernel still has two numbers for each row, m and lse where step 8 has m and l, and takes a logarithm for each tile
where step 8 takes one in all. So nothing is saved; running_lse.py measures what it costs. Any N: keys beyond it have no
score.

Limits: d 16, 32, 64 or 128; forward only. `TRITON_INTERPRET=1 python -m flashtile_ladder.related.running_lse_triton`
runs it on a CPU and prints its error.
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from .._host.triton_or_not import check, on, tl, triton

BLOCK_M, BLOCK_N = 64, 64


@triton.jit
def kernel(
    Q,
    K,
    V,
    O,
    LSE,
    N,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, D)  # [D]
    q = tl.load(Q + rows[:, None] * D + cols[None, :], mask=rows[:, None] < N, other=0.0)  # [BLOCK_M, D]
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    lse = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    end = tl.minimum(first_row + BLOCK_M, N) if CAUSAL else N
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        k = tl.load(K + keys[:, None] * D + cols[None, :], mask=keys[:, None] < N, other=0.0)  # [BLOCK_N, D]
        v = tl.load(V + keys[:, None] * D + cols[None, :], mask=keys[:, None] < N, other=0.0)  # [BLOCK_N, D]
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        visible = keys[None, :] < N
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))  # [BLOCK_M]
        p = tl.exp(s - m_new[:, None])  # [BLOCK_M, BLOCK_N]
        acc = acc * tl.exp(m - m_new)[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        lse = m_new + tl.log(tl.exp(lse - m_new) + tl.sum(p, axis=1))
        m = m_new
    acc = acc * tl.exp(m - lse)[:, None]
    tl.store(O + rows[:, None] * D + cols[None, :], acc.to(q.dtype), mask=rows[:, None] < N)
    tl.store(LSE + rows, lse, mask=rows < N)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32.

    Raises:
        TritonUnavailableError: Triton is missing, or there is neither a GPU nor its interpreter.
        ValueError: a shape or dtype outside the limits above.
    """
    check(kernel, q, k, v)
    n, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = torch.empty((n, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((n,), dtype=torch.float32, device=q.device)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    grid = ((n + BLOCK_M - 1) // BLOCK_M,)
    with on(q.device):
        kernel[grid](q, k, v, out, lse, n, scale, d, BLOCK_M, BLOCK_N, causal, num_stages=2)
    return out, lse


def main() -> None:
    n, d = 200, 32
    q, k, v = torch.randn(3, n, d, device="cuda" if torch.cuda.is_available() else "cpu")
    out, lse = attention(q, k, v)
    s = q.double() @ k.double().mT / math.sqrt(d)  # [N, N]
    error = (out - torch.softmax(s, dim=1) @ v.double()).abs().max()
    print(f"N = {n}, d = {d}: error of out {error:.1e}, of lse {(lse - torch.logsumexp(s, 1)).abs().max():.1e}")


if __name__ == "__main__":
    from .._host.alone import guarded

    guarded(main)
