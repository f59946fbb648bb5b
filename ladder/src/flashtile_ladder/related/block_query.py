"""A CUDA kernel with a block for each query, and two ways to reduce over its threads: a tree or warp shuffles.

q, a tile of 64 scores and the output lie in shared memory, and 128 threads share a query. In each tile, thread t < 64
takes the score of key t; then all threads need the tile's maximum and its sum. Two ways:

    tree       each thread writes its number; half of them add the other half's; again, until one is left:
               log2(128) = 7 levels, each with a barrier of the whole block. 9 barriers, about 3 x 128 accesses
    shuffles   in a warp, lane t adds the number of lane t xor 16, 8, 4, 2, 1, register to register, without a
               barrier; the 4 warps exchange one number each. 2 barriers, 4 writes and 4 reads by each thread

A barrier costs tens of cycles, and a tile has two reductions, so the tree has 18 where shuffles have 4.
step09_cuda_warps.cu needs neither for a score, since its warps have keys of their own.

Queries and keys may differ in number (`tgt` and `src` lengths of a decoder's cross attention). q, k and v may have 16
bits; scores, sums and the output in shared memory are float32. One head, d up to 256. The kernel is in block_query.cu
next to this file. On a GPU, `python -m flashtile_ladder related.block_query` prints times and errors of both
reductions.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .._host import cuda_launch
from .._host.cuda_compile import CudaUnavailableError, Source, source
from .._host.cuda_steps import PTX_TYPES
from .._host.shapes import two_lengths
from ..measure.memory_patterns import fastest_ms

THREADS, KEYS, LARGEST_D = 128, 64, 256
NAME = "attention_block_query"
DTYPES = (torch.float32, *PTX_TYPES)


def source_for(d: int, reduction: str, dtype: torch.dtype = torch.float32) -> Source:
    """The kernel for head dimension `d`; `reduction` is "tree" or "shuffles"."""
    half: dict[str, Any] = {} if dtype is torch.float32 else {"HALF": PTX_TYPES[dtype]}
    return source("related/block_query.cu", HEAD_DIM=d, TREE={"tree": 1, "shuffles": 0}[reduction], **half)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, reduction: str = "shuffles"
) -> tuple[Tensor, Tensor]:
    """q `[Nq, d]`, k and v `[Nk, d]` to out `[Nq, d]` in their dtype and lse `[Nq]` in float32.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: shapes or dtypes outside the limits above, or causal with other lengths of q and k.
    """
    reason = cuda_launch.unavailable(q.device, q.dtype)
    if reason is not None:
        raise CudaUnavailableError(f"this file of the ladder is CUDA C++, which cannot run this call: {reason}")
    two_lengths(q, k, v, largest_d=LARGEST_D, dtypes=DTYPES, causal=causal)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), torch.empty(len(q), device=q.device)
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else float(scale)
    arguments = q, k, v, out, lse, len(k), scale, int(causal)
    cuda_launch.launch(source_for(q.shape[1], reduction, q.dtype), NAME, (len(q), 1), (THREADS, 1), *arguments)
    return out, lse


def main() -> None:
    q, k, v = torch.randn(3, 4096, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    exact = torch.softmax(q.double() @ k.double().mT / 8, dim=1) @ v.double()  # [N, d]
    for reduction in ("tree", "shuffles"):
        error = (attention(q, k, v, reduction=reduction)[0] - exact).abs().max()
        ms = fastest_ms(lambda chosen=reduction: attention(q, k, v, reduction=chosen))
        print(f"{reduction}: {ms:.3f} ms at N = 4096, d = 64, error {error:.1e}")
