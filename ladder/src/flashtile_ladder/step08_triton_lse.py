"""Step 8, third of three. Triton with the log-sum-exp, causal masking and any length: what a product needs.

The change.

- lse = m + log(l) is written with the output. It is all that backward needs to make P again, P = exp(S - lse), and it
  lets attentions over different keys be merged later (step 1's merge).
- Causal: a block of rows stops at its last visible key. Tiles wholly below the diagonal run in a first loop without any
  mask code, those on the diagonal in a second one: `inner` is compiled twice, with MASKED a constant of each.
- Any N: the last tiles are partial. With EVEN, a constant too, no key is tested against N.
- exp(x) = 2^(x log2 e), and GPUs have an instruction for 2^x: log2 e is folded into the scale.
- Heads: a second axis of the grid. Each program adds its head's offset to the pointers, and nothing else changes.

A choice: `input_precision` of the two products where inputs are float32. "ieee" multiplies all 24 bits, on the ordinary
units. "tf32", Triton's own default, rounds each factor to 11 bits for the tensor cores: several times as fast, with an
error of about 1e-3 where "ieee" has 1e-6. Results "in float32" of two kernels compare only if this choice is the same.

Why it is faster. Causal visits half the tiles. A constant that is known when the kernel is compiled costs nothing
when it runs: each combination becomes a kernel of its own, which step 10 is about.

Limits: d 16, 32, 64 or 128; one N for q, k and v, and as many heads; forward only.
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from ._host.triton_or_not import check, on, tl, triton

BLOCK_M, BLOCK_N = 64, 64
LOG2_E = 1.4426950408889634


@triton.jit
def inner(
    q, m, l, acc, rows, K, V, N, first, last, scale_log2, D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys `[first, last)`; scores are in units of log 2. q and acc are
    `[BLOCK_M, D]`; m, l and rows `[BLOCK_M]`.
    """
    cols = tl.arange(0, D)  # [D]
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if MASKED and not EVEN:
            k = tl.load(K + keys[:, None] * D + cols[None, :], mask=keys[:, None] < N, other=0.0)  # [BLOCK_N, D]
            v = tl.load(V + keys[:, None] * D + cols[None, :], mask=keys[:, None] < N, other=0.0)  # [BLOCK_N, D]
        else:
            k = tl.load(K + keys[:, None] * D + cols[None, :])
            v = tl.load(V + keys[:, None] * D + cols[None, :])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_N]
        if MASKED:
            if CAUSAL:
                s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
            if not EVEN:
                s = tl.where(keys[None, :] < N, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))  # [BLOCK_M]
        alpha = tl.exp2(m - m_new)  # [BLOCK_M]
        p = tl.exp2(s - m_new[:, None])  # [BLOCK_M, BLOCK_N]
        l = l * alpha + tl.sum(p, axis=1)  # [BLOCK_M]
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def kernel(
    Q, K, V, O, LSE, N, scale_log2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)  # 64 bits: heads * N * D may pass 2^31
    Q += head * N * D
    K += head * N * D
    V += head * N * D
    O += head * N * D
    LSE += head * N
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, D)  # [D]
    q = tl.load(Q + rows[:, None] * D + cols[None, :], mask=rows[:, None] < N, other=0.0)  # [BLOCK_M, D]
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    if CAUSAL:
        full = first_row // BLOCK_N * BLOCK_N  # every row sees all keys before
        end = tl.minimum(first_row + BLOCK_M, N)  # no row sees a key from here on
    else:
        full = N // BLOCK_N * BLOCK_N
        end = N
    m, l, acc = inner(q, m, l, acc, rows, K, V, N, 0, full, scale_log2, D, BLOCK_N, CAUSAL, EVEN, PRECISION, False)
    m, l, acc = inner(q, m, l, acc, rows, K, V, N, full, end, scale_log2, D, BLOCK_N, CAUSAL, EVEN, PRECISION, True)
    tl.store(O + rows[:, None] * D + cols[None, :], (acc / l[:, None]).to(q.dtype), mask=rows[:, None] < N)
    tl.store(LSE + rows, (m + tl.log2(l)) / 1.4426950408889634, mask=rows < N)  # back to the natural logarithm


# Host code: skip it when you learn.
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    input_precision: str = "ieee", block_m: int = BLOCK_M, block_n: int = BLOCK_N,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]` to lse `[B, heads, N]`.

    `input_precision` is "ieee" or "tf32" and concerns float32; `block_m` and `block_n` are powers of 2.

    Raises:
        TritonUnavailableError: Triton is missing, or there is neither a GPU nor its interpreter.
        ValueError: a shape, dtype or precision outside the limits above.
    """
    check(kernel, q, k, v, precision=input_precision, heads=True)
    n, d = q.shape[-2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    scale_log2 = (1 / math.sqrt(d) if scale is None else scale) * LOG2_E
    grid, even = ((n + block_m - 1) // block_m, lse.numel() // n), n % block_n == 0
    constants = d, block_m, block_n, causal, even, input_precision
    with on(q.device):
        kernel[grid](q, k, v, out, lse, n, scale_log2, *constants, num_stages=2, num_warps=block_m // 16)
    return out, lse
