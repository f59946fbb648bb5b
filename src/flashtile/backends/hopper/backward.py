"""FlashAttention's backward pass on Hopper (Shah et al., "FlashAttention-3", 2024, section 3 and appendix B), in Gluon.

A program owns 128 keys of a head and walks over the rows that see them; one warp schedules, one copies, two warpgroups
of 64 keys each compute. Tiles are transposed, `[N, M]`: probabilities and their gradients are left operands of dv and
dk in the registers that they are in. Gradients of scores also pass through shared memory: each warpgroup computes one
half of the block's dq from all 128 keys. One more warp adds dq to sums in fp32, of which `rows` makes dq in the end.
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

from . import scores
from .backward_copying import BackwardInputs, Sources, copy_backward, new_rows
from .backward_schedule import KeyWork, first_rows, next_rows, schedule_keys, take_keys
from .backward_sums import COLUMNS, HALVES, Sums, add_sums, scrambled
from .bits import all_seen, where_bits
from .copying import ROWS, keys_at
from .masking import Window, row_blocks, rows_seen
from .pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    arrive_at,
    barriers,
    new_ring,
    release,
    rows_of,
    wait_at,
    wait_full,
)
from .schedule import Sequences, new_queue
from .scores import Scoring
from .versions import kernel, same_memory, store_box, thread_barrier

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
    """Boxes of q and dout are [1, 1, BLOCK_M, D], those of k, v, dk and dv [1, 1, ROWS, D], that of dq [ROWS, COLUMNS],
    those of the numbers of rows [1, BLOCK_M]. Packed sequences are described as in `forward_kernel`.
    """
    PACKED: gl.constexpr = cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = TILE.head_dim
    FOR_K: gl.constexpr = FIRST_GATE + TILE.stages
    FOR_V: gl.constexpr = FOR_K + HALVES
    FOR_SUMS: gl.constexpr = FOR_V + HALVES
    gl.static_assert(FOR_SUMS < FOR_BOTH)
    inputs = BackwardInputs(
        new_rows(q_desc, start_desc, TILE.stages, Gates(FIRST_GATE, BOTH_AND_ONE)),
        new_ring(k_desc, HALVES, Gates(FOR_K, BOTH_AND_ONE), HEAD_DIM),
        new_ring(v_desc, HALVES, Gates(FOR_V, BOTH_AND_ONE), HEAD_DIM),
    )
    staged = gl.allocate_shared_memory(gl.float32, [HALVES] + dq_desc.block_type.shape, dq_desc.layout)
    sums = Sums(staged, Gates(FOR_SUMS, BOTH_AND_ONE), barriers(1, 1))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE.block_m], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [DS_STAGES * HALVES, ROWS, TILE.block_m], ds_layout)
    queue = new_queue(HALVES + 2)
    fence_async_shared()

    work = KeyWork(
        num_tiles, num_blocks, all_heads, section, counter, num_heads_k, group, padded_rows, diagonal
    )  # fmt: skip
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, None, batch)
    gradients = Gradients(dk_desc, dv_desc, scale, ds, sums)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, start_desc, delta_desc)
    gl.warp_specialize(
        [
            (compute, (0, inputs, gradients, queue, group, window, scoring, TILE, PACKED)),
            (compute, (gl.constexpr(1), inputs, gradients, queue, group, window, scoring, TILE, PACKED)),
            (copy_backward, (sources, inputs, queue, group, padded_rows, TILE, PACKED)),
            (add_sums, (dq_desc, sums, queue, turns, window, group, padded_rows, TILE)),
            (schedule_keys, (queue, work, sequences, window, TILE, PACKED)),
        ],
        [4, 1, 1, 1],
        [TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers, TILE.copy_registers],
    )


@gluon.jit
def compute(
    half: gl.constexpr, inputs, gradients, queue, group, window, scoring, TILE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes dk and dv of 64 keys, and half of the dq that 128 keys give."""
    WIDTH: gl.constexpr = TILE.width
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    dtype: gl.constexpr = gradients.ds.dtype
    EARLY: gl.constexpr = scoring.softcap is None  # its derivative takes the registers of the next block's scores
    rows, k, v, sums = inputs.rows, inputs.k, inputs.v, gradients.sums
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        first_key = tile.first_key + half * ROWS
        blocks = row_blocks(window, first_key, first_key + (ROWS - 1), tile.shift, tile.seqlen_q, BLOCK_M)
        whole_from = gl.where(first_key + ROWS > tile.seqlen_k, tile.hi, blocks.full_lo)
        dk = gl.zeros([ROWS, WIDTH], gl.float32, sum_layout)
        dv = gl.zeros([ROWS, WIDTH], gl.float32, sum_layout)
        for h in gl.static_range(HALVES):
            wait_full(k, tile_count * HALVES + h, HALVES)
            wait_full(v, tile_count * HALVES + h, HALVES)
        tma.store_wait(0)  # the last tile's dk has left
        thread_barrier()
        m, member = first_rows(tile, TILE.downwards), 0
        steps = group * (tile.hi - tile.lo)
        s = nothing
        if EARLY and steps > 0:
            s = warpgroup_mma_wait(0, deps=(first_product(rows, k, count, nothing, half, TILE),))
        for left in range(steps, 0, -1):
            slot, phase = count % STAGES, (count // STAGES) & 1
            masked = (m < whole_from) | (m >= blocks.full_hi)
            q_i = rows.q.index(slot).reshape([BLOCK_M, WIDTH])
            dout_i = rows.dout.index(slot).reshape([BLOCK_M, WIDTH])

            # An accumulator is written before a product is in flight: ptxas would wait for it.
            mbarrier.wait(rows.dout_full.index(slot), phase)
            dp = rows.delta.index(slot).load(s_layout).broadcast_to([ROWS, BLOCK_M])
            if not EARLY:
                s = first_product(rows, k, count, nothing, half, TILE)
            v_j = rows_of(v, afresh(half), HALVES)[0]
            dp = warpgroup_mma(v_j, dout_i.permute((1, 0)), dp, is_async=True)
            if not EARLY:
                s = warpgroup_mma_wait(1, deps=(s,))
            score = scored(s, scoring, tile, tile.head_k * group + member, m * BLOCK_M, first_key)
            p = gl.exp2(score.t * scoring.factor + rows.start.index(slot).load(s_layout))
            seen = all_seen(p)
            if masked:
                seen = rows_seen(p, window, afresh(first_key), m * BLOCK_M, tile.shift, tile.seqlen_q, tile.seqlen_k)
                p = where_bits(seen, p, 0.0)
            p_i = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
            weight = scores.derivative(p, score, scoring)
            # It runs while gradients of scores are computed, and keeps the wait for dp behind the exponentials.
            dv = warpgroup_mma(p_i, dout_i, dv, is_async=True)
            dp, weight = warpgroup_mma_wait(1, deps=(dp, weight))
            if masked:  # 0 * dp would be NaN where dp is
                dp = where_bits(seen, dp, 0.0)
            ds = (weight * dp).to(dtype)
            stage = count % DS_STAGES * HALVES
            gradients.ds.index(stage + half).store(ds)
            fence_async_shared()
            ds_i = gl.convert_layout(ds, operand, assert_trivial=True)
            if EARLY:
                dk = warpgroup_mma(ds_i, q_i, dk, is_async=True)
                wait_at(FOR_BOTH, BOTH)
                dq = product_with_keys(gradients.ds, k, stage, half, TILE)
                dv = warpgroup_mma_wait(3, deps=(dv,))  # its operand's registers are needed
                # The next block's scores; once more the last one's, which nobody reads.
                s = first_product(rows, k, gl.where(left > 1, count + 1, count), nothing, half, TILE)
                dq, dk = warpgroup_mma_wait(1, deps=(dq, dk))
            else:
                wait_at(FOR_BOTH, BOTH)
                dq = product_with_keys(gradients.ds, k, stage, half, TILE)
                dk = warpgroup_mma(ds_i, q_i, dk, is_async=True)
                dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            mbarrier.wait(sums.empty.index(0), (count & 1) ^ 1)
            sums.staged.index(half).store(scrambled(dq))
            fence_async_shared()
            arrive_at(sums.full.first, sums.full.threads)
            if EARLY:
                s = warpgroup_mma_wait(0, deps=(s,))
            else:
                dk = warpgroup_mma_wait(0, deps=(dk,))
            release(rows.gates, count, STAGES)
            count += 1
            m, member = next_rows(m, member, tile, group, TILE.downwards)
        for h in gl.static_range(HALVES):
            release(k.gates, tile_count * HALVES + h, HALVES)
            release(v.gates, tile_count * HALVES + h, HALVES)
        mbarrier.wait(sums.empty.index(0), (count & 1) ^ 1)  # the last dq has left what dv and dk take now
        at = keys_at(tile, first_key, PACKED)
        store_keys(gradients.dv, at, dv, sums.staged.index(half))
        store_keys(gradients.dk, at, dk * gradients.scale, sums.staged.index(half))
        tile_count += 1
        tile = take_keys(queue, tile_count)
    tma.store_wait(0)


@gluon.jit
def scored(s, scoring, tile, head, first_row, first_key):
    """Final scores of products `[N, M]`."""
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    keys = gl.expand_dims(first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    return scores.forward(s, scoring, tile.b, head, tile.shift, rows, keys)


@gluon.jit
def first_product(rows, k, count, nothing, half: gl.constexpr, TILE: gl.constexpr):
    """`k @ q^T` `[ROWS, BLOCK_M]` with the count-th block of rows, in flight."""
    slot = count % TILE.stages
    mbarrier.wait(rows.q_full.index(slot), (count // TILE.stages) & 1)
    q_i = rows.q.index(slot).reshape([TILE.block_m, TILE.width])
    k_j = rows_of(k, afresh(half), HALVES)[0]
    return warpgroup_mma(k_j, q_i.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def product_with_keys(ds, k, stage, half: gl.constexpr, TILE: gl.constexpr):
    """The warpgroup's half of `ds @ k` `[BLOCK_M, D]`, in flight: 64 of 128 columns, or of 128 rows."""
    WIDTH: gl.constexpr = TILE.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    first = afresh(0)
    for h in gl.static_range(HALVES):
        ds_j = ds.index(stage + h)
        k_j = rows_of(k, first + h, HALVES)[0]
        if WIDTH == COLUMNS:
            ds_j = ds_j.slice(half * ROWS, ROWS, dim=1)
        else:
            k_j = k_j.slice(half * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(ds_j.permute((1, 0)), k_j, dq, use_acc=h > 0, is_async=True)
    return dq


@gluon.jit
def store_keys(desc, at, x, staged):
    """dk or dv of 64 keys."""
    box = same_memory(staged, desc.dtype, desc.block_type.shape, desc.layout)
    tma.store_wait(0)
    thread_barrier()
    box.reshape([x.shape[0], x.shape[1]]).store(x.to(desc.dtype))
    fence_async_shared()
    store_box(desc, at, box)
