"""Lists of the blocks that a mask function shows, which tiles visit in place of a range.

A list is its length, then an entry for each block in ascending order, `2 * block + partial`: whether the mask's code
has to run. Blocks that are not listed are hidden. A tile with a list has positions in it, `lo <= position < hi`, and
the list's offset; every warp reads the entries it needs, a step early. Without lists, a block's position is its number.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class BlockLists(NamedTuple):
    """Lists in int32 of the tiles of heads and sequences; a shared sequence or head has stride 0."""

    data: gl.tensor | None  # pointer; `None` without lists
    stride_b: gl.tensor | None
    stride_h: gl.tensor | None
    stride_tile: gl.tensor | None
    ranks: gl.tensor | None  # of backward: elements from an entry to its rank (`dq_writer`)


@gluon.jit
def list_of(lists, b, head, tile):
    """Offset and length of the list of a tile."""
    offset = b * lists.stride_b + head * lists.stride_h + tile * lists.stride_tile
    return offset, gl.load(lists.data + offset)


@gluon.jit
def load_entry(lists, offset, position):
    """An entry of a list; without lists, 0. A position before the first one, after the last step, reads the first."""
    if lists.data is None:
        return 0
    else:
        return gl.load(lists.data + (offset + 1 + gl.maximum(position, 0)))


@gluon.jit
def load_rank(lists, offset, position):
    """The rank of a list's entry."""
    return gl.load(lists.data + lists.ranks + (offset + 1 + position))


@gluon.jit
def block_at(lists, position, entry):
    """The block at a position, whose entry is given."""
    if lists.data is None:
        return position
    else:
        return entry >> 1


@gluon.jit
def partial_of(lists, entry):
    """Whether a block needs the mask's code, in a tuple; an empty one without lists: all do."""
    if lists.data is None:
        return ()
    else:
        return ((entry & 1) != 0,)
