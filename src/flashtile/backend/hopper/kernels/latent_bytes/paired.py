"""Two warpgroups that share pairs of blocks of latent rows of 8 bits: each computes the scores and probabilities of one
block, and half of the features of the sums of both.

They meet twice in a pair: to agree on row_max, and when all probabilities are there. Numbers of rows are a sixteenth
of a thread's registers: row_max stays in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..latent.rows import page_of
from ..shared.pipeline import FIRST_BARRIER, consumer_release, consumer_wait, stage_of
from ..shared.ptx import barrier_sync
from ..shared.softmax import FLOAT_MAX
from .blocks import (
    add_values,
    largest_of_scores,
    no_sums,
    probabilities,
    put_probabilities,
    rescale,
    rescaled,
    row_state,
    store,
    sums_of_threads,
    visible_scores,
)
from .memory import empty_barriers, scales_of_rows, tile_of
from .operands import CHUNK, product_layout

HALF_CHUNKS = gl.constexpr(2)  # chunks of a warpgroup


@gluon.jit
def paired_warpgroup(W: gl.constexpr, context, CONFIG: gl.constexpr):
    """The partition with the scores of block W of each pair, and half W of the features."""
    N: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    FIRST: gl.constexpr = W * HALF_CHUNKS
    ring = context.ring
    tile = tile_of(context.rows, context.keys, CONFIG)
    state = row_state(context, tile, CONFIG)
    of_columns: gl.constexpr = gl.SliceLayout(0, product_layout(N))
    stats = context.sums.stats
    stats.index(4 + W).store(gl.full([N], -FLOAT_MAX, gl.float32, of_columns))
    l = no_sums(N)  # noqa: E741
    acc = ()
    for _ in gl.static_range(HALF_CHUNKS):
        acc = acc + (gl.zeros([CHUNK, N], gl.float32, product_layout(N)),)
    for first in range(tile.lo, tile.hi, 2):
        n, count = first + W, first - tile.lo
        page = page_of(context.keys, tile, n, CONFIG)
        stage = stage_of(count + W, STAGES)
        consumer_wait(ring, count + W, STAGES)
        t = visible_scores(context, state, tile, n, page, scales_of_rows(ring, stage, CONFIG), stage, CONFIG)
        own = largest_of_scores(t)
        stats.index(W).store(own)
        meet(CONFIG)
        old_max = stats.index(4 + W).load(of_columns)
        row_max = gl.maximum(old_max, gl.maximum(own, stats.index(1 - W).load(of_columns)))
        row_max = gl.minimum(row_max, FLOAT_MAX)
        alpha = gl.exp2(old_max - row_max)
        p = probabilities(t, row_max)
        l = rescaled(l, alpha) + sums_of_threads(p)  # noqa: E741
        put_probabilities(context, p, tile, n, page, W, CONFIG)
        meet(CONFIG)
        stats.index(4 + W).store(row_max)
        acc = rescale(acc, alpha)
        for block in gl.static_range(2):
            if block != W:
                consumer_wait(ring, count + block, STAGES)
            there = stage_of(count + block, STAGES)
            acc = add_values(ring, context.p[block], acc, scales_of_rows(ring, there, CONFIG), there, FIRST, CONFIG)
            consumer_release(empty_barriers(CONFIG), count + block, STAGES)
    own_l = gl.convert_layout(gl.sum(gl.sum(l, 1), 0), of_columns)
    stats.index(2 + W).store(own_l)
    meet(CONFIG)
    total = own_l + stats.index(3 - W).load(of_columns)
    store(context, tile, acc, stats.index(4 + W).load(of_columns), total, FIRST, CONFIG)


@gluon.jit
def meet(CONFIG: gl.constexpr):
    """Wait until the other warpgroup is here, too."""
    barrier_sync(FIRST_BARRIER + CONFIG.stages, 256)
