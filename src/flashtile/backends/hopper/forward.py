"""FlashAttention's forward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3), in Gluon.

One warp schedules, one copies q, k and v by TMA, two or three warpgroups of 64 rows each compute. In each step the
product of q with one block of keys and that of the block before with its values are both in flight while the softmax
runs. A tile's last step is the next one's first: the matrix units do not wait between tiles.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import scores, softmax
from .copying import ROWS, TILES_OF_Q, Inputs, copy, q_slot, rows_at
from .masking import Window, key_blocks, visible
from .pipeline import new_ring, release, rows_of, wait_full
from .schedule import Sequences, Work, new_queue, schedule, take_tile
from .scores import Features
from .softmax import INFINITY
from .versions import kernel, store_box, thread_barrier


class Place(NamedTuple):
    """One block of keys for 64 rows of a tile."""

    first_row: gl.tensor
    block: gl.tensor  # of keys
    full_lo: gl.tensor  # from here to full_hi, without masks
    full_hi: gl.tensor


class Scoring(NamedTuple):
    """What scores become. `factor` makes base-2 logarithms of scores, `multiplier` scores of products."""

    factor: gl.tensor
    multiplier: gl.tensor | None
    softcap: gl.tensor | None
    slopes: gl.tensor | None  # pointer, [H] or [B, H]
    stride_slopes_b: gl.tensor
    sinks: gl.tensor | None  # pointer, [H]
    diagonal: gl.tensor  # what is added to seqlen_k - seqlen_q
    batch: gl.tensor  # sequences


class Results(NamedTuple):
    out: gl.tensor  # descriptor
    staged: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, D]
    lse: gl.tensor  # pointer, [B, H, Sq] or [H, T]
    stride_lse: gl.tensor  # from head to head


@kernel
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, slopes, sinks, counter, cu_seqlens_q, cu_seqlens_k, seqused_k,
    stride_slopes_b, stride_lse, num_tiles, num_blocks, all_heads, section, num_heads, group, batch,
    seqlen_q, seqlen_k, diagonal, window_left, window_right, top_left, factor, multiplier, softcap, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes of q and out are [1, 1, ROWS, D], those of k and v [1, 1, BLOCK_N, D]; one more dimension where sequences
    are packed. `seqlen_q` and `seqlen_k` are their tokens then.
    """
    PACKED: gl.constexpr = cu_seqlens_q is not None
    q = new_ring(q_desc, TILES_OF_Q * TILE.consumers, 1)
    k = new_ring(k_desc, TILE.stages, TILE.consumers)
    v = new_ring(v_desc, TILE.stages, TILE.consumers)
    inputs = Inputs(q, k, v)
    queue = new_queue(TILE.consumers + 1)
    staged = gl.allocate_shared_memory(out_desc.dtype, [TILE.consumers] + out_desc.block_type.shape, out_desc.layout)
    fence_async_shared()

    work = Work(num_tiles, num_blocks, all_heads, section, counter, num_heads, group, diagonal)
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, sinks, diagonal, batch)
    results = Results(out_desc, staged, lse, stride_lse)
    if TILE.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, queue, window, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(1), inputs, results, queue, window, scoring, TILE, PACKED)),
                (copy, (q_desc, k_desc, v_desc, inputs, queue, TILE, PACKED)),
                (schedule, (queue, work, sequences, window, TILE, PACKED)),
            ],
            [4, 1, 1],
            [TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, queue, window, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(1), inputs, results, queue, window, scoring, TILE, PACKED)),
                (consume, (gl.constexpr(2), inputs, results, queue, window, scoring, TILE, PACKED)),
                (copy, (q_desc, k_desc, v_desc, inputs, queue, TILE, PACKED)),
                (schedule, (queue, work, sequences, window, TILE, PACKED)),
            ],
            [4, 4, 1, 1],
            [TILE.consumer_registers, TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
        )


