"""FlashAttention's backward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3 and appendix B), in Gluon.

A program owns 128 keys of a head and walks over the rows that see them; one warp schedules, one copies, two warpgroups
of 64 keys each compute. Tiles are transposed, `[N, M]`: probabilities and their gradients are left operands of dv and
dk in the registers that they are in. Gradients of scores also pass through shared memory: each warpgroup computes its
share of the block's dq from all 128 keys. Two more warps add these shares to sums in fp32, of which `rows` makes dq in
the end.

Products follow each other so that other work is done beside each: exponentials beside that of dout with v; the exchange
of gradients of scores beside dv; then comes dq, which is handed over beside the next scores and dk.
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

from ..shared import scores
from ..shared.chunks import add_weighted_rows, no_sums, product_of_rows, wait_for_all, wait_for_sums
from ..shared.column_masks import all_seen, where_bits
from ..shared.epilogue import store_columns
from ..shared.masking import Window, row_blocks, rows_seen
from ..shared.pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    arrive_at,
    barriers,
    columns_of,
    new_memory,
    new_ring,
    release,
    rows_of,
    slot_of,
    wait_at,
    wait_full,
)
from ..shared.producer import ROWS, keys_at
from ..shared.schedule import Sequences, new_queue
from ..shared.scores import Scoring
from ..shared.versions import kernel, same_memory, thread_barrier
from .dq_sums import COLUMNS, HALVES, Sums, add_sums, scrambled
from .producer import BackwardInputs, Sources, copy_backward, new_rows
from .schedule import KeyWork, first_rows, next_rows, schedule_keys, take_keys
from .scores import begin, place_of, probabilities

DS_STAGES = gl.constexpr(2)
BOTH = gl.constexpr(256)  # threads of the warpgroups that compute
BOTH_AND_ONE = gl.constexpr(256 + 32)
FOR_BOTH = LAST_GATE  # where they meet when gradients of scores are in shared memory


class Gradients(NamedTuple):
    """Where results go, and the shared memory that gradients of scores pass through."""

    dk: gl.tensor  # descriptor
    dv: gl.tensor  # descriptor
    scale: gl.tensor  # of dk
    ds: gl.shared_memory_descriptor  # [DS_STAGES * HALVES, ROWS, BLOCK_M]
    sums: Sums


@kernel
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, start_desc, delta_desc, dq_desc, dk_desc, dv_desc, counter, turns, slopes,
    cu_seqlens_q, cu_seqlens_k, seqused_k, stride_slopes_b, batch,
    num_tiles, num_blocks, all_heads, section, num_heads_k, group, padded_rows,
    seqlen_q, seqlen_k, diagonal, window_left, window_right, top_left,
    factor, multiplier, softcap, scale, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes of q and dout are [1, 1, BLOCK_M, columns], those of k, v, dk and dv [1, 1, ROWS, columns], that of dq
    [ROWS, columns], those of the numbers of rows [1, BLOCK_M]. Packed sequences are described as in `forward_kernel`.
    """
    PACKED: gl.constexpr = cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = TILE.head_dim
    FOR_K: gl.constexpr = FIRST_GATE + TILE.stages
    FOR_V: gl.constexpr = FOR_K + HALVES
    FOR_SUMS: gl.constexpr = FOR_V + HALVES
    gl.static_assert(FOR_SUMS + HALVES <= FOR_BOTH)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, start_desc, delta_desc)
    inputs = BackwardInputs(
        new_rows(sources, Gates(FIRST_GATE, BOTH_AND_ONE), TILE),
        new_ring(k_desc, HALVES, Gates(FOR_K, BOTH_AND_ONE), HEAD_DIM),
        new_ring(v_desc, HALVES, Gates(FOR_V, BOTH_AND_ONE), HEAD_DIM),
    )
    staged = new_memory(dq_desc, HALVES, COLUMNS)
    sums = Sums(staged, Gates(FOR_SUMS, 128 + 32), barriers(HALVES, 1))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE.block_m], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [DS_STAGES * HALVES, ROWS, TILE.block_m], ds_layout)
    queue = new_queue(2 * HALVES + 1)
    fence_async_shared()

    work = KeyWork(
        num_tiles, num_blocks, all_heads, section, counter, num_heads_k, group, padded_rows, diagonal
    )  # fmt: skip
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, None, batch)
    gradients = Gradients(dk_desc, dv_desc, scale, ds, sums)
    gl.warp_specialize(
        [
            (compute, (0, inputs, gradients, queue, group, window, scoring, TILE, PACKED)),
            (compute, (gl.constexpr(1), inputs, gradients, queue, group, window, scoring, TILE, PACKED)),
            (copy_backward, (sources, inputs, queue, group, padded_rows, TILE, PACKED)),
            (add_sums, (0, dq_desc, sums, queue, turns, window, group, padded_rows, TILE)),
            (add_sums, (gl.constexpr(1), dq_desc, sums, queue, turns, window, group, padded_rows, TILE)),
            (schedule_keys, (queue, work, sequences, window, TILE, PACKED)),
        ],
        [4, 1, 1, 1, 1],
        [TILE.consumer_registers] + [TILE.copy_registers] * 4,
    )


