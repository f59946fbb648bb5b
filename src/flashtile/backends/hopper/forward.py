"""FlashAttention's forward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3), in Gluon.

One warp copies q, k and v by TMA; two or three warpgroups of 64 rows each compute. In each step the product of q with
one block of keys and that of the block before with its values are both in flight while the softmax runs.
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
from .masking import Blocks, Window, key_blocks, visible
from .pipeline import Ring, fill, new_ring, release, rows_of, wait_full
from .schedule import Tiles, announce, announced, first_tile, new_announcement, next_tile, position_of
from .scores import Features
from .softmax import INFINITY
from .versions import kernel

ROWS = gl.constexpr(64)  # of one warpgroup


class Inputs(NamedTuple):
    """What the copying warp hands to the computing ones."""

    q: Ring  # a slot for each consumer
    k: Ring
    v: Ring
    announcement: gl.shared_memory_descriptor  # [CONSUMERS, 1] number of the tile


class Lengths(NamedTuple):
    num_heads: gl.tensor  # query heads
    group: gl.tensor  # of them that share a key head
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    shift: gl.tensor  # seqlen_k - seqlen_q, in an unsharded call


class Scoring(NamedTuple):
    """`factor` makes base-2 logarithms of scores, `multiplier` scores of products."""

    factor: gl.tensor
    multiplier: gl.tensor | None
    softcap: gl.tensor | None
    slopes: gl.tensor | None  # pointer, [H] or [B, H]
    stride_slopes_b: gl.tensor
    sinks: gl.tensor | None  # pointer, [H]


class Results(NamedTuple):
    out: gl.tensor  # descriptor
    staged: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, D]
    lse: gl.tensor  # pointer, [B, H, Sq]


@kernel
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, slopes, sinks, counter,
    stride_slopes_b, num_tiles, num_blocks, all_heads, section, num_heads, group, seqlen_q, seqlen_k, diagonal,
    window_left, window_right, top_left, factor, multiplier, softcap, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes of q and out are [1, 1, ROWS, D], those of k and v [1, 1, BLOCK_N, D]."""
    q = new_ring(q_desc, TILE.consumers, 1)
    k = new_ring(k_desc, TILE.stages, TILE.consumers)
    v = new_ring(v_desc, TILE.stages, TILE.consumers)
    inputs = Inputs(q, k, v, new_announcement(TILE.consumers))
    staged = gl.allocate_shared_memory(out_desc.dtype, [TILE.consumers] + out_desc.block_type.shape, out_desc.layout)
    fence_async_shared()

    tiles = Tiles(num_tiles, num_blocks, all_heads, section, counter)
    lengths = Lengths(num_heads, group, seqlen_q, seqlen_k, seqlen_k - seqlen_q + diagonal)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, sinks)
    results = Results(out_desc, staged, lse)
    if TILE.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, tiles, lengths, window, scoring, TILE)),
                (consume, (gl.constexpr(1), inputs, results, tiles, lengths, window, scoring, TILE)),
                (copy, (q_desc, k_desc, v_desc, inputs, tiles, lengths, window, TILE)),
            ],
            [4, 1],
            [TILE.consumer_registers, TILE.copy_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, inputs, results, tiles, lengths, window, scoring, TILE)),
                (consume, (gl.constexpr(1), inputs, results, tiles, lengths, window, scoring, TILE)),
                (consume, (gl.constexpr(2), inputs, results, tiles, lengths, window, scoring, TILE)),
                (copy, (q_desc, k_desc, v_desc, inputs, tiles, lengths, window, TILE)),
            ],
            [4, 4, 1],
            [TILE.consumer_registers, TILE.consumer_registers, TILE.copy_registers],
        )


