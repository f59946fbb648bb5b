"""Tiles above 48 KB of shared memory: step 9's tensor-core kernel at d = 256, with 128 rows, with two stages.

A block may have 48 KB of shared memory as arrays of a known size. A larger tile is one array without a size,
`extern __shared__`; the launch says how many bytes it has, after the kernel has been allowed that many
(`cuFuncSetAttribute`, in CUDA's runtime `cudaFuncSetAttribute`). cuda_launch.py does both, and compares with the most
that the GPU allows a block. shared_memory.py has the bytes of a tile as a formula: this kernel takes exactly those.

    stages 1    K, then V, in one buffer: the copy of V runs during the softmax, that of K during nothing
    stages 2    a buffer each: V is copied during S and the softmax, the next K during P V, and two barriers for each
                tile do where one stage takes four

Q stays in shared memory, since at d = 256 the accumulator takes 128 registers of each thread. d may be any multiple of
8: a tile is as wide as the next multiple of 16, and columns that the head lacks are zeros.

The kernel is share_kv.cu in this folder. float16 or bfloat16; d in multiples of 8 up to 256; a GPU of compute
capability 8.0 or above. On a GPU, `python -m flashtile_ladder.related.share_kv` prints bytes, times and errors of some
tiles.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .._host import cuda_launch
from .._host.cuda_compile import Source, source
from .._host.cuda_steps import PTX_TYPES
from ..measure.memory_patterns import fastest_ms
from .shared_memory import KB, Tile

HEAD_DIMS = tuple(range(8, 257, 8))
NAME = "attention_share_kv"
TILES = (  # those of the table `shared` and of this file as a program
    Tile(64, 64, 64),
    Tile(64, 64, 64, stages=2),
    Tile(128, 64, 64, stages=2),
    Tile(64, 64, 128),
    Tile(64, 64, 128, stages=2),
    Tile(128, 64, 128, stages=2),
    Tile(64, 64, 256),
    Tile(64, 32, 256),
    Tile(128, 32, 256),
    Tile(64, 32, 256, stages=2),
    Tile(128, 32, 256, stages=2),
)


def source_for(tile: Tile, dtype: torch.dtype = torch.float16) -> Source:
    """The kernel for a tile, whose `d` is the head dimension."""
    return source(
        "related/share_kv.cu",
        HEAD_DIM=tile.d,
        HALF=PTX_TYPES[dtype],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        STAGES=tile.stages,
    )


def shared_bytes(tile: Tile) -> int:
    """Bytes of dynamic shared memory: the formula, for d rounded up to 16."""
    return tile._replace(d=math.ceil(tile.d / 16) * 16).bytes


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    block_m: int = 64,
    block_n: int = 64,
    stages: int = 1,
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]`, where k and v may have
    fewer heads.

    `block_m` and `block_n` are multiples of 16, `stages` is 1 or 2.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above, or a tile that is larger than the GPU allows.
    """
    if block_m % 16 or not 0 < block_m <= 512 or block_n % 16 or block_n <= 0 or stages not in (1, 2):
        raise ValueError(f"tiles of {block_m} x {block_n}, {stages} stages: multiples of 16, and 1 or 2 stages")
    call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=HEAD_DIMS, dtypes=tuple(PTX_TYPES))
    tile = Tile(block_m, block_n, q.shape[-1], stages)
    grid, threads = (cuda_launch.blocks(call.n, block_m), call.heads), (2 * block_m, 1)
    compiled = source_for(tile, q.dtype)
    cuda_launch.launch(compiled, NAME, grid, threads, *call.arguments, shared_bytes=shared_bytes(tile))
    return call.out, call.lse


def keywords(tile: Tile) -> dict[str, Any]:
    """`attention`'s keywords for a tile."""
    return {"block_m": tile.rows, "block_n": tile.keys, "stages": tile.stages}


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for tile in TILES:
        q, k, v = torch.randn(3, 1, 16, 2048, tile.d, device=device).half()
        exact = torch.softmax(q[0, 0].double() @ k[0, 0].double().mT / math.sqrt(tile.d), dim=1) @ v[0, 0].double()
        words = f"{tile.rows:>3} x {tile.keys}, d = {tile.d:>3}, stages {tile.stages}: {tile.bytes / KB:5.1f} KB"
        try:
            error = (attention(q, k, v, **keywords(tile))[0][0, 0] - exact).abs().max()
        except ValueError as problem:  # larger than this GPU allows
            print(f"{words}: {problem}")
            continue
        ms = fastest_ms(lambda given=(q, k, v), tile=tile: attention(*given, **keywords(tile)))
        print(f"{words}, {ms:.3f} ms, error {error:.1e}")


if __name__ == "__main__":
    from .._host.alone import guarded

    guarded(main)