@gluon.jit
def place_in(tile, consumer: gl.constexpr, window, scoring, BLOCK_N: gl.constexpr):
    """The consumer's rows of a tile, and the tile's first block of keys."""
    first_row = tile.first_row + consumer * ROWS
    own = key_blocks(window, first_row, first_row + (ROWS - 1), shift_of(tile, scoring), tile.seqlen_k, BLOCK_N)
    return Place(first_row, tile.hi - 1, own.full_lo, own.full_hi)


@gluon.jit
def shift_of(tile, scoring):
    """What aligns rows with keys: the diagonal is `key = row + shift`."""
    return tile.seqlen_k - tile.seqlen_q + scoring.diagonal


@gluon.jit
def scored(s, place, tile, window, scoring, layout: gl.constexpr):
    """Final scores `[ROWS, BLOCK_N]` of the place's products."""
    BLOCK_N: gl.constexpr = s.shape[1]
    rows = gl.expand_dims(place.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    keys = gl.expand_dims(place.block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)), 0)
    slope = None
    if scoring.slopes is not None:
        b = gl.minimum(tile.b, scoring.batch - 1)  # rows that belong to no sequence have no slope, and see no key
        slope = gl.load(scoring.slopes + b * scoring.stride_slopes_b + tile.head).to(gl.float32)
    shift = shift_of(tile, scoring)
    t = scores.forward(s, Features(scoring.multiplier, scoring.softcap, slope, shift), rows, keys).t
    if (place.block >= place.full_hi) | (place.block < place.full_lo):
        t = gl.where(visible(window, rows, keys, shift, tile.seqlen_k), t, -INFINITY)
    return t


@gluon.jit
def first_softmax(t, tile, scoring):
    """Maximum `[ROWS]`, sums by thread and probabilities after a tile's first block."""
    with_sink = tile.b < scoring.batch
    layout: gl.constexpr = gl.SliceLayout(1, t.type.layout)
    m, l_start = softmax.start(scoring.sinks, tile.head, scoring.factor, with_sink, t.shape[0], layout)
    m, alpha, p = softmax.update(m, t, scoring.factor)
    l = softmax.sums_by_thread(p)  # noqa: E741
    return m, l + softmax.spread(l_start * alpha, l), p


