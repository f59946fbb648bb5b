"""FlashAttention's forward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3), in Gluon.

One warp schedules, one copies q, k and v by TMA, two or three warpgroups of 64 rows each compute. In each step the
product of q with one block of keys and that of the block before with its values are both in flight, and the softmax
between them runs beside another warpgroup's products. A tile's last step is the next one's first: the matrix units do
not wait between tiles.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from . import scores, softmax
from .bits import all_seen, where_bits
from .chunks import (
    add_weighted_rows,
    no_sums,
    product_of_rows,
    times,
    wait_for_sums,
    wait_for_values,
)
from .copying import ROWS, Inputs, copy, q_slot, rows_at
from .masking import Window, key_blocks, keys_seen
from .pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    barriers,
    new_memory,
    new_ring,
    new_slots,
    release,
    rows_of,
    wait_full,
)
from .schedule import Sequences, Work, new_queue, schedule, take_tile
from .scores import Scoring
from .softmax import INFINITY
from .storing import store_columns
from .versions import kernel


class Part(NamedTuple):
    """64 rows of a tile, and which of its blocks of keys need no masks for them."""

    first_row: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    shift: gl.tensor  # what aligns rows with keys: the diagonal is `key = row + shift`


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
def part_of(tile, consumer: gl.constexpr, window, diagonal, BLOCK_N: gl.constexpr):
    """The consumer's part of a tile."""
    first_row = tile.first_row + consumer * ROWS
    shift = tile.seqlen_k - tile.seqlen_q + diagonal
    own = key_blocks(window, first_row, first_row + (ROWS - 1), shift, tile.seqlen_k, BLOCK_N)
    return Part(first_row, own.full_lo, own.full_hi, shift)