@gluon.jit
def copy(q_desc, k_desc, v_desc, inputs, tiles, lengths, window, TILE: gl.constexpr):
    """The warp that copies. Values follow their keys by one block: they are needed that much later."""
    BLOCK_N: gl.constexpr = TILE.block_n
    CONSUMERS: gl.constexpr = TILE.consumers
    STAGES: gl.constexpr = TILE.stages
    q, k, v = inputs.q, inputs.k, inputs.v
    n = first_tile()
    tile_count = 0
    block_count = 0
    while n < tiles.count:
        following = next_tile(tiles)
        any_head, block = position_of(tiles, n)
        b, head = any_head // lengths.num_heads, any_head % lengths.num_heads
        head_k = head // lengths.group
        first_row = block * (CONSUMERS * ROWS)
        blocks = blocks_of_tile(window, first_row, lengths, TILE)

        start = (blocks.hi - 1) * BLOCK_N
        fill(k, k_desc, [b, head_k, start, 0], block_count, STAGES)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q.empty.index(c), (tile_count & 1) ^ 1)
            announce(inputs.announcement, c, n)
            mbarrier.expect(q.full.index(c), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [b, head, first_row + c * ROWS, 0], q.full.index(c), q.data.index(c)
            )
        for _ in range(blocks.lo + 1, blocks.hi):
            fill(k, k_desc, [b, head_k, start - BLOCK_N, 0], block_count + 1, STAGES)
            fill(v, v_desc, [b, head_k, start, 0], block_count, STAGES)
            start -= BLOCK_N
            block_count += 1
        fill(v, v_desc, [b, head_k, start, 0], block_count, STAGES)
        block_count += 1
        tile_count += 1
        n = following
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(q.empty.index(c), (tile_count & 1) ^ 1)
        announce(inputs.announcement, c, -1)
        mbarrier.arrive(q.full.index(c), count=1)


@gluon.jit
def blocks_of_tile(window, first_row, lengths, TILE: gl.constexpr):
    BLOCK_N: gl.constexpr = TILE.block_n
    CONSUMERS: gl.constexpr = TILE.consumers
    last_row = gl.minimum(first_row + CONSUMERS * ROWS, lengths.seqlen_q) - 1
    return key_blocks(window, first_row, last_row, lengths.shift, lengths.seqlen_k, BLOCK_N)


@gluon.jit
def blocks_of_rows(window, first_row, tile_blocks, lengths, TILE: gl.constexpr):
    """The tile's blocks, of which these 64 rows need masks for fewer."""
    BLOCK_N: gl.constexpr = TILE.block_n
    own = key_blocks(window, first_row, first_row + (ROWS - 1), lengths.shift, lengths.seqlen_k, BLOCK_N)
    full_hi = gl.maximum(gl.minimum(own.full_hi, tile_blocks.hi), tile_blocks.lo)
    full_lo = gl.minimum(gl.maximum(own.full_lo, tile_blocks.lo), full_hi)
    return Blocks(tile_blocks.lo, full_lo, full_hi, tile_blocks.hi)


