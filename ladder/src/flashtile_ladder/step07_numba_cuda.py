"""Step 7, second half. Numba for CUDA: one thread for each row, K and V tiles in shared memory.

The change. The loop over row blocks of the first half becomes a grid of thread blocks, and the loop over the rows of
a block becomes its threads. Each thread keeps its row's q, m, l and acc to itself. What all of them read, a tile of K
and of V, is brought into shared memory by all of them together, a barrier before and after:

    for each tile of BLOCK keys:
        thread t copies row t of the tile of K and of V        barrier
        each thread: online softmax over the tile's keys       barrier

Types. Numba computes in the wider type of two operands, and a Python float is float64. A GPU is slow in float64: so the
scale is a float32 argument, and sums begin as float32(0.0).

Why it is faster. Rows run in parallel, and each number of K and V that comes from HBM serves BLOCK rows.
It lacks this: one thread's scalar products leave the tensor cores idle. Step 8's products of tiles can use them.

Needs Numba (`pip install numba`), float32. On a GPU q, k, v are there; without one, set NUMBA_ENABLE_CUDASIM=1 before
Python starts, and Numba's simulator runs each thread as a Python thread on tensors of the CPU: for small N only.
"""

import functools
import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._host.shapes import one_shape
from .step07_numba import NumbaUnavailableError, require_numba

cuda: Any
float32: Any
try:  # at the top of the module, where Numba's simulator looks for what it has to stand in for
    from numba import cuda, float32  # pyright: ignore[reportMissingImports]
except ImportError:
    cuda = float32 = None

BLOCK = 32  # threads of a block: rows, and keys of a tile


@functools.cache
def kernel(d: int) -> Any:
    """The kernel for one head dimension: shared and private arrays have sizes that are known when it is compiled."""

    @cuda.jit
    def run(q: Any, k: Any, v: Any, scale: float, causal: bool, out: Any, lse: Any) -> None:
        n = q.shape[0]
        thread = cuda.threadIdx.x
        first = cuda.blockIdx.x * BLOCK
        row = first + thread
        k_tile = cuda.shared.array((BLOCK, d), float32)
        v_tile = cuda.shared.array((BLOCK, d), float32)
        acc = cuda.local.array(d, float32)
        m, l = float32(-math.inf), float32(0.0)
        for c in range(d):
            acc[c] = 0.0
        for start in range(0, min(first + BLOCK, n) if causal else n, BLOCK):
            if start + thread < n:
                for c in range(d):
                    k_tile[thread, c] = k[start + thread, c]
                    v_tile[thread, c] = v[start + thread, c]
            cuda.syncthreads()  # the tile is there
            if row < n:
                for j in range(min(BLOCK, n - start)):
                    if not causal or start + j <= row:
                        x = float32(0.0)  # 0.0 alone is float64, and makes every sum with it float64
                        for c in range(d):
                            x += q[row, c] * k_tile[j, c]
                        x *= scale
                        m_new = max(m, x)
                        alpha, p = math.exp(m - m_new), math.exp(x - m_new)
                        l = l * alpha + p
                        for c in range(d):
                            acc[c] = acc[c] * alpha + p * v_tile[j, c]
                        m = m_new
            cuda.syncthreads()  # no thread reads it any more
        if row < n:
            for c in range(d):
                out[row, c] = acc[c] / l
            lse[row] = m + math.log(l)

    return run


def unavailable(device: torch.device) -> str | None:
    """Why the kernel does not run on tensors of the device; `None` if it does. (Numba itself is asked for before.)"""
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
    if device.type == ("cpu" if simulated else "cuda"):
        return None
    if simulated:
        return f"NUMBA_ENABLE_CUDASIM=1 takes tensors on the CPU, and these are on {device}"
    return (
        f"the tensors are on {device}, and Numba compiles this kernel for NVIDIA GPUs alone. Move them to one, or set "
        "NUMBA_ENABLE_CUDASIM=1 before Python starts: then Numba's simulator runs the kernel on CPU tensors"
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` float32 to out `[N, d]` and lse `[N]`.

    Raises:
        NumbaUnavailableError: Numba is not installed, or there is neither a GPU nor its simulator.
    """
    require_numba()
    reason = unavailable(q.device)
    if reason is not None:
        raise NumbaUnavailableError(f"step 7 of the ladder cannot run this call: {reason}")
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.empty((n, d), device=q.device), torch.empty(n, device=q.device)
    tensors = [x.detach().contiguous() for x in (q, k, v)]
    arrays = [x.numpy() if x.device.type == "cpu" else x for x in (*tensors, out, lse)]  # numba takes torch's on a GPU
    blocks = (n + BLOCK - 1) // BLOCK
    kernel(d)[blocks, BLOCK](*arrays[:3], np.float32(scale), causal, *arrays[3:])
    return out, lse


if __name__ == "__main__":
    from ._host.alone import run

    raise SystemExit(run(__file__))
