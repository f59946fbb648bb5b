"""Step 9, last of four. CUDA C++ on tensor cores: `mma.sync`, `ldmatrix`, `cp.async`, P kept in registers.

The change. The products of step 6's tiles are instructions: `mma.sync` multiplies 16 x 16 by 16 x 8 numbers of 16
bits in one go, with sums in float32. The 32 lanes of a warp hold the operands between them, each lane a few numbers at
places that the instruction prescribes (step09_instructions.cuh says which).

- `ldmatrix` brings tiles from shared memory to these places, four 8 x 8 blocks at a time, transposed on the way or not.
  Kᵀ needs no transposing, since a row of K is a column of Kᵀ; V does.
- P stays in registers. The places that two blocks of S = Q Kᵀ have as a result are the places that a block of P needs
  as an operand of P V: exp, round to 16 bits, multiply.
- K and V share one buffer. When S is made, K is no longer needed, so V is copied over it by `cp.async`, which goes past
  the registers and makes no thread wait, and the softmax runs in the meantime. Q passed through the same buffer, once.

    S = Q Kᵀ  |  V: copied  |  V is there  |  acc = alpha acc + P V
              |  P = 2^(S scale log2 e - m)

Why it is faster. A tensor core does in one instruction what took a warp 64 multiply-adds for each lane. What it still
lacks of a product's kernel: the copy of the next K runs while nothing is computed (two buffers would hide it), and
Hopper's larger instructions, which read their operands from shared memory by themselves.

The kernel is step09_cuda_tensor_cores.cu in this folder; the Python below is host code, which a learner may skip.
float16 or bfloat16; d 16, 32, 64 or 128; a GPU of compute capability 8.0 or above.
"""

# Host code: skip it when you learn.

import torch
from torch import Tensor

from . import cuda_launch
from .cuda_compile import Source, source

BLOCK, THREADS = 64, 128
HEAD_DIMS = (16, 32, 64, 128)
NAME = "attention_tensor_cores"
PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def source_for(d: int, dtype: torch.dtype = torch.float16) -> Source:
    return source("step09_cuda_tensor_cores.cu", HEAD_DIM=d, HALF=PTX_TYPES[dtype])


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]`, where k and v may have
    fewer heads.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=tuple(PTX_TYPES))
    grid = cuda_launch.blocks(call.n, BLOCK), call.heads
    compiled = source_for(q.shape[-1], q.dtype)
    cuda_launch.launch(compiled, NAME, grid, (THREADS, 1), *call.arguments)
    return call.out, call.lse


if __name__ == "__main__":
    from .alone import run

    run(__file__)
