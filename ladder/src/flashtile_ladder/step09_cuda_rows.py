"""Step 9, first of four. CUDA C++: one block for each head, one thread for each row, keys outside.

The change. Triton's programs own tiles and never mention a thread; here each thread is written out. This is step 5,
FlashAttention-1, as a kernel: the outer loop takes a block of K and V into shared memory, and the inner one brings all
rows past it, thread t taking the rows t, t + 128, ... With l O what a row had before it was normalised,

    acc = l O;   for each key j of the block:   m_new = max(m, x_j)      alpha = exp(m - m_new)
                                                l = alpha l + exp(x_j - m_new)
                                                acc = alpha acc + exp(x_j - m_new) v_j
    O = acc / l

and O, l and m go back to HBM after each block.

Why it is leaner than standard attention: neither S nor P is in HBM. Why it is slow: one block for each head
leaves nearly all of a GPU idle, threads that read rows of their own read D numbers apart, and the products run on the
ordinary units. The next three kernels take these up in turn.

The kernel is step09_cuda_rows.cu in this folder; the Python below is host code, which a learner may skip. float32, d
16, 32 or 64: q and acc of a row are registers.
"""

# Host code: skip it when you learn.

import math

import torch
from torch import Tensor

from . import cuda_launch
from .cuda_compile import Source, source

THREADS, BLOCK_N = 128, 32
HEAD_DIMS = (16, 32, 64)
NAME = "attention_rows"


def source_for(d: int, dtype: torch.dtype = torch.float32) -> Source:
    return source("step09_cuda_rows.cu", HEAD_DIM=d, BLOCK_N=BLOCK_N)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`; or `[B, heads, N, d]`, where k and v may have fewer heads.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=(torch.float32,))
    m, l = torch.full_like(call.lse, -math.inf), torch.zeros_like(call.lse)  # [heads, N]
    call.out.zero_()
    compiled = source_for(q.shape[-1])
    cuda_launch.launch(compiled, NAME, (1, call.heads), (THREADS, 1), *call.arguments, m, l)
    return call.out, call.lse


if __name__ == "__main__":
    from .alone import run

    run(__file__)
