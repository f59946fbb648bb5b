"""Step 9, third of four. CUDA C++: 32 x 32 threads, tiles of 64 rows and 32 keys, arrays of registers.

The change. A block takes 64 rows at a time, as FlashAttention-2 does (step 6), so K and V are read N / 64 times and
not N times. Thread (x, y) has the rows y and y + 32 of the tile, and of each of them one score and d / 32 columns of
the accumulator, in small arrays of registers:

    S[y + 32 i, x] = q[y + 32 i] . k[x]              i = 0, 1
    acc[y + 32 i, x + 32 c] += sum_j P[y + 32 i, j] v[j, x + 32 c]

Why it is faster. Each tile of 64 rows is a block: 16 heads of 4,096 rows are 1,024 blocks, where the first kernel has
16 for 132 multiprocessors. A row of S lies across a warp, so its maximum and its sum take five exchanges for 32 keys.
What two rows of registers do not give is fewer reads of shared memory: a product of R rows by C columns of registers
takes R + C reads for R C products, which is 3 for 2 here, and 1 for 1 in the first kernel, whose row of q is in
registers. Tiles of registers pay when they are larger: 16 reads for 64 products at 8 x 8.

Why it is easy to get wrong. Every index has three parts: which tile, which thread, which register. `BUGS` has three
mix-ups of these parts; each computes right results for some problems, and the page shows which test sees it.

The kernel is step09_cuda_registers.cu in this folder; the Python below is host code, which a learner may skip. float32,
d 16, 32 or 64: more does not fit 48 KB.
"""

# Host code: skip it when you learn.

from typing import NamedTuple

import torch
from torch import Tensor

from . import cuda_launch
from .cuda_compile import Source, source

BLOCK, ROWS = 32, 2
HEAD_DIMS = (16, 32, 64)
NAME = "attention_registers"


class Bug(NamedTuple):
    """A mix-up of indices: the text of the kernel, and the wrong one in its place."""

    right: str
    wrong: str
    hidden: str  # problems that it computes right
    seen: str  # those that it does not


BUGS = {
    "register": Bug(
        "acc[i][c] *= alpha;",
        "acc[0][c] *= alpha;",
        "one tile of keys: the accumulator is still 0",
        "N above 32: one row is corrected twice, the other never",
    ),
    "key as row": Bug(
        "key >= n",
        "row >= n",
        "N a multiple of 32; causal, which hides these keys itself",
        "a last tile of keys that is partial: its zeros take part in the softmax",
    ),
    "tile": Bug(
        "key > row",
        "x > y",
        "one tile of keys; attention that is not causal",
        "causal, N above 32: the mask of the first tile is taken for all",
    ),
}


def source_for(d: int, dtype: torch.dtype = torch.float32, bug: str | None = None) -> Source:
    replaced = None if bug is None else (BUGS[bug].right, BUGS[bug].wrong)
    return source("step09_cuda_registers.cu", replaced=replaced, HEAD_DIM=d, ROWS=ROWS)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, bug: str | None = None
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` and lse `[N]`; or `[B, heads, N, d]`, where k and v may have fewer heads.

    With `bug`, a name of `BUGS`, the results are wrong as it says.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=(torch.float32,))
    grid = cuda_launch.blocks(call.n, BLOCK * ROWS), call.heads
    compiled = source_for(q.shape[-1], torch.float32, bug)
    cuda_launch.launch(compiled, NAME, grid, (BLOCK, BLOCK), *call.arguments)
    return call.out, call.lse


if __name__ == "__main__":
    from .alone import run

    run(__file__)
