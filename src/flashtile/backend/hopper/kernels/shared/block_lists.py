"""Lists of the blocks that a mask function shows, which tiles visit in place of a range.

A list is its length, then an entry for each block in ascending order, `2 * block + partial`: whether the mask's code
has to run. Blocks that are not listed are hidden. A tile with a list has positions in it, `lo <= position < hi`, and
the list's offset; every warp reads the entries it needs, a step early. Without lists, a block's position is its number.

The pairs of partly visible blocks may be bits in memory, which `pair_bits_kernel` writes: for each entry of a list and
each line of its tile, which are rows, or keys in backward, four words, one for each thread that holds a line in the
layout of scores (`column_masks`). Code of a mask would load its tensors' elements for 128 positions when the scores are
there, in every head; and leave no registers for a third warpgroup.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import all_visible
from .compat import Pointer, Scalar


class BlockLists(NamedTuple):
    """Lists in int32 of the tiles of heads and sequences; a shared sequence or head has stride 0."""

    data: Pointer  # `None` without lists
    stride_b: Scalar
    stride_h: Scalar
    stride_tile: Scalar
    ranks: Scalar  # of backward: elements from an entry to its rank (`dq_writer`)
    mask_bits: Pointer  # `[entries, lines of a tile, 4]`; `None` where the mask's code runs


@gluon.jit
def list_of(lists, b, head, tile):
    """Offset and length of the list of a tile."""
    offset = b * lists.stride_b + head * lists.stride_h + tile * lists.stride_tile
    return offset, gl.load(lists.data + offset)


@gluon.jit
def first_entry(lists, tile):
    """The entry of a tile's first step; without lists, 0."""
    if lists.data is None:
        return 0
    else:
        return tile.entry


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
    """Whether a block needs the mask's code, in a tuple; an empty one without lists: all do, or with bits none."""
    if lists.data is None or lists.mask_bits is not None:
        return ()
    else:
        return ((entry & 1) != 0,)


@gluon.jit
def bit_words(offset, position, first_line, x, LINES: gl.constexpr):
    """Where the bits `[M, 4]` of an entry are, of M lines `x [M, N]` of a tile of LINES."""
    return words_of_place(offset + 1 + gl.maximum(position, 0), first_line, x, LINES)


@gluon.jit
def words_of_place(place, first_line, x, LINES: gl.constexpr):
    """As `bit_words`, of the entry that is at this place in memory."""
    layout: gl.constexpr = all_visible(x).type.layout
    line = gl.expand_dims(first_line + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)), 1)
    thread = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
    return place.to(gl.int64) * (4 * LINES) + (line * 4 + thread)


@gluon.jit
def load_bits(lists, entry, offset, position, first_line, x, LINES: gl.constexpr):
    """The bits of pairs that the mask shows in an entry's block, in a tuple; an empty one without bits."""
    if lists.mask_bits is None:
        return ()
    else:
        words = bit_words(offset, position, first_line, x, LINES)
        return (gl.load(lists.mask_bits + words, mask=((entry & 1) != 0) & (words >= 0), other=-1),)


@gluon.jit
def is_cut(cut, lists, entry):
    """Whether bits hide pairs of a block: where a window or the last key cuts it, and where those of a mask do."""
    if lists.mask_bits is not None:
        cut = cut | ((entry & 1) != 0)
    return cut


@gluon.jit
def with_bits(visible, bits):
    """Bits of pairs that are visible by these and by `load_bits`."""
    if len(bits) > 0:
        visible = visible & bits[0]
    return visible
