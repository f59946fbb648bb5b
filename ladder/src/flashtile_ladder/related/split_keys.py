"""Split-Q against split-K: what the warps of a block share out, rows or keys.

A block of 4 warps has 64 rows, and goes through tiles of 64 keys. There are two ways to give each warp a quarter:

    split-Q    16 rows, and all 64 keys of a tile (FlashAttention-2; share_kv.py with one stage). A warp's rows are its
               own: m, l and acc stay in its registers, and warps exchange nothing
    split-K    16 keys of each tile, and all 64 rows (here). Each warp has a state of every row, so four times the
               accumulators, and the four states are merged through shared memory: m and l, then one acc after another

Bytes from HBM and operations are the same. Shared memory is read differently: split-Q brings its Q once and all of K
and V for each tile, split-K its part of K and V and all of Q. FlashAttention-1's kernel split keys and merged in each
tile; here it is once, at the end, as Flash-Decoding does between blocks where there are too few rows to fill a GPU.

The kernel is split_keys.cu in this folder. float16 or bfloat16, d 16, 32 or 64, since acc takes 2 d registers of each
thread. On a GPU, `python -m flashtile_ladder.related.split_keys` prints times and errors of both.
"""

import torch
from torch import Tensor

from .._host.cuda_steps import split_keys
from ..measure.memory_patterns import fastest_ms
from . import share_kv


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, split: str = "keys"
) -> tuple[Tensor, Tensor]:
    """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]`, where k and v may have
    fewer heads.

    `split` is "keys", or "rows" for share_kv.py's kernel with the same tile.

    Raises:
        CudaUnavailableError: there is no GPU, or no compiler.
        ValueError: a shape or dtype outside the limits above.
    """
    if split == "rows":
        return share_kv.attention(q, k, v, causal, scale, block_m=64, block_n=64)
    return split_keys.attention(q, k, v, causal, scale)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v = torch.randn(3, 1, 16, 4096, 64, device=device).half()
    exact = torch.softmax(q[0, 0].double() @ k[0, 0].double().mT / 8, dim=1) @ v[0, 0].double()  # [N, d]
    for split in ("rows", "keys"):
        error = (attention(q, k, v, split=split)[0][0, 0] - exact).abs().max()
        ms = fastest_ms(lambda split=split: attention(q, k, v, split=split))
        print(f"{split} to the warps: {ms:.3f} ms, 16 heads, N = 4096, d = 64; error {error:.1e}")


if __name__ == "__main__":
    from .._host.alone import guarded

    guarded(main)
