"""A step of forward: one block of keys, for the 64 rows of a warpgroup.

The product of q with the block and that of the block before with its values are in flight together; the softmax runs
beside another warpgroup's products. So the sums are always a block behind the scores, over the edges of tiles too: a
tile's first step completes the sums of the tile before.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..shared import scores, softmax
from ..shared.chunks import add_weighted_rows, no_sums, product_of_rows, wait_for_values
from ..shared.column_masks import where_bits
from ..shared.masking import key_blocks, keys_seen
from ..shared.pipeline import afresh, release, rows_of, wait_full
from ..shared.producer import ROWS, q_slot
from ..shared.schedule import Tile
from ..shared.softmax import INFINITY


class Part(NamedTuple):
    """64 rows of a tile, and which of its blocks of keys need no masks for them."""

    tile: Tile
    first_row: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    shift: gl.tensor  # what aligns rows with keys: the diagonal is `key = row + shift`


class Rows(NamedTuple):
    """What a step leaves of 64 rows."""

    acc: tuple[gl.tensor, ...]  # sums of all blocks before the last one, by chunks of columns
    p: gl.tensor  # probabilities of the last one
    level: gl.tensor
    l: gl.tensor  # sums of all probabilities  # noqa: E741


@gluon.jit
def part_of(tile, consumer: gl.constexpr, window, diagonal, BLOCK_N: gl.constexpr):
    """The consumer's part of a tile."""
    first_row = tile.first_row + consumer * ROWS
    shift = tile.seqlen_k - tile.seqlen_q + diagonal
    own = key_blocks(window, first_row, first_row + (ROWS - 1), shift, tile.seqlen_k, BLOCK_N)
    return Part(tile, first_row, own.full_lo, own.full_hi, shift)


@gluon.jit
def no_scores(BLOCK_N: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return gl.zeros([ROWS, BLOCK_N], gl.float32, layout)


@gluon.jit
def no_rows(part, scoring, dtype: gl.constexpr, TILE: gl.constexpr):
    """Before the first tile's first step. The sums that this completes, of whatever is in memory, are nobody's."""
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    acc = no_sums(HEAD_DIM_V)
    return next_rows(acc, as_operand(no_scores(TILE.block_n), acc, dtype), part, scoring, TILE)


@gluon.jit
def next_rows(acc, p, part, scoring, TILE: gl.constexpr):
    """Before a tile's first step: its softmax begins, the sums are still those of the tile before."""
    tile = part.tile
    level, l = softmax.start(no_scores(TILE.block_n), scoring.sinks, tile.head, tile.b < scoring.batch)  # noqa: E741
    return Rows(acc, p, level, l)


@gluon.jit
def as_operand(p, acc, dtype: gl.constexpr):
    """Probabilities as the left operand of their product with values: they stay in the registers that they are in."""
    layout: gl.constexpr = acc[0].type.layout
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def step(
    rows, add, inputs, q_i, n, tile_count, part, block, window, scoring, consumer: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The n-th step of a warpgroup: scores and probabilities of a block of keys, values of the one before it. `add`
    them to the sums, or begin anew.
    """
    STAGES: gl.constexpr = TILE.stages
    VALUES: gl.constexpr = len(TILE.head_dim_v.chunks)  # products with values
    k, v, tile = inputs.k, inputs.v, part.tile
    wait_full(k, n, STAGES)
    wait_full(v, n, STAGES)
    if TILE.tiles_of_q == 1:
        q_i = rows_of(inputs.q, afresh(consumer), TILE.consumers)  # these tiles have no registers to keep operands in
    s = product_of_rows(q_i, rows_of(k, n, STAGES), no_scores(TILE.block_n))
    acc = add_weighted_rows(rows.acc, rows.p, rows_of(v, n, STAGES), add)
    s = warpgroup_mma_wait(VALUES, deps=(s,))
    release(k.gates, n, STAGES)
    release_q_early(inputs.q_free, tile_count, consumer, block == tile.lo, TILE)
    t = scored(s, part, block, window, scoring)
    level, alpha, moved, p = softmax.follow(rows.level, t, scoring.factor, TILE.guessed)
    l = rows.l * alpha + softmax.sums_by_thread(p)  # noqa: E741
    acc, p, l = wait_for_values(acc, p, l)  # noqa: E741
    release(v.gates, n, STAGES)
    p = as_operand(p, acc, v.data[0].dtype)
    moved = gl.where(block == tile.hi - 1, 0, moved)  # in a first step, sums are those of the tile before
    return Rows(softmax.rescaled(acc, alpha, moved), p, level, l)


@gluon.jit
def scored(s, part, block, window, scoring):
    """Final scores `[ROWS, BLOCK_N]` of the part's products with a block of keys."""
    layout: gl.constexpr = s.type.layout
    tile = part.tile
    first_key = block * s.shape[1]
    rows = gl.expand_dims(part.first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    keys = gl.expand_dims(first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    t = scores.forward(s, scoring, tile.b, tile.head, part.shift, rows, keys).t
    if (block >= part.full_hi) | (block < part.full_lo):
        t = where_bits(keys_seen(t, window, part.first_row, first_key, part.shift, tile.seqlen_k), t, -INFINITY)
    return t


@gluon.jit
def release_q_early(free, tile_count, consumer, last, TILE: gl.constexpr):
    """Where there is room for one tile's q, let go of it with its last scores: the next comes during the softmax."""
    if TILE.tiles_of_q == 1:
        mbarrier.arrive(free.index(q_slot(tile_count, consumer, TILE)), count=1, pred=last)
