"""Step 7, second half. Numba for CUDA: one thread for each row, K and V tiles in shared memory.

The change. The loop over row blocks of the first half becomes a grid of thread blocks, and the loop over the rows of
a block becomes its threads. Each thread keeps its row's q, m, l and acc to itself. What all of them read, a tile of K
and of V, is brought into shared memory by all of them together, a barrier before and after:

    for each tile of BLOCK keys:
        thread t copies row t of the tile of K and of V        barrier
        each thread: online softmax over the tile's keys       barrier

Registers. A thread keeps its q and its accumulator in private arrays, and takes KEYS keys at a time, whose scores are
a third one: a tile of registers, in which a number of q serves KEYS products and the accumulator is corrected once for
KEYS keys. Private arrays are registers if every index is a constant once loops are unrolled, as those of `range(d)` and
`range(KEYS)` are. The compiler unrolls up to a size: with 4 keys and d = 64 it gives up, and q and the accumulator lie
in local memory, 512 bytes of HBM behind the caches. With 2 it takes 168 registers and none.

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

# Names that NumPy 2 has dropped and that versions of Numba of that time still ask for when they are imported.
for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
    if not hasattr(np, old):
        setattr(np, old, getattr(np, new))

cuda: Any
float32: Any
try:  # at the top of the module, where Numba's simulator looks for what it has to stand in for
    from numba import cuda, float32  # pyright: ignore[reportMissingImports]
except ImportError:
    cuda = float32 = None

BLOCK = 32  # threads of a block: rows, and keys of a tile
KEYS = 2  # that a thread takes at a time; divides BLOCK


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
        q_row, acc = cuda.local.array(d, float32), cuda.local.array(d, float32)
        s = cuda.local.array(KEYS, float32)  # scores, then weights, of some keys
        m, l = float32(-math.inf), float32(0.0)
        for c in range(d):
            q_row[c] = q[row, c] * scale if row < n else float32(0.0)
            acc[c] = 0.0
        end = n  # the first key that no row of the block sees; with `if`, since Numba 0.68 has no min for a GPU
        if causal and first + BLOCK < n:
            end = first + BLOCK
        for start in range(0, end, BLOCK):
            for c in range(d):  # zeros beyond N: a weight of 0 times what was there before may be NaN
                k_tile[thread, c] = k[start + thread, c] if start + thread < n else float32(0.0)
                v_tile[thread, c] = v[start + thread, c] if start + thread < n else float32(0.0)
            cuda.syncthreads()  # the tile is there
            last = row if causal else n - 1  # the row's last key
            if row >= n:
                last = -1
            for first_key in range(0, BLOCK, KEYS):  # the online softmax of step 6, KEYS keys at a time
                if start + first_key > last:
                    break
                m_new = m
                for j in range(KEYS):
                    s[j] = 0.0
                for c in range(d):
                    for j in range(KEYS):
                        s[j] += q_row[c] * k_tile[first_key + j, c]
                for j in range(KEYS):
                    if start + first_key + j > last:
                        s[j] = -math.inf
                    if s[j] > m_new:
                        m_new = s[j]
                alpha = math.exp(m - m_new)
                l *= alpha
                for j in range(KEYS):
                    s[j] = math.exp(s[j] - m_new)
                    l += s[j]
                for c in range(d):
                    acc[c] *= alpha
                    for j in range(KEYS):
                        acc[c] += s[j] * v_tile[first_key + j, c]
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
