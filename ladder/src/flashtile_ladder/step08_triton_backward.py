"""Step 8, last. Backward in Triton: one kernel for dK and dV, one for dQ.

The change. Forward has left lse, so any tile of P can be made again: P = exp(S - lse), without a maximum or a sum.
Step 6's backward adds to dK and dV of a block of keys, which stay, and to dQ of every block of rows, which does not:
programs that run at the same time would add to the same numbers. Here no numbers are shared. A program of `dkdv` owns a
block of keys and goes over the rows; one of `dq` owns a block of rows and goes over the keys, as in forward.

The cost. S and dP are made in both: seven products for each tile in place of five. What is gained is that no addition
waits for another one, and that the sums have one order: the same bits in each run.

    S = Q Kᵀ      P = exp(S - lse)      dP = dO Vᵀ      dS = P ∘ (dP - delta)      delta = rowsum(dO ∘ O)
    dV = Pᵀ dO                          dK = dSᵀ Q      dQ = dS K

`dkdv` has its tiles transposed, Pᵀ `[keys, rows]` from K Qᵀ: its sums multiply Pᵀ and dSᵀ from the left, and a left
factor may stay in registers. P is in units of 2^x, as in step08_triton_lse.

Beyond N. A row there has lse = inf, so that its P is 0. A key there is a row of zeros in K: `dkdv` does not store it,
and `dq` must not let its P, which may be infinite, meet a 0.

Limits: those of step08_triton_lse, whose forward this is.
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from . import step08_triton_lse
from ._host.triton_or_not import check, on, tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def delta_kernel(O, DO, DELTA, N, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of all heads one after the other: N is their number."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    at = rows[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_M, D]
    o = tl.load(O + at, mask=rows[:, None] < N, other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=rows[:, None] < N, other=0.0).to(tl.float32)
    tl.store(DELTA + rows, tl.sum(o * do, axis=1), mask=rows < N)


@triton.jit
def dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, N, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    offset, cols = head * N * D, tl.arange(0, D)  # [D]
    first_key = tl.program_id(0) * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    at = offset + keys[:, None] * D + cols[None, :]  # [BLOCK_N, D]
    k = tl.load(K + at, mask=keys[:, None] < N, other=0.0)
    v = tl.load(V + at, mask=keys[:, None] < N, other=0.0)
    dk = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    first = first_key // BLOCK_M * BLOCK_M if CAUSAL else 0  # the first block of rows that sees these keys
    for start in range(first, N, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        at_rows = offset + rows[:, None] * D + cols[None, :]  # [BLOCK_M, D]
        q = tl.load(Q + at_rows, mask=rows[:, None] < N, other=0.0)
        do = tl.load(DO + at_rows, mask=rows[:, None] < N, other=0.0)
        lse = tl.load(LSE + head * N + rows, mask=rows < N, other=float("inf")) * 1.4426950408889634  # [BLOCK_M]
        delta = tl.load(DELTA + head * N + rows, mask=rows < N, other=0.0)  # [BLOCK_M]
        s_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p_t = tl.exp2(s_t * (scale * 1.4426950408889634) - lse[None, :])
        if CAUSAL:
            p_t = tl.where(keys[:, None] <= rows[None, :], p_t, 0.0)
        dv += tl.dot(p_t.to(do.dtype), do, input_precision=PRECISION)
        dp_t = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        dk += tl.dot(ds_t.to(q.dtype), q, input_precision=PRECISION)
    tl.store(DK + at, (dk * scale).to(k.dtype), mask=keys[:, None] < N)
    tl.store(DV + at, dv.to(k.dtype), mask=keys[:, None] < N)


@triton.jit
def dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, N, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    offset, cols = head * N * D, tl.arange(0, D)  # [D]
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    at = offset + rows[:, None] * D + cols[None, :]  # [BLOCK_M, D]
    q = tl.load(Q + at, mask=rows[:, None] < N, other=0.0)
    do = tl.load(DO + at, mask=rows[:, None] < N, other=0.0)
    lse = tl.load(LSE + head * N + rows, mask=rows < N, other=float("inf")) * 1.4426950408889634  # [BLOCK_M]
    delta = tl.load(DELTA + head * N + rows, mask=rows < N, other=0.0)  # [BLOCK_M]
    dq = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    end = tl.minimum(first_row + BLOCK_M, N) if CAUSAL else N  # no row sees a key from here on
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        at_keys = offset + keys[:, None] * D + cols[None, :]  # [BLOCK_N, D]
        k = tl.load(K + at_keys, mask=keys[:, None] < N, other=0.0)
        v = tl.load(V + at_keys, mask=keys[:, None] < N, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None])
        if CAUSAL:
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
        if not EVEN:
            p = tl.where(keys[None, :] < N, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    tl.store(DQ + at, (dq * scale).to(q.dtype), mask=rows[:, None] < N)


# Host code: skip it when you learn.
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, input_precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """`step08_triton_lse.attention`, whose lse `backward` takes."""
    return step08_triton_lse.attention(q, k, v, causal, scale, input_precision=input_precision)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *, input_precision: str = "ieee", tiles: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in q's shape and dtype. `tiles` are rows and keys of `dkdv`'s tiles, then of `dq`'s: powers of 2.

    Raises:
        TritonUnavailableError: Triton is missing, or there is neither a GPU nor its interpreter.
        ValueError: a shape, dtype or precision outside the limits.
    """
    check(dq_kernel, q, k, v, precision=input_precision, heads=True)
    n, d = q.shape[-2:]
    scale = 1 / math.sqrt(d) if scale is None else scale
    rows, keys, dq_rows, dq_keys = tiles or ((32, 32, 32, 32) if q.dtype is torch.float32 else (64, 64, 64, 64))
    q, k, v, out, lse, dout = (x.contiguous() for x in (q, k, v, out, lse, dout))
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q), torch.empty_like(lse)
    heads, inputs = lse.numel() // n, (q, k, v, dout, lse, delta)
    with on(q.device):
        delta_kernel[(triton.cdiv(lse.numel(), 64),)](out, dout, delta, lse.numel(), d, 64)
        dkdv_kernel[(triton.cdiv(n, keys), heads)](
            *inputs, dk, dv, n, scale, d, rows, keys, causal, input_precision, num_stages=2, num_warps=keys // 16
        )
        even = n % dq_keys == 0
        dq_kernel[(triton.cdiv(n, dq_rows), heads)](
            *inputs, dq, n, scale, d, dq_rows, dq_keys, causal, even, input_precision, num_stages=2,
            num_warps=dq_rows // 16,
        )  # fmt: skip
    return dq, dk, dv
