"""FlashAttention's forward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3), in Gluon.

One warp schedules, one copies q, k and v by TMA, two or three warpgroups of 64 rows each compute, block of keys after
block of keys (`forward_step`). A tile's last values are multiplied in the first step of the next one: the matrix units
do not wait between tiles. There is one copy of the step's code for each warpgroup, and less to compile than with an own
one for the edges.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..shared import softmax
from ..shared.chunks import add_weighted_rows, times, wait_for_sums
from ..shared.epilogue import store_columns
from ..shared.masking import Window
from ..shared.pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    barriers,
    new_memory,
    new_ring,
    new_slots,
    round_of,
    rows_of,
    wait_full,
)
from ..shared.producer import ROWS, Inputs, copy, q_slot, rows_at
from ..shared.schedule import Sequences, Work, new_queue, schedule, take_tile
from ..shared.scores import Scoring
from ..shared.versions import kernel
from .step import next_rows, no_rows, part_of, step


class Results(NamedTuple):
    out: gl.tensor  # descriptor
    staged: gl.shared_memory_descriptor  # [CONSUMERS, *rows, columns that leave at once]
    lse: gl.tensor  # pointer, [B, H, Sq] or [H, T]
    stride_lse: gl.tensor  # from head to head


@kernel
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, slopes, sinks, counter, cu_seqlens_q, cu_seqlens_k, seqused_k,
    stride_slopes_b, stride_lse, num_tiles, num_blocks, all_heads, section, num_heads, group, batch,
    seqlen_q, seqlen_k, diagonal, window_left, window_right, top_left, factor, multiplier, softcap, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes of q and out are [1, 1, ROWS, columns], those of k and v [1, 1, BLOCK_N, columns]; one more dimension where
    sequences are packed. `seqlen_q` and `seqlen_k` are their tokens then.
    """
    PACKED: gl.constexpr = cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    Q_SLOTS: gl.constexpr = TILE.tiles_of_q * TILE.consumers
    THREADS: gl.constexpr = 128 * TILE.consumers + 32  # those who compute and those who copy
    gl.static_assert(FIRST_GATE + 2 * TILE.stages - 1 <= LAST_GATE)
    q = new_slots(q_desc, Q_SLOTS, HEAD_DIM)
    k = new_ring(k_desc, TILE.stages, Gates(FIRST_GATE, THREADS), HEAD_DIM)
    v = new_ring(v_desc, TILE.stages, Gates(FIRST_GATE + TILE.stages, THREADS), HEAD_DIM_V)
    inputs = Inputs(q, barriers(Q_SLOTS, 1), k, v)
    queue = new_queue(TILE.consumers + 1)
    staged = new_memory(out_desc, TILE.consumers, TILE.staged)
    fence_async_shared()

    work = Work(num_tiles, num_blocks, all_heads, section, counter, num_heads, group, diagonal)
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, sinks, batch)
    results = Results(out_desc, staged, lse, stride_lse)
    if TILE.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, queue, window, diagonal, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(1), inputs, results, queue, window, diagonal, scoring, TILE, PACKED)),
                (copy, (q_desc, k_desc, v_desc, inputs, queue, TILE, PACKED)),
                (schedule, (queue, work, sequences, window, TILE, PACKED)),
            ],
            [4, 1, 1],
            [TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, queue, window, diagonal, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(1), inputs, results, queue, window, diagonal, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(2), inputs, results, queue, window, diagonal, scoring, TILE, PACKED)),
                (copy, (q_desc, k_desc, v_desc, inputs, queue, TILE, PACKED)),
                (schedule, (queue, work, sequences, window, TILE, PACKED)),
            ],
            [4, 4, 1, 1],
            [TILE.consumer_registers, TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
        )


@gluon.jit
def consume(
    consumer: gl.constexpr, inputs, results, queue, window, diagonal, scoring, TILE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes 64 rows of each tile."""
    BLOCK_N: gl.constexpr = TILE.block_n
    STAGES: gl.constexpr = TILE.stages
    TILES_OF_Q: gl.constexpr = TILE.tiles_of_q
    Q_SLOTS: gl.constexpr = TILES_OF_Q * TILE.consumers
    q, v = inputs.q, inputs.v
    n = 0  # steps
    tile_count = 0
    tile = take_tile(queue, 0)
    part = part_of(tile, consumer, window, diagonal, BLOCK_N)
    rows = no_rows(part, scoring, results.out.dtype, TILE)
    add = n == 0  # a step's values go on with the sums; else they begin them
    # Where results go whose last values are still to come, and what makes them of sums.
    at = rows_at(tile, tile.head, part.first_row, PACKED)
    weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, rows.acc[0].type.layout))
    while tile.b >= 0:
        slot = q_slot(tile_count, consumer, TILE)
        mbarrier.wait(q.full.index(slot), round_of(tile_count, TILES_OF_Q) & 1)
        q_i = rows_of(q, slot, Q_SLOTS)
        rows = next_rows(rows.acc, rows.p, part, scoring, TILE)
        first = tile.hi - 1
        block, stop = first, first
        # The first step, which completes the tile before, then all others: a branch in each step would cost 1 to 4%.
        while block >= tile.lo:
            while block >= stop:
                rows = step(rows, add, inputs, q_i, n, tile_count, part, block, window, scoring, consumer, TILE)
                add = block != first
                block -= 1
                n += 1
            if (stop == first) & (tile_count > 0):
                store(results, rows.acc, weight, at, consumer, TILE)
            stop = tile.lo
        at = rows_at(tile, tile.head, part.first_row, PACKED)
        weight = finish(results, rows, part)
        if TILES_OF_Q > 1:
            mbarrier.arrive(inputs.q_free.index(slot), count=1)
        tile_count += 1
        tile = take_tile(queue, tile_count)
        part = part_of(tile, consumer, window, diagonal, BLOCK_N)
    wait_full(v, n, STAGES)
    acc = wait_for_sums(add_weighted_rows(rows.acc, rows.p, rows_of(v, n, STAGES), add))
    store(results, acc, weight, at, consumer, TILE)
    tma.store_wait(0)


@gluon.jit
def finish(results, rows, part):
    """Stores lse of rows whose scores are all there; gives the factor `[ROWS]` that makes their sums results."""
    tile = part.tile
    layout: gl.constexpr = gl.SliceLayout(1, rows.acc[0].type.layout)
    weight, lse = softmax.finish(rows.level, rows.l, layout)
    row = part.first_row + gl.arange(0, ROWS, layout)
    start = results.lse + tile.lse_head.to(gl.int64) * results.stride_lse + tile.token_q
    gl.store(start + row, lse, mask=row < tile.seqlen_q)
    return weight


@gluon.jit
def store(results, acc, weight, at, consumer: gl.constexpr, TILE: gl.constexpr):
    """The results of 64 rows whose sums are all there."""
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    staged = results.staged.index(afresh(consumer))
    for c in gl.static_range(len(acc)):
        store_columns(results.out, times(acc[c], weight), at, staged, HEAD_DIM_V.starts[c])
