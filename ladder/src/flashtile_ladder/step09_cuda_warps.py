"""Step 9, second of four. CUDA C++: one block for each query position, reductions by warp shuffles.

The change. Rows are blocks of their own, so a call of one head has N of them. The 32 threads of a warp, its lanes,
share a key: lane t multiplies the numbers t, t + 32, ... of q and k, and five exchanges between registers of the warp,
`__shfl_xor_sync`, add the products up, without shared memory and without a barrier:

    x + x of the lane at distance 1, then 2, 4, 8, 16:    every lane has the sum of all 32

Each of four warps keeps the online softmax of every fourth key, and step 1's merge joins the four at the end:

    m = max_w m_w        l = sum_w l_w exp(m_w - m)        O = sum_w acc_w exp(m_w - m) / l

Why it is faster. All of the GPU has work, and 32 lanes read 32 neighbouring numbers, which is one access to memory
where the kernel before made 32. Heads come in groups that share K and V, and causal ends the loop at the row.
It lacks this: each row reads all of K and V for itself, N times in all, and five exchanges for each key are dear.

The kernel is step09_cuda_warps.cu in this folder; the Python below is host code, which a learner may skip. float32, d
up to 256.
"""

# Host code: skip it when you learn.

import torch
from torch import Tensor

from . import cuda_launch
from .cuda_compile import Source, source

WARPS = 4
HEAD_DIMS = tuple(range(1, 257))
NAME = "attention_warps"


def source_for(d: int, dtype: torch.dtype = torch.float32, *flags: str) -> Source:
    return source("step09_cuda_warps.cu", *flags, HEAD_DIM=d, WARPS=WARPS)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    flags: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`; or `[B, heads, N, d]`, where k and v may have fewer heads.

    `flags` are the compiler's, such as `--fmad=false`.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=(torch.float32,))
    compiled = source_for(q.shape[-1], torch.float32, *flags)
    cuda_launch.launch(compiled, NAME, (call.n, call.heads), (32 * WARPS, 1), *call.arguments)
    return call.out, call.lse


if __name__ == "__main__":
    from .alone import run

    run(__file__)
