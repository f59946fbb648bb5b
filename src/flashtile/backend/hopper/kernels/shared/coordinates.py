"""TMA coordinates of boxes of rows and keys.

Dense tensors have coordinates `(sequence, head, row, feature)`. Those of packed tensors cut a box where its sequence
ends (`descriptors.ragged_descriptor`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import tile_config

RAGGED_EXTENT = gl.constexpr(tile_config.RAGGED_EXTENT)


@gluon.jit
def q_coord(tile, head, row, PACKED: gl.constexpr):
    """Coordinates of a box of q, out or dout."""
    if PACKED:
        return ragged_coord(head, row, tile.token_q, tile.seqlen_q)
    else:
        return (tile.b, head, row, 0)


@gluon.jit
def kv_coord(tile, first_key, PACKED: gl.constexpr):
    """Coordinates of a box of k or v."""
    return key_coord(tile, tile.head_k, first_key, PACKED)


@gluon.jit
def key_coord(tile, head, first_key, PACKED: gl.constexpr):
    """Coordinates of a box of k, v, dk or dv of a key head."""
    if PACKED:
        return ragged_coord(head, first_key, tile.token_k, tile.seqlen_k)
    else:
        return (tile.b, head, first_key, 0)


@gluon.jit
def dkdv_coord(tile, head, first_key, batch, splits, PACKED: gl.constexpr):
    """Coordinates of a box of dk or dv; of dense ones, each split has its own, but in a last wave each head."""
    if splits.wave.first_head is not None:
        return (0, tile.token_k, first_key, 0)
    elif splits.row_splits is not None:
        return (tile.token_k * batch + tile.b, head, first_key, 0)
    else:
        return key_coord(tile, head, first_key, PACKED)


@gluon.jit
def ragged_coord(head, row, token, seqlen):
    """Coordinates in a ragged descriptor: rows past the sequence's end lie out of bounds, at RAGGED_EXTENT or more."""
    return (RAGGED_EXTENT, token + seqlen, head, RAGGED_EXTENT - seqlen + row, 0)
