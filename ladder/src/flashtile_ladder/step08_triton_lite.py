"""Step 8, first of three. Triton, "lite": one kernel, with a softmax that is local to each tile. It is wrong.

The change. The tile loop of step 6 becomes one kernel: each program takes BLOCK_M rows and walks over the keys, and
what lay in Python variables lies in registers and shared memory. The formula of a tile is the plain softmax,

    O_i = sum over key tiles j of  softmax(scale Q_i K_jᵀ) V_j                                     (not attention)

Why it is faster. Thirteen launches for each tile become one for the whole call.

Why it is wrong. Each tile is normalised on its own, so each row's weights sum to the number of tiles instead of 1. With
one tile (N <= 64) it is attention; with two the error is as large as the result. It is kept to be compared with
step08_triton_online.py, where nine lines stand for two.

Limits: N a multiple of 64; d 16, 32, 64 or 128; no causal; no lse (`None` is returned); forward only.
"""
# pyright: reportInvalidTypeForm=false

import functools

from ._host.triton_or_not import tl, triton, whole_tiles

BLOCK_M = BLOCK_N = 64


@triton.jit
def kernel(
    Q, K, V, O, N, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, D)  # [D]
    q = tl.load(Q + rows[:, None] * D + cols[None, :])  # [BLOCK_M, D]
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        k = tl.load(K + keys[:, None] * D + cols[None, :])  # [BLOCK_N, D]
        v = tl.load(V + keys[:, None] * D + cols[None, :])  # [BLOCK_N, D]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        p = tl.exp(s - tl.max(s, axis=1)[:, None])  # [BLOCK_M, BLOCK_N]
        p = p / tl.sum(p, axis=1)[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    tl.store(O + rows[:, None] * D + cols[None, :], acc.to(q.dtype))


# Host code: skip it when you learn.
attention = functools.partial(whole_tiles, kernel, BLOCK_M)