@gluon.jit
def consume(
    consumer: gl.constexpr, inputs, results, tiles, lengths, window, scoring, TILE: gl.constexpr
):  # fmt: skip
    """A warpgroup that computes 64 rows of each tile."""
    WIDTH: gl.constexpr = TILE.width
    BLOCK_N: gl.constexpr = TILE.block_n
    CONSUMERS: gl.constexpr = TILE.consumers
    STAGES: gl.constexpr = TILE.stages
    Q_IN_REGISTERS: gl.constexpr = TILE.q_in_registers
    q, k, v = inputs.q, inputs.k, inputs.v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = results.out.dtype

    tile_count = 0
    block_count = 0
    mbarrier.wait(q.full.index(consumer), 0)
    n = announced(inputs.announcement, consumer)
    while n >= 0:
        any_head, block = position_of(tiles, n)
        b, head = any_head // lengths.num_heads, any_head % lengths.num_heads
        tile_row = block * (CONSUMERS * ROWS)
        first_row = tile_row + consumer * ROWS
        blocks = blocks_of_rows(window, first_row, blocks_of_tile(window, tile_row, lengths, TILE), lengths, TILE)
        rows = first_row + gl.arange(0, ROWS, row_layout)
        slope = None
        if scoring.slopes is not None:
            slope = gl.load(scoring.slopes + b.to(gl.int64) * scoring.stride_slopes_b + head).to(gl.float32)
        features = Features(scoring.multiplier, scoring.softcap, slope, lengths.shift)

        q_i = q.data.index(consumer).reshape([ROWS, WIDTH])
        if Q_IN_REGISTERS:
            q_i = q_i.load(gl.DotOperandLayout(0, s_layout, 2))
            fence_async_shared()
            mbarrier.arrive(q.empty.index(consumer), count=1)

        # The first block, which may be the last one that rows see.
        wait_full(k, block_count, STAGES)
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
        k_j = rows_of(k, block_count, STAGES, BLOCK_N, WIDTH).permute((1, 0))
        s = warpgroup_mma(q_i, k_j, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(k, block_count, STAGES)
        keys = (blocks.hi - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        t = scores.forward(s, features, rows, keys)
        t = gl.where(visible(window, rows, keys, lengths.shift, lengths.seqlen_k), t, -INFINITY)
        m, l = softmax.start(scoring.sinks, head, scoring.factor, ROWS, row_layout)  # noqa: E741
        m, alpha, p = softmax.update(m, t, scoring.factor)
        sums = softmax.sums_by_thread(p)
        l = softmax.spread(l * alpha, sums) + sums  # noqa: E741
        p_i = as_operand(p, o_layout, dtype)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, o_layout)
        wait_full(v, block_count, STAGES)

        right = gl.maximum(blocks.hi - blocks.full_hi, 1)
        full = gl.maximum(blocks.hi - blocks.full_lo, right)
        if window.right is not None or window.top_left is not None:
            m, l, acc, p_i = attend(  # noqa: E741
                m, l, acc, p_i, q_i, k, v, block_count, blocks.hi, 1, right, features, window, rows, lengths.seqlen_k,
                scoring.factor, True, TILE, dtype,
            )  # fmt: skip
        m, l, acc, p_i = attend(  # noqa: E741
            m, l, acc, p_i, q_i, k, v, block_count, blocks.hi, right, full, features, window, rows, lengths.seqlen_k,
            scoring.factor, False, TILE, dtype,
        )  # fmt: skip
        if window.left is not None:
            m, l, acc, p_i = attend(  # noqa: E741
                m, l, acc, p_i, q_i, k, v, block_count, blocks.hi, full, blocks.hi - blocks.lo, features, window, rows,
                lengths.seqlen_k, scoring.factor, True, TILE, dtype,
            )  # fmt: skip
        block_count += blocks.hi - blocks.lo - 1
        if not Q_IN_REGISTERS:
            mbarrier.arrive(q.empty.index(consumer), count=1)

        acc = warpgroup_mma(p_i, rows_of(v, block_count, STAGES, BLOCK_N, WIDTH), acc, is_async=True)
        weight, row_lse = softmax.finish(m, softmax.sums_of_rows(l, row_layout), scoring.factor)
        row = any_head.to(gl.int64) * lengths.seqlen_q + rows
        gl.store(results.lse + row, row_lse, mask=rows < lengths.seqlen_q)
        tma.store_wait(0)  # the last tile's results have left
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v, block_count, STAGES)
        acc *= gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, o_layout)), 1)
        staged = results.staged.index(consumer)
        staged.reshape([ROWS, WIDTH]).store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(results.out, [b, head, first_row, 0], staged)

        block_count += 1
        tile_count += 1
        mbarrier.wait(q.full.index(consumer), tile_count & 1)
        n = announced(inputs.announcement, consumer)
    tma.store_wait(0)


@gluon.jit
def attend(
    m, l, acc, p_i, q_i, k, v, block_count, hi, begin, end, features, window, rows, seqlen_k, factor,  # noqa: E741
    MASKED: gl.constexpr, TILE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The rows' state after the blocks `hi - 1 - begin` down to `hi - end`. `p_i` are the probabilities of the block
    before, whose product with its values is taken here, beside the scores of this one.
    """
    WIDTH: gl.constexpr = TILE.width
    BLOCK_N: gl.constexpr = TILE.block_n
    STAGES: gl.constexpr = TILE.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    for j in range(begin, end):
        n = block_count + j
        wait_full(k, n, STAGES)
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
        k_j = rows_of(k, n, STAGES, BLOCK_N, WIDTH).permute((1, 0))
        s = warpgroup_mma(q_i, k_j, nothing, use_acc=False, is_async=True)
        v_j = rows_of(v, n - 1, STAGES, BLOCK_N, WIDTH)
        acc = warpgroup_mma(p_i, v_j, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        release(k, n, STAGES)
        keys = (hi - 1 - j) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        t = scores.forward(s, features, rows, keys)
        if MASKED:
            t = gl.where(visible(window, rows, keys, features.shift, seqlen_k), t, -INFINITY)
        m, alpha, p = softmax.update(m, t, factor)
        l = softmax.scaled_sums(l, alpha) + softmax.sums_by_thread(p)  # noqa: E741
        wait_full(v, n, STAGES)  # needed in the next step; here it keeps the wait below after the exponentials
        acc, p, l = warpgroup_mma_wait(0, deps=(acc, p, l))  # noqa: E741
        release(v, n - 1, STAGES)
        p_i = as_operand(p, o_layout, dtype)
        acc *= gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o_layout)), 1)
    return m, l, acc, p_i


@gluon.jit
def as_operand(p, o_layout: gl.constexpr, dtype: gl.constexpr):
    """Probabilities as the left operand of a product: they stay in the registers that they are in."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