@gluon.jit
def scored(s, part, block, tile, window, scoring):
    """Final scores `[ROWS, BLOCK_N]` of the part's products with a block of keys."""
    layout: gl.constexpr = s.type.layout
    first_key = block * s.shape[1]
    rows = gl.expand_dims(part.first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    keys = gl.expand_dims(first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    t = scores.forward(s, scoring, tile.b, tile.head, part.shift, rows, keys).t
    if (block >= part.full_hi) | (block < part.full_lo):
        t = where_bits(keys_seen(t, window, part.first_row, first_key, part.shift, tile.seqlen_k), t, -INFINITY)
    return t


@gluon.jit
def first_softmax(t, tile, scoring):
    """Levels, sums and probabilities after a tile's first block."""
    layout: gl.constexpr = all_seen(t).type.layout
    start, l = softmax.start(scoring.sinks, tile.head, tile.b < scoring.batch, t.shape[0], layout)  # noqa: E741
    level, alpha, _, p = softmax.follow(start, t, scoring.factor, 0)
    return level, l * alpha + softmax.sums_by_thread(p), p


@gluon.jit
def as_operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    """Probabilities as the left operand of a product: they stay in the registers that they are in."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def store(
    results, acc, level, l, tile, first_row, consumer: gl.constexpr, TILE: gl.constexpr,  # noqa: E741
    PACKED: gl.constexpr,
):  # fmt: skip
    """The results of 64 rows whose keys are all seen."""
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    weight, row_lse = softmax.finish(level, l, layout)
    rows = first_row + gl.arange(0, ROWS, layout)
    start = results.lse + tile.lse_head.to(gl.int64) * results.stride_lse + tile.token_q
    gl.store(start + rows, row_lse, mask=rows < tile.seqlen_q)
    at = rows_at(tile, tile.head, first_row, PACKED)
    staged = results.staged.index(consumer)
    for c in gl.static_range(len(acc)):
        store_columns(results.out, times(acc[c], weight), at, staged, HEAD_DIM_V.starts[c])


@gluon.jit
def consume(
    consumer: gl.constexpr, inputs, results, queue, window, diagonal, scoring, TILE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes 64 rows of each tile."""
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_N: gl.constexpr = TILE.block_n
    STAGES: gl.constexpr = TILE.stages
    TILES_OF_Q: gl.constexpr = TILE.tiles_of_q
    Q_SLOTS: gl.constexpr = TILES_OF_Q * TILE.consumers
    VALUES: gl.constexpr = len(HEAD_DIM_V.chunks)  # products with values, of a step
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V.chunks[0], 16])
    dtype: gl.constexpr = results.out.dtype
    q, k, v = inputs.q, inputs.k, inputs.v
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)

    tile_count = 0
    block_count = 0
    tile = take_tile(queue, 0)
    part = part_of(tile, consumer, window, diagonal, BLOCK_N)
    mbarrier.wait(q.full.index(consumer), 0)
    q_i = rows_of(q, consumer, Q_SLOTS)
    wait_full(k, 0, STAGES)
    s = product_of_rows(q_i, rows_of(k, 0, STAGES), nothing)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k.gates, 0, STAGES)
    release_q_early(inputs.q_free, 0, consumer, tile.hi - tile.lo == 1, TILE)
    t = scored(s, part, tile.hi - 1, tile, window, scoring)
    level, l, p = first_softmax(t, tile, scoring)  # noqa: E741
    p_i = as_operand(p, p_layout, dtype)
    acc = no_sums(HEAD_DIM_V)

    # Before each step, `p_i` are the probabilities of block `block_count`.
    while tile.b >= 0:
        q_i = rows_of(q, q_slot(tile_count, consumer, TILE), Q_SLOTS)
        for above in range(tile.lo + 1, tile.hi):
            block_count += 1
            wait_full(k, block_count, STAGES)
            wait_full(v, block_count - 1, STAGES)
            if TILES_OF_Q == 1:
                q_i = rows_of(q, afresh(consumer), Q_SLOTS)  # these tiles have no registers to keep operands in
            s = product_of_rows(q_i, rows_of(k, block_count, STAGES), nothing)
            v_j = rows_of(v, block_count - 1, STAGES)
            acc = add_weighted_rows(acc, p_i, v_j)
            s = warpgroup_mma_wait(VALUES, deps=(s,))
            release(k.gates, block_count, STAGES)
            release_q_early(inputs.q_free, tile_count, consumer, above == tile.hi - 1, TILE)
            block = tile.hi - 1 + tile.lo - above
            t = scored(s, part, block, tile, window, scoring)
            level, alpha, moved, p = softmax.follow(level, t, scoring.factor, TILE.guessed)
            l = l * alpha + softmax.sums_by_thread(p)  # noqa: E741
            acc, p, l = wait_for_values(acc, p, l)  # noqa: E741
            release(v.gates, block_count - 1, STAGES)
            p_i = as_operand(p, p_layout, dtype)
            acc = softmax.rescaled(acc, alpha, moved)

        done, done_row, done_level, done_l = tile, part.first_row, level, l
        if TILES_OF_Q > 1:
            mbarrier.arrive(inputs.q_free.index(q_slot(tile_count, consumer, TILE)), count=1)
        tile_count += 1
        tile = take_tile(queue, tile_count)
        part = part_of(tile, consumer, window, diagonal, BLOCK_N)
        # Each branch computes what it multiplies: ptxas 12.8 loses operands' descriptors that cross a branch.
        if tile.b >= 0:
            # The same step over the edge between two tiles.
            slot = q_slot(tile_count, consumer, TILE)
            mbarrier.wait(q.full.index(slot), tile_count // TILES_OF_Q & 1)
            wait_full(k, block_count + 1, STAGES)
            wait_full(v, block_count, STAGES)
            q_i = rows_of(q, slot, Q_SLOTS)
            s = product_of_rows(q_i, rows_of(k, block_count + 1, STAGES), nothing)
            v_j = rows_of(v, block_count, STAGES)
            acc = add_weighted_rows(acc, p_i, v_j)
            s = warpgroup_mma_wait(VALUES, deps=(s,))
            release(k.gates, block_count + 1, STAGES)
            release_q_early(inputs.q_free, tile_count, consumer, tile.hi - tile.lo == 1, TILE)
            t = scored(s, part, tile.hi - 1, tile, window, scoring)
            level, l, p = first_softmax(t, tile, scoring)  # noqa: E741
            acc, p, l = wait_for_values(acc, p, l)  # noqa: E741
            p_i = as_operand(p, p_layout, dtype)
        else:
            wait_full(v, block_count, STAGES)
            v_j = rows_of(v, block_count, STAGES)
            acc = add_weighted_rows(acc, p_i, v_j)
            acc = wait_for_sums(acc)
        release(v.gates, block_count, STAGES)
        block_count += 1
        store(results, acc, done_level, done_l, done, done_row, consumer, TILE, PACKED)
        acc = no_sums(HEAD_DIM_V)
    tma.store_wait(0)


@gluon.jit
def release_q_early(free, tile_count, consumer, last, TILE: gl.constexpr):
    """Where there is room for one tile's q, let go of it with its last scores: the next comes during the softmax."""
    if TILE.tiles_of_q == 1:
        mbarrier.arrive(free.index(q_slot(tile_count, consumer, TILE)), count=1, pred=last)