@gluon.jit
def as_operand(p, o_layout: gl.constexpr, dtype: gl.constexpr):
    """Probabilities as the left operand of a product: they stay in the registers that they are in."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)


@gluon.jit
def store(results, acc, m, l, tile, first_row, consumer: gl.constexpr, scoring, PACKED: gl.constexpr):  # noqa: E741
    """The results of 64 rows whose keys are all seen."""
    D: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = m.type.layout
    weight, row_lse = softmax.finish(m, softmax.sums_of_rows(l, layout), scoring.factor)
    rows = first_row + gl.arange(0, ROWS, layout)
    start = results.lse + tile.lse_head.to(gl.int64) * results.stride_lse + tile.token_q
    gl.store(start + rows, row_lse, mask=rows < tile.seqlen_q)
    out = acc * gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, acc.type.layout)), 1)
    staged = results.staged.index(consumer)
    tma.store_wait(0)  # the last tile's results have left
    thread_barrier()
    staged.reshape([ROWS, D]).store(out.to(results.out.dtype))
    fence_async_shared()
    store_box(results.out, rows_at(tile, tile.head, first_row, PACKED), staged)


@gluon.jit
def consume(consumer: gl.constexpr, inputs, results, queue, window, scoring, TILE: gl.constexpr, PACKED: gl.constexpr):
    """A warpgroup that computes 64 rows of each tile."""
    WIDTH: gl.constexpr = TILE.width
    BLOCK_N: gl.constexpr = TILE.block_n
    CONSUMERS: gl.constexpr = TILE.consumers
    STAGES: gl.constexpr = TILE.stages
    Q_SLOTS: gl.constexpr = TILES_OF_Q * TILE.consumers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = results.out.dtype
    q, k, v = inputs.q, inputs.k, inputs.v
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)

    tile_count = 0
    block_count = 0
    tile = take_tile(queue, 0)
    place = place_in(tile, consumer, window, scoring, BLOCK_N)
    mbarrier.wait(q.full.index(consumer), 0)
    q_i = rows_of(q, consumer, Q_SLOTS, ROWS, WIDTH)
    wait_full(k, 0, STAGES)
    k_j = rows_of(k, 0, STAGES, BLOCK_N, WIDTH).permute((1, 0))
    s = warpgroup_mma(q_i, k_j, nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k, 0, STAGES)
    m, l, p = first_softmax(scored(s, place, tile, window, scoring, s_layout), tile, scoring)  # noqa: E741
    p_i = as_operand(p, o_layout, dtype)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, o_layout)
    wait_full(v, 0, STAGES)

    # Before each step, `p_i` are the probabilities of block `block_count`, whose values have arrived.
    while tile.b >= 0:
        q_i = rows_of(q, q_slot(tile_count, consumer, CONSUMERS), Q_SLOTS, ROWS, WIDTH)
        for above in range(tile.lo + 1, tile.hi):
            block_count += 1
            wait_full(k, block_count, STAGES)
            k_j = rows_of(k, block_count, STAGES, BLOCK_N, WIDTH).permute((1, 0))
            s = warpgroup_mma(q_i, k_j, nothing, use_acc=False, is_async=True)
            v_j = rows_of(v, block_count - 1, STAGES, BLOCK_N, WIDTH)
            acc = warpgroup_mma(p_i, v_j, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            release(k, block_count, STAGES)
            here = Place(place.first_row, place.block + tile.lo - above, place.full_lo, place.full_hi)
            m, alpha, p = softmax.update(m, scored(s, here, tile, window, scoring, s_layout), scoring.factor)
            l = softmax.scaled_sums(l, alpha) + softmax.sums_by_thread(p)  # noqa: E741
            wait_full(v, block_count, STAGES)  # not needed yet: it keeps the wait below after the exponentials
            acc, p, l = warpgroup_mma_wait(0, deps=(acc, p, l))  # noqa: E741
            release(v, block_count - 1, STAGES)
            p_i = as_operand(p, o_layout, dtype)
            acc *= gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o_layout)), 1)

        done, done_row, done_m, done_l = tile, place.first_row, m, l
        mbarrier.arrive(q.empty.index(q_slot(tile_count, consumer, CONSUMERS)), count=1)
        tile_count += 1
        tile = take_tile(queue, tile_count)
        place = place_in(tile, consumer, window, scoring, BLOCK_N)
        # Each branch computes what it multiplies: ptxas 12.8 loses operands' descriptors that cross a branch.
        if tile.b >= 0:
            # The same step over the edge between two tiles.
            slot = q_slot(tile_count, consumer, CONSUMERS)
            mbarrier.wait(q.full.index(slot), tile_count // TILES_OF_Q & 1)
            wait_full(k, block_count + 1, STAGES)
            q_i = rows_of(q, slot, Q_SLOTS, ROWS, WIDTH)
            k_j = rows_of(k, block_count + 1, STAGES, BLOCK_N, WIDTH).permute((1, 0))
            s = warpgroup_mma(q_i, k_j, nothing, use_acc=False, is_async=True)
            v_j = rows_of(v, block_count, STAGES, BLOCK_N, WIDTH)
            acc = warpgroup_mma(p_i, v_j, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            release(k, block_count + 1, STAGES)
            m, l, p = first_softmax(  # noqa: E741
                scored(s, place, tile, window, scoring, s_layout), tile, scoring
            )
            wait_full(v, block_count + 1, STAGES)
            acc, p, l = warpgroup_mma_wait(0, deps=(acc, p, l))  # noqa: E741
            p_i = as_operand(p, o_layout, dtype)
        else:
            v_j = rows_of(v, block_count, STAGES, BLOCK_N, WIDTH)
            acc = warpgroup_mma(p_i, v_j, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v, block_count, STAGES)
        block_count += 1
        store(results, acc, done_m, done_l, done, done_row, consumer, scoring, PACKED)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, o_layout)
    tma.store_wait(0)
