"""Which tile of rows a program computes next: persistent programs take numbers from a counter, longest work first.

Tiles are counted in sections of heads whose keys and values fit the L2 cache together. Within a section, the tiles with
the most keys to see come first, so that short ones fill the end.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Tiles(NamedTuple):
    """The tiles of one launch."""

    count: gl.tensor
    blocks: gl.tensor  # of rows, for each head
    heads: gl.tensor  # of all sequences
    section: gl.tensor  # heads that are worked on together
    counter: gl.tensor  # pointer to a zero, which the launch leaves as it was


@gluon.jit
def first_tile():
    return gl.program_id(0)


@gluon.jit
def next_tile(tiles):
    """The next number that no other program has. Each tile asks once, so that the last one to ask knows it."""
    asked = gl.atomic_add(tiles.counter, 1, sem="relaxed")
    if asked == tiles.count - 1:
        gl.store(tiles.counter, 0)
    return gl.num_programs(0) + asked


@gluon.jit
def position_of(tiles, n):
    """Head, counted through all sequences, and block of rows."""
    size = tiles.section * tiles.blocks
    first = n // size * tiles.section
    heads = gl.minimum(tiles.section, tiles.heads - first)
    rest = n % size
    return first + rest % heads, tiles.blocks - 1 - rest // heads


@gluon.jit
def new_announcement(CONSUMERS: gl.constexpr):
    """Through which the copying warp tells each consumer, with its rows of q, which tile they are of."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], shared)


@gluon.jit
def announce(announcement, consumer, n):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    announcement.index(consumer).store(gl.full([1], n, gl.int32, one))


@gluon.jit
def announced(announcement, consumer):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(announcement.index(consumer).load(one), 0)
