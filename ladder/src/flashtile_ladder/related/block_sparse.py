"""Block-sparse FlashAttention: step 5 with `blocks`, a mask of whole tiles; hidden ones are neither read nor computed.

`blocks` is a bool matrix [N / Br, N / Bc]: whether a block of rows sees a block of keys. Where it says no, the tile's
scores are -inf and its P is 0, so that the loop can go on to the next tile. With s the share of tiles that are left,

    elements moved = Theta(N d + s N² d² / M)

(Dao et al., "FlashAttention", 2022, section 3.3, algorithm 5 and proposition 4.) Nothing is approximated but the mask:
for the tiles it keeps, this is exact attention. Masks of use are fixed, so that they cost nothing to find: a local
window with a few global blocks, or the butterfly, in which block i sees the blocks whose number differs from i in at
most one bit, log2 of their number and one. Any two blocks are then connected within log2 steps, or layers.

`python -m flashtile_ladder related.block_sparse` prints the share of tiles, the bytes and the error of each mask.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import step05_flash1
from ..measure.counted import count

BLOCK = 64  # rows and keys of a tile


def attention(blocks: Tensor, block: int = BLOCK) -> Callable[..., tuple[Tensor, Tensor]]:
    """Step 5's `attention` with this mask and square tiles, for a head dimension of at least `block`."""
    return lambda q, k, v: step05_flash1.attention(q, k, v, blocks=blocks, memory=4 * block * q.shape[1])


def bytes_moved(n: int, d: int, blocks: Tensor, itemsize: int = 4) -> int:
    """Bytes of step 5 if blocks divide N: of the keys that any row sees, of each tile, and of begin and end."""
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


def exact(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int = BLOCK) -> Tensor:
    """out `[N, d]` in float64, with the mask of all pairs."""
    n, d = q.shape
    visible = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :n]
    s = (q.double() @ k.double().mT / math.sqrt(d)).masked_fill(~visible, -math.inf)
    return torch.softmax(s, dim=1).nan_to_num(0) @ v.double()


def main() -> None:
    n, d = 1024, 64
    q, k, v = torch.randn(3, n, d)
    number = n // BLOCK
    masks = {
        "all": torch.ones(number, number, dtype=torch.bool),
        "butterfly": butterfly(number),
        "local and global": local_and_global(number),
    }
    for name, blocks in masks.items():
        counts, (out, _) = count(attention(blocks), [q, k, v])
        error = (out - exact(q, k, v, blocks)).abs().max()
        share = float(blocks.double().mean())
        print(f"{name:>16}: {share:4.0%} of the tiles, {sum(counts.values()):>10,} bytes, error {error:.1e}")
