"""dq of wide heads on Hopper, in Gluon: tiles of rows walk over keys, as in `forward`.

Over 128 features the sums of dk and dv of 64 keys fill a program's registers, and to add up dq in memory for every 64
keys, as `backward` does for every 128, would take longer than to compute scores twice. So dq has a kernel of its own;
`wide_keys` computes dk and dv. Each result has one writer.

One warp schedules, one copies, two warpgroups of 64 rows each compute, one beside the other's exponentials.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ..shared import scores
from ..shared.chunks import add_weighted_rows, no_sums, product_of_rows, wait_for_sums
from ..shared.column_masks import all_seen, where_bits
from ..shared.epilogue import Result, store_sums
from ..shared.masking import Window, key_blocks, keys_seen
from ..shared.pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    barriers,
    new_ring,
    new_slots,
    release,
    rows_of,
    wait_full,
)
from ..shared.producer import ROWS
from ..shared.schedule import Sequences, Work, new_queue, schedule, take_tile
from ..shared.scores import Scoring
from ..shared.softmax import INFINITY
from ..shared.versions import kernel
from .producer import RowTiles, copy_for_rows


class RowNumbers(NamedTuple):
    """Two numbers of each row, `[heads, padded_rows]` as `rows` lays them out."""

    start: gl.tensor  # pointer: what makes log-probabilities of scores
    delta: gl.tensor  # pointer, negated
    padded_rows: gl.tensor


@kernel
def wide_rows_kernel(
    q_desc, k_desc, v_desc, dout_desc, start, delta, dq, slopes, counter, cu_seqlens_q, cu_seqlens_k, seqused_k,
    stride_dq_b, stride_dq_h, stride_dq_m, stride_slopes_b, num_tiles, num_blocks, all_heads, section, num_heads,
    group, padded_rows, batch, seqlen_q, seqlen_k, diagonal, window_left, window_right, top_left,
    factor, multiplier, softcap, scale, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes are [1, 1, 64, columns]. Packed sequences are described as in `forward_kernel`."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    PACKED: gl.constexpr = cu_seqlens_q is not None
    CONSUMERS: gl.constexpr = TILE.consumers
    gl.static_assert(FIRST_GATE + TILE.slots - 1 <= LAST_GATE)
    inputs = RowTiles(
        new_slots(q_desc, CONSUMERS, HEAD_DIM),
        new_slots(dout_desc, CONSUMERS, HEAD_DIM_V),
        barriers(CONSUMERS, 1),
        new_ring(k_desc, TILE.slots, Gates(FIRST_GATE, 128 * CONSUMERS + 32), HEAD_DIM),
    )
    queue = new_queue(CONSUMERS + 1)
    fence_async_shared()

    work = Work(num_tiles, num_blocks, all_heads, section, counter, num_heads, group, diagonal)
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, None, batch)
    numbers = RowNumbers(start, delta, padded_rows)
    result = Result(dq, stride_dq_b, stride_dq_h, stride_dq_m)
    gl.warp_specialize(
        [
            (consume_keys, (0, inputs, numbers, result, scale, queue, window, diagonal, scoring, TILE, PACKED)),
            (
                consume_keys,
                (gl.constexpr(1), inputs, numbers, result, scale, queue, window, diagonal, scoring, TILE, PACKED),
            ),
            (copy_for_rows, (q_desc, k_desc, v_desc, dout_desc, inputs, queue, TILE, PACKED)),
            (schedule, (queue, work, sequences, window, TILE, PACKED)),
        ],
        [4, 1, 1],
        [TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
    )


@gluon.jit
def consume_keys(
    consumer: gl.constexpr, inputs, numbers, result, scale, queue, window, diagonal, scoring, TILE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes dq of 64 rows of each tile."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_N: gl.constexpr = TILE.block_n
    SLOTS: gl.constexpr = TILE.slots
    CONSUMERS: gl.constexpr = TILE.consumers
    VALUES: gl.constexpr = len(HEAD_DIM_V.chunks)  # products with values, of a step
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dtype: gl.constexpr = inputs.q.data[0].dtype
    keys = inputs.keys
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = take_tile(queue, 0)
    while tile.b >= 0:
        first_row = tile.first_row + consumer * ROWS
        shift = tile.seqlen_k - tile.seqlen_q + diagonal
        blocks = key_blocks(window, first_row, first_row + (ROWS - 1), shift, tile.seqlen_k, BLOCK_N)
        start, delta = numbers_of(numbers, tile, first_row, s_layout, PACKED)
        dq = no_sums(HEAD_DIM)
        mbarrier.wait(inputs.q.full.index(consumer), tile_count & 1)
        mbarrier.wait(inputs.dout.full.index(consumer), tile_count & 1)
        for above in range(tile.lo, tile.hi):
            block = tile.hi - 1 + tile.lo - above
            first_key = block * BLOCK_N
            masked = (block >= blocks.full_hi) | (block < blocks.full_lo)
            own = afresh(consumer)  # these tiles have no registers to keep operands in
            wait_full(keys, 2 * count + 1, SLOTS)
            s = product_of_rows(rows_of(inputs.q, own, CONSUMERS), rows_of(keys, 2 * count + 1, SLOTS), nothing)
            wait_full(keys, 2 * count, SLOTS)
            v_j = rows_of(keys, 2 * count, SLOTS)[:VALUES]
            dp = product_of_rows(rows_of(inputs.dout, own, CONSUMERS), v_j, nothing)
            s = warpgroup_mma_wait(VALUES, deps=(s,))
            row = gl.expand_dims(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)), 1)
            key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout)), 0)
            score = scores.forward(s, scoring, tile.b, tile.head, shift, row, key)
            p = gl.exp2(score.t * scoring.factor + gl.expand_dims(start, 1))
            seen = all_seen(p)
            if masked:
                seen = keys_seen(p, window, first_row, first_key, shift, tile.seqlen_k)
                p = where_bits(seen, p, 0.0)
            weight = scores.derivative(p, score, scoring)
            dp, weight = warpgroup_mma_wait(0, deps=(dp, weight))
            release(keys.gates, 2 * count, SLOTS)
            mbarrier.arrive(inputs.free.index(consumer), count=1, pred=above == tile.hi - 1)
            dp += gl.expand_dims(delta, 1)
            if masked:  # 0 * dp would be NaN where dp is
                dp = where_bits(seen, dp, 0.0)
            ds = (weight * dp).to(dtype)
            dq = add_weighted_rows(dq, ds, rows_of(keys, 2 * afresh(count) + 1, SLOTS))
            dq = wait_for_sums(dq)
            release(keys.gates, 2 * count + 1, SLOTS)
            count += 1
        store_sums(result, dq, scale, tile.b, tile.head, tile.token_q, first_row, tile.seqlen_q, HEAD_DIM)
        tile_count += 1
        tile = take_tile(queue, tile_count)


@gluon.jit
def numbers_of(numbers, tile, first_row, s_layout: gl.constexpr, PACKED: gl.constexpr):
    """`start` and `delta` `[ROWS]`; of rows past the last one, what makes their probabilities 0."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    first = tile.lse_head.to(gl.int64) * numbers.padded_rows
    if PACKED:  # as in `rows`: each sequence begins with a block of rows
        first += (tile.token_q // ROWS + tile.b) * ROWS
    exists = row < tile.seqlen_q
    start = gl.load(numbers.start + first + row, mask=exists, other=-INFINITY)
    return start, gl.load(numbers.delta + first + row, mask=exists, other=0.0)
