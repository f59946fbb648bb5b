"""Block-sparse FlashAttention: step 5 with a mask of whole tiles; tiles that it hides are neither read nor computed.

`blocks` is a bool matrix [N / Br, N / Bc]: whether a block of rows sees a block of keys. Where it says no, the tile's
scores are -inf and its P is 0, so that the loop can go on to the next tile. With s the share of tiles that are left,

    elements moved = Theta(N d + s N² d² / M)

(Dao et al., "FlashAttention", 2022, section 3.3, algorithm 5 and proposition 4.) Nothing is approximated but the mask:
for the tiles it keeps, this is exact attention. Masks of use are fixed, so that they cost nothing to find: a local
window with a few global blocks, or the butterfly, in which block i sees the blocks whose number differs from i in at
most one bit, log2 of their number and one. Any two blocks are then connected within log2 steps, or layers.

`python -m flashtile_ladder.related.block_sparse` prints the share of tiles, the bytes and the error of each mask.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .._host.shapes import one_shape
from ..measure.counted import count

BLOCK_M, BLOCK_N = 64, 64
Matrix = Any  # a Tensor, or a Counted one


def attention(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    blocks: Tensor,
    scale: float | None = None,
    *,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> tuple[Matrix, Matrix]:
    """`[N, d]` and bool `[ceil(N / block_m), ceil(N / block_n)]` to out `[N, d]` and lse `[N]`, keys outside.

    A row that sees no tile gives 0 and -inf.

    Raises:
        ValueError: `blocks` has another shape.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    row_blocks, key_blocks = ([slice(i, min(i + b, n)) for i in range(0, n, b)] for b in (block_m, block_n))
    if tuple(blocks.shape) != (len(row_blocks), len(key_blocks)):
        raise ValueError(f"blocks is {tuple(blocks.shape)}; here it is ({len(row_blocks)}, {len(key_blocks)})")
    out, l, m = q.new_zeros((n, d)), q.new_zeros((n,)), q.new_full((n,), -math.inf)
    lse = q.new_empty((n,))
    for j, keys in enumerate(key_blocks):
        if not blocks[:, j].any():
            continue
        k_j, v_j = k[keys], v[keys]  # [Bc, d]
        for i, rows in enumerate(row_blocks):
            if not blocks[i, j]:
                continue  # the one line that algorithm 5 adds to algorithm 1
            q_i, o_i, l_i, m_i = q[rows], out[rows], l[rows], m[rows]  # [Br, d], [Br, d], [Br], [Br]
            s = scale * (q_i @ k_j.mT)  # [Br, Bc]
            m_new = torch.maximum(m_i, s.amax(dim=1))  # [Br]
            p = torch.exp(s - m_new[:, None])  # [Br, Bc]
            old = l_i * torch.exp(m_i - m_new)  # [Br]
            l_new = old + p.sum(dim=1)  # [Br]
            out[rows] = (old[:, None] * o_i + p @ v_j) / l_new[:, None]
            l[rows], m[rows] = l_new, m_new
    for rows in row_blocks:
        lse[rows] = m[rows] + torch.log(l[rows])
    return out, lse


def bytes_moved(n: int, d: int, blocks: Tensor, itemsize: int = 4) -> int:
    """Bytes of `attention` if blocks divide N: of the keys that any row sees, of each tile, and of begin and end."""
    rows, keys = (n // size for size in blocks.shape)
    columns, tiles = int(blocks.any(dim=0).sum()), int(blocks.sum())
    tile = 3 * rows * d + 4 * rows  # q and o, l and m are read; o, l and m are written
    ends = n * d + 2 * n + 3 * n  # zeros of o, l, -inf of m; then l and m to lse
    return itemsize * (2 * columns * keys * d + tiles * tile + ends)


def local_and_global(n: int, window: int = 1, first: int = 1) -> Tensor:
    """bool `[n, n]`: blocks at most `window` apart, and the `first` blocks, which see all and which all see."""
    i = torch.arange(n)
    return ((i[:, None] - i).abs() <= window) | (i < first) | (i[:, None] < first)


def butterfly(n: int) -> Tensor:
    """bool `[n, n]`: blocks whose numbers differ in at most one bit."""
    i = torch.arange(n)
    differing = i[:, None] ^ i
    return (differing & (differing - 1)) == 0


def exact(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_m: int = BLOCK_M, block_n: int = BLOCK_N) -> Tensor:
    """out `[N, d]` in float64, with the mask of all pairs."""
    n, d = q.shape
    visible = blocks.repeat_interleave(block_m, 0).repeat_interleave(block_n, 1)[:n, :n]
    s = (q.double() @ k.double().mT / math.sqrt(d)).masked_fill(~visible, -math.inf)
    return torch.softmax(s, dim=1).nan_to_num(0) @ v.double()


def main() -> None:
    n, d = 1024, 64
    q, k, v = torch.randn(3, n, d)
    number = n // BLOCK_M
    masks = {
        "all": torch.ones(number, number, dtype=torch.bool),
        "butterfly": butterfly(number),
        "local and global": local_and_global(number),
    }
    for name, blocks in masks.items():
        counts, (out, _) = count(attention, [q, k, v], blocks)
        error = (out - exact(q, k, v, blocks)).abs().max()
        share = float(blocks.double().mean())
        print(f"{name:>16}: {share:4.0%} of the tiles, {sum(counts.values()):>10,} bytes, error {error:.1e}")


if __name__ == "__main__":
    main()
