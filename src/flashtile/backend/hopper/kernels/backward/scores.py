"""Probabilities of the backward pass, recomputed from scores and lse.

They are computed in two parts, each overlapping a product: the first part overlaps the previous step's dk, the second
one the product of dout with v.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import scores
from ..shared.mma import join_columns, split_columns
from ..shared.pipeline import stage_of


class BlockCoord(NamedTuple):
    """Position of a transposed block of scores `[N, M]`."""

    b: gl.tensor
    head: gl.tensor
    shift: gl.tensor
    first_row: gl.tensor
    first_key: gl.tensor


@gluon.jit
def block_coord(tile, group, group_head, m, first_key, CONFIG: gl.constexpr):
    """Position of the block of rows m of a query head."""
    return BlockCoord(tile.b, tile.head_k * group + group_head, tile.shift, m * CONFIG.block_m, first_key)


@gluon.jit
def begin_probabilities(s, rows, count, coord, params, CONFIG: gl.constexpr):
    """First part: base-2 logarithms of p, or p itself for the first half of the rows.

    With a softcap, whose derivative needs the scores later, it computes nothing.
    """
    if params.softcap is not None:
        return (s,)
    else:
        t = log2_probabilities(block_scores(s, coord, params), rows, count, params, CONFIG)
        if CONFIG.early_half_exps:
            left, right = split_columns(t)
            return (gl.exp2(left), right)
        else:
            return (t,)


@gluon.jit
def finish_probabilities(partial_p, rows, count, coord, params, CONFIG: gl.constexpr):
    """Second part: p, and the scores for the derivative of a softcap."""
    if params.softcap is not None:
        score = block_scores(partial_p[0], coord, params)
        return gl.exp2(log2_probabilities(score, rows, count, params, CONFIG)), score
    else:
        p = join_columns(partial_p[0], gl.exp2(partial_p[1])) if CONFIG.early_half_exps else gl.exp2(partial_p[0])
        return p, scores.Score(p, p)


@gluon.jit
def log2_probabilities(score, rows, count, params, CONFIG: gl.constexpr):
    """Base-2 logarithms of p."""
    neg_lse_log2 = rows.neg_lse_log2.index(stage_of(count, CONFIG.stages)).load(score.t.type.layout)
    return score.t * params.scale_log2 + neg_lse_log2


@gluon.jit
def block_scores(s, coord, params):
    """Final scores of a block of products `[N, M]`."""
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(coord.first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    keys = gl.expand_dims(coord.first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    return scores.forward(s, params, coord.b, coord.head, coord.shift, rows, keys)
