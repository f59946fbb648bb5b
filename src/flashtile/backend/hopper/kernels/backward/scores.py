"""Probabilities of the backward pass, from products and the rows' log-sum-exp.

They are computed in two parts, each beside a product: one beside the last one of the step before, dk's, and one beside
that of dout with v.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import scores
from ..shared.chunks import halves, joined
from ..shared.pipeline import slot_of


class Place(NamedTuple):
    """Where the scores of a block `[N, M]` of keys and rows stand."""

    b: gl.tensor
    head: gl.tensor
    shift: gl.tensor
    first_row: gl.tensor
    first_key: gl.tensor


@gluon.jit
def place_of(tile, group, member, m, first_key, TILE: gl.constexpr):
    return Place(tile.b, tile.head_k * group + member, tile.shift, m * TILE.block_m, first_key)


@gluon.jit
def begin(s, rows, count, place, scoring, TILE: gl.constexpr):
    """The first part: logarithms of probabilities, or of the first half of rows probabilities. With a softcap, whose
    derivative wants the products later, nothing.
    """
    if scoring.softcap is not None:
        return (s,)
    else:
        t = logarithms(scored(s, place, scoring), rows, count, scoring, TILE)
        if TILE.half_early:
            left, right = halves(t)
            return (gl.exp2(left), right)
        else:
            return (t,)


@gluon.jit
def probabilities(begun, rows, count, place, scoring, TILE: gl.constexpr):
    """Probabilities, and the scores of which a softcap's derivative is computed."""
    if scoring.softcap is not None:
        score = scored(begun[0], place, scoring)
        return gl.exp2(logarithms(score, rows, count, scoring, TILE)), score
    else:
        p = joined(begun[0], gl.exp2(begun[1])) if TILE.half_early else gl.exp2(begun[0])
        return p, scores.Score(p, p)


@gluon.jit
def logarithms(score, rows, count, scoring, TILE: gl.constexpr):
    start = rows.start.index(slot_of(count, TILE.stages)).load(score.t.type.layout)
    return score.t * scoring.factor + start


@gluon.jit
def scored(s, place, scoring):
    """Final scores of products `[N, M]`."""
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(place.first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    keys = gl.expand_dims(place.first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    return scores.forward(s, scoring, place.b, place.head, place.shift, rows, keys)
