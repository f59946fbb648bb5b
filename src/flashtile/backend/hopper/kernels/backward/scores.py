"""Probabilities of the backward pass, recomputed from scores and lse.

They are computed in two parts, each overlapping a product: the first part overlaps the previous step's dk, the second
one the product of dout with v.
"""

from typing import NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import scores
from ..shared.bias_tiles import read_bias_tile
from ..shared.compat import Pointer, Scalar
from ..shared.mma import MMA_M, join_columns, split_columns
from ..shared.pairs import PairBlock
from ..shared.pipeline import stage_of
from ..shared.score_mod import Loaded, load_head, load_keys, load_rows


class Residuals(NamedTuple):
    """Negated residuals of lse `[heads, padded_rows]` times log2(e), which natural scores have. They are loaded where
    they are used: shared memory is full.
    """

    data: Pointer
    padded_rows: Scalar


class BlockCoord(NamedTuple):
    """Position of a transposed block of scores `[N, M]`."""

    b: gl.tensor
    head: gl.tensor
    shift: gl.tensor
    first_row: gl.tensor
    first_key: gl.tensor
    seqlen_k: gl.tensor
    partial: tuple  # `block_lists.partial_of`
    residual: tuple  # pointer to that of the first row, and whether the block exists; or nothing


@gluon.jit
def block_coord(tile, group, group_head, m, first_key, partial, residuals, CONFIG: gl.constexpr):
    """Position of the block of rows m of a query head."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    head = tile.head_k * group + gl.minimum(group_head, group - 1)  # after the last block, the last one
    residual = ()
    if residuals.data is not None:
        of_head = tile.padded_row + gl.minimum(group_head, group - 1) * residuals.padded_rows
        exists = (m >= 0) & (m < (tile.seqlen_q + BLOCK_M - 1) // BLOCK_M)  # behind a list, m * BLOCK_M overflows
        residual = (residuals.data + (of_head // BLOCK_M + gl.where(exists, m, 0)) * BLOCK_M, gl.where(exists, 1, 0))
    return BlockCoord(tile.b, head, tile.shift, m * BLOCK_M, first_key, tile.seqlen_k, partial, residual)


@gluon.jit
def begin_probabilities(s, rows, count, coord, loaded, params, CONFIG: gl.constexpr):
    """First part: base-2 logarithms of p, or p itself for the first half of the rows.

    With a softcap or score_mod whose derivative needs the scores later, it computes nothing.
    """
    if params.softcap is not None or needs_scores(CONFIG):
        return (s,)
    else:
        t = log2_probabilities(block_scores(s, coord, loaded, params, CONFIG), rows, count, coord, params, CONFIG)
        if CONFIG.early_half_exps:
            left, right = split_columns(t)
            return (gl.exp2(left), right)
        else:
            return (t,)


@gluon.jit
def finish_probabilities(partial_p, rows, count, coord, loaded, params, CONFIG: gl.constexpr):
    """Second part: p, and the scores for the derivatives of a softcap and a score_mod."""
    if params.softcap is not None or needs_scores(CONFIG):
        score = block_scores(partial_p[0], coord, loaded, params, CONFIG)
        return gl.exp2(log2_probabilities(score, rows, count, coord, params, CONFIG)), score
    else:
        p = join_columns(partial_p[0], gl.exp2(partial_p[1])) if CONFIG.early_half_exps else gl.exp2(partial_p[0])
        if CONFIG.score_mod is None:
            return p, scores.Score(p, p, ())
        else:  # the derivative depends on no score: p stands for it
            return p, block_scores(p, coord, loaded, params, CONFIG)


@constexpr_function
def needs_scores(CONFIG):
    """Whether the derivative of a score_mod depends on the scores."""
    return CONFIG.score_mod is not None and not CONFIG.score_mod.linear


@gluon.jit
def log2_probabilities(score, rows, count, coord, params, CONFIG: gl.constexpr):
    """Base-2 logarithms of p."""
    neg_lse = rows.neg_lse.index(stage_of(count, CONFIG.stages)).load(score.t.type.layout)
    return scores.log2_probabilities(score.t, neg_lse, load_residual(coord, CONFIG), params)


@gluon.jit
def load_residual(coord, CONFIG: gl.constexpr):
    """The negated residual of lse `[1, M]` of a block in a tuple, or nothing. A block that does not exist has none."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    layout: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16]))
    if len(coord.residual) > 0:
        # Before the first block or after the last one, where scores are computed for nothing.
        exists = gl.full([BLOCK_M], coord.residual[1], gl.int32, layout) > 0
        x = gl.load(coord.residual[0] + gl.arange(0, BLOCK_M, layout), mask=exists, other=0.0)
        return (gl.expand_dims(x, 0),)
    else:
        return ()


@gluon.jit
def block_scores(s, coord, loaded, params, CONFIG: gl.constexpr):
    """Final scores of a block of products `[N, M]`."""
    rows, keys = block_rows(coord, CONFIG), block_keys(coord, CONFIG)
    distance = coord.first_row - coord.first_key
    return scores.forward(s, params, coord.b, coord.head, coord.shift, rows, keys, distance, loaded, CONFIG)


@gluon.jit
def block_rows(coord, CONFIG: gl.constexpr):
    """Rows `[1, M]` of a block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_m, 16])
    return gl.expand_dims(coord.first_row + gl.arange(0, CONFIG.block_m, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def block_keys(coord, CONFIG: gl.constexpr):
    """Keys `[MMA_M, 1]` of a warpgroup's block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_m, 16])
    return gl.expand_dims(coord.first_key + gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def load_block(coord, params, CONFIG: gl.constexpr):
    """Load what scores need of a block's head, rows and keys."""
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    rows, keys = block_rows(coord, CONFIG), block_keys(coord, CONFIG)
    sequence = gl.minimum(coord.b, params.batch - 1)
    return Loaded(
        load_head(params, coord.b, coord.head, SCORE_MOD),
        load_rows(params, coord.b, coord.head, rows, SCORE_MOD),
        load_keys(params, coord.b, coord.head, keys, None, SCORE_MOD),
        coord.partial,
        PairBlock(sequence, coord.head, rows, keys, coord.first_key + MMA_M, coord.seqlen_k, ()),
    )


@gluon.jit
def with_bias(loaded, tiles, count, exists, warpgroup: gl.constexpr, WARPGROUPS: gl.constexpr, CONFIG: gl.constexpr):
    """Inputs of the scores, with a tile of the bias if it has tiles; unused where the block does not exist."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_m, 16])
    if len(tiles) > 0:
        bias = read_bias_tile(tiles[0], count, exists, warpgroup, True, layout, WARPGROUPS, CONFIG)
        x = loaded.pairs
        pairs = PairBlock(x.b, x.head, x.rows, x.keys, x.stop, x.seqlen_k, (bias,))
        loaded = Loaded(loaded.head, loaded.rows, loaded.keys, loaded.partial, pairs)
    return loaded
