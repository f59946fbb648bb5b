"""The running log-sum-exp as a CUDA kernel: a thread for each row, tiles of 32 keys in shared memory.

Unlike step09_cuda_rows.cu, rows are outside: a block has 128 of them and q, acc, m and lse of a row stay in registers;
the 32 scores of a tile are in shared memory. Each thread takes the tile's maximum and sum by itself, so there is no
reduction across threads, and takes one logarithm for each tile.

The kernel is in running_lse.cu next to this file. float32, d 16, 32 or 64. It is compiled and launched as step 9 is.
On a GPU, `python -m flashtile_ladder.running_lse_cuda` prints errors of lse next to those of step 9's warps.
"""

import torch
from torch import Tensor

from . import cuda_launch, step09_cuda_warps
from .cuda_compile import Source, source

THREADS, BLOCK_N = 128, 32
HEAD_DIMS = (16, 32, 64)
NAME = "attention_running_lse"


def source_for(d: int) -> Source:
    """The kernel for head dimension `d`."""
    return source("running_lse.cu", HEAD_DIM=d, BLOCK_N=BLOCK_N, THREADS=THREADS)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`; or `[B, heads, N, d]`, where k and v may have fewer heads.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=(torch.float32,))
    grid = cuda_launch.blocks(call.n, THREADS), call.heads
    cuda_launch.launch(source_for(q.shape[-1]), NAME, grid, (THREADS, 1), *call.arguments)
    return call.out, call.lse


def main() -> None:
    for n in (1024, 16384, 131072):
        q, k, v = torch.randn(3, n, 16, device="cuda" if torch.cuda.is_available() else "cpu")
        exact = torch.logsumexp(q[:128].double() @ k.double().mT / 4, dim=1)  # [128]
        running, plain = (f(q, k, v)[1][:128] for f in (attention, step09_cuda_warps.attention))
        errors = [float((lse - exact).abs().max()) for lse in (running, plain)]
        print(f"N = {n:>7,}: error of the running log-sum-exp {errors[0]:.1e}, of step 9 {errors[1]:.1e}")


if __name__ == "__main__":
    from .alone import guarded

    guarded(main)