@gluon.jit
def compute(
    half: gl.constexpr, inputs, gradients, queue, group, window, scoring, TILE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes dk and dv of 64 keys, and its share of the dq that 128 keys give."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    CHUNKS: gl.constexpr = len(HEAD_DIM.chunks)  # products that one of a head dimension takes
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dtype: gl.constexpr = gradients.ds.dtype
    rows, k, v, sums = inputs.rows, inputs.k, inputs.v, gradients.sums
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        first_key = tile.first_key + half * ROWS
        blocks = row_blocks(window, first_key, first_key + (ROWS - 1), tile.shift, tile.seqlen_q, BLOCK_M)
        whole_from = gl.where(first_key + ROWS > tile.seqlen_k, tile.hi, blocks.full_lo)
        dk = no_sums(HEAD_DIM)
        dv = no_sums(HEAD_DIM)
        for h in gl.static_range(HALVES):
            wait_full(k, tile_count * HALVES + h, HALVES)
            wait_full(v, tile_count * HALVES + h, HALVES)
        tma.store_wait(0)  # the last tile's dk has left
        thread_barrier()
        m, member = first_rows(tile, TILE.downwards), 0
        steps = group * (tile.hi - tile.lo)
        s = nothing
        if steps > 0:
            s = warpgroup_mma_wait(0, deps=(first_product(rows, k, count, nothing, half, TILE),))
        place = place_of(tile, group, member, m, first_key, TILE)
        begun = begin(s, rows, count, place, scoring, TILE)  # where there are no steps, nobody uses it
        for left in range(steps, 0, -1):
            q_i = rows_of(rows.q, count, STAGES)
            dout_i = rows_of(rows.dout, count, STAGES)
            masked = (m < whole_from) | (m >= blocks.full_hi)

            # An accumulator is written before a product is in flight: ptxas would wait for it.
            wait_full(rows.dout, count, STAGES)
            dp = rows.delta.index(slot_of(count, STAGES)).load(s_layout).broadcast_to([ROWS, BLOCK_M])
            dp = product_of_rows(rows_of(v, afresh(half), HALVES), dout_i, dp, ADD=True)
            p, score = probabilities(begun, rows, count, place, scoring, TILE)
            seen = all_seen(p)
            if masked:
                seen = rows_seen(p, window, afresh(first_key), m * BLOCK_M, tile.shift, tile.seqlen_q, tile.seqlen_k)
                p = where_bits(seen, p, 0.0)
            weight = scores.derivative(p, score, scoring)
            dp, weight = warpgroup_mma_wait(0, deps=(dp, weight))
            if masked:  # 0 * dp would be NaN where dp is
                dp = where_bits(seen, dp, 0.0)
            ds = (weight * dp).to(dtype)
            stage = slot_of(count, DS_STAGES) * HALVES
            gradients.ds.index(stage + half).store(ds)
            dv = add_weighted_rows(dv, p.to(dtype), dout_i)
            wait_at(FOR_BOTH, BOTH)
            fence_async_shared()  # for both warpgroups' stores: each one's are done when it comes to the barrier
            dq = share_of_dq(gradients.ds, k, stage, half, TILE)
            dv = wait_for_sums(dv, HALVES)  # its operand's registers are needed
            # The next block's scores; once more the last one's, which nobody reads.
            after = gl.where(left > 1, count + 1, count)
            s = first_product(rows, k, after, nothing, half, TILE)
            dk = add_weighted_rows(dk, ds, q_i)
            dq = warpgroup_mma_wait(2 * CHUNKS, deps=(dq,))
            mbarrier.wait(sums.empty.index(half), (count & 1) ^ 1)
            columns_of(sums.staged.index(half), 0, dq.shape[1]).store(scrambled(dq))
            arrive_at(sums.full.first + half, sums.full.threads)
            s = warpgroup_mma_wait(CHUNKS, deps=(s,))
            m, member = next_rows(m, member, tile, group, TILE.downwards)
            place = place_of(tile, group, member, m, first_key, TILE)
            begun = begin(s, rows, after, place, scoring, TILE)
            dk, begun = wait_for_all(dk, begun)
            release(rows.gates, count, STAGES)
            count += 1
        for h in gl.static_range(HALVES):
            release(k.gates, tile_count * HALVES + h, HALVES)
            release(v.gates, tile_count * HALVES + h, HALVES)
        mbarrier.wait(sums.empty.index(half), (count & 1) ^ 1)  # the last dq has left what dv and dk take now
        at = keys_at(tile, first_key, PACKED)
        store_keys(gradients.dv, at, dv, None, sums.staged.index(half), HEAD_DIM)
        store_keys(gradients.dk, at, dk, gradients.scale, sums.staged.index(half), HEAD_DIM)
        tile_count += 1
        tile = take_keys(queue, tile_count)
    tma.store_wait(0)


@gluon.jit
def first_product(rows, k, count, nothing, half: gl.constexpr, TILE: gl.constexpr):
    """`k @ q^T` `[ROWS, BLOCK_M]` with the count-th block of rows, in flight."""
    wait_full(rows.q, count, TILE.stages)
    q_i = rows_of(rows.q, count, TILE.stages)
    return product_of_rows(rows_of(k, afresh(half), HALVES), q_i, nothing)


@gluon.jit
def share_of_dq(ds, k, stage, half: gl.constexpr, TILE: gl.constexpr):
    """The warpgroup's share of `ds @ k` `[BLOCK_M, D]`, in flight."""
    SHARE: gl.constexpr = TILE.shares[half]
    WIDTH: gl.constexpr = SHARE.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    first = afresh(0)
    for h in gl.static_range(HALVES):
        ds_j = columns_of(ds.index(stage + h), SHARE.row, ROWS)
        k_j = rows_of(k, first + h, HALVES)[SHARE.chunk]
        k_j = columns_of(k_j, SHARE.column - TILE.head_dim.starts[SHARE.chunk], WIDTH)
        dq = warpgroup_mma(ds_j.permute((1, 0)), k_j, dq, use_acc=h > 0, is_async=True)
    return dq


@gluon.jit
def store_keys(desc, at, x, scale, staged, HEAD_DIM: gl.constexpr):
    """dk or dv of 64 keys."""
    memory = same_memory(staged, desc.dtype, desc.block_type.shape[:-1] + [HEAD_DIM.room], desc.layout)
    for c in gl.static_range(len(x)):
        columns = x[c]
        if scale is not None:
            columns = columns * scale
        store_columns(desc, columns, at, memory, HEAD_DIM.starts[c])
