"""Why tiles: a matrix product whose bytes are counted, for each size of tile. Tile 1 is the product by its definition.

C = A B with A [m, k] and B [k, n]. By the definition, an element of C needs a row of A and a column of B, 2 k numbers,
and every number of A is read n times, every number of B m times. A tile of C, [T, T], needs T rows and T columns, which
are read once for T² elements. So a number that is in the small memory serves T products in place of one:

    elements moved = ceil(n / T) m k  +  ceil(m / T) k n  +  m n           (reads of A, of B, writes of C)

In float32 that makes T / 4 operations for each byte, as long as T is small against m, n and k. The small memory has to
hold three tiles: M >= 3 T² elements. Flash attention is two such products with a softmax between them;
`chained` is the two products without it, in both orders of the loops: S = Q Kᵀ need not exist as a whole.

A GPU hides the time of the reads too: while one pair of tiles is multiplied, the next pair is on its way into a second
buffer (`cp.async` in step 9, `num_stages` in step 8). The bytes are the same.

`python -m flashtile_ladder related.tiled_matmul` prints bytes and errors for tiles of 1 to 16.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .._host.shapes import one_shape
from ..measure.counted import count
from ..step06_flash2 import cut

Matrix = Any  # a Tensor, or a Counted one


def matmul(a: Matrix, b: Matrix, tile: int) -> tuple[Matrix]:
    """`[m, k]` by `[k, n]` to `[m, n]`: rows and columns of C outside, tiles of the inner length inside."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty((m, n))
    for rows in cut(0, m, tile):
        for columns in cut(0, n, tile):
            acc = torch.zeros((rows.stop - rows.start, columns.stop - columns.start), dtype=a.dtype)
            for inner in cut(0, k, tile):
                acc += a[rows, inner] @ b[inner, columns]  # one read of each, T products for each number
            c[rows, columns] = acc
    return (c,)


def chained(q: Matrix, k: Matrix, v: Matrix, tile: int) -> tuple[Matrix]:
    """O = (Q Kᵀ) V, `[N, d]` each: row blocks outside, key blocks inside; S exists one tile at a time."""
    n, d = one_shape(q, k, v)
    out = q.new_empty((n, d))
    for rows in cut(0, n, tile):
        q_i = q[rows]  # [T, d], read once
        acc = torch.zeros((rows.stop - rows.start, d), dtype=q.dtype)
        for keys in cut(0, n, tile):
            acc += (q_i @ k[keys].mT) @ v[keys]  # without a softmax nothing has to be corrected
        out[rows] = acc
    return (out,)


def chained_keys_outside(q: Matrix, k: Matrix, v: Matrix, tile: int) -> tuple[Matrix]:
    """The same with key blocks outside, FlashAttention-1's order: K and V are read once, and O comes and goes."""
    n, d = one_shape(q, k, v)
    out = q.new_zeros((n, d))
    for keys in cut(0, n, tile):
        k_j, v_j = k[keys], v[keys]  # [T, d], read once
        for rows in cut(0, n, tile):
            out[rows] = out[rows] + (q[rows] @ k_j.mT) @ v_j
    return (out,)


def bytes_moved(m: int, k: int, n: int, tile: int, itemsize: int = 4) -> int:
    """Bytes of `matmul`."""
    return itemsize * (math.ceil(n / tile) * m * k + math.ceil(m / tile) * k * n + m * n)


def largest_tile(memory: int) -> int:
    """The largest T with three tiles in `memory` elements."""
    return math.isqrt(memory // 3)


def main() -> None:
    n = 16
    a, b = torch.randn(2, n, n)
    exact: Tensor = a.double() @ b.double()
    for tile in (1, 2, 4, 16):
        counts, (c,) = count(matmul, [a, b], tile)
        moved = sum(counts.values())
        print(
            f"T = {tile:>2}: {moved:>9,} bytes moved, formula {bytes_moved(n, n, n, tile):>9,}, "
            f"{2 * n**3 / moved:5.2f} operations for each byte, error {(c - exact).abs().max():.1e}"
        )
    print(f"192 KB of float32 hold three tiles of {largest_tile(48 * 1024)}")
