"""Order of a tile's blocks of keys: steps `n` go down from `hi - 1` to `lo`, and so do blocks, as the diagonal is last.

With a score_mod that reads distances, the first block is that of the diagonal, and the last ones follow the first ones.
Biases that fall with the distance let scores grow up to the diagonal: from the last block on, row_max would change in
each of the steps that lead there, and each change repeats exponentials and rescales acc.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_block(tile, inputs, CONFIG: gl.constexpr):
    """The block of keys of a tile's first step. `inputs` are a score_mod's."""
    if CONFIG.by_distance:
        last_row = tile.first_row + (CONFIG.block_m - 1)
        diagonal = gl.maximum(last_row + (inputs.i0 - inputs.j0), 0) // CONFIG.block_n
        return gl.minimum(gl.maximum(diagonal, tile.lo), tile.hi - 1)
    else:
        return tile.hi - 1


@gluon.jit
def block_of_step(n, first, tile, CONFIG: gl.constexpr):
    """The block of keys of step `n`, `lo <= n < hi`, for a tile's first block."""
    if CONFIG.by_distance:
        block = n - (tile.hi - 1 - first)
        return gl.where(block < tile.lo, block + (tile.hi - tile.lo), block)
    else:
        return n
