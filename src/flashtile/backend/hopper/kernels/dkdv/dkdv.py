"""dk and dv of wide heads on Hopper, in Gluon: a program owns 64 keys of a head and walks over the rows that see them.

Two warpgroups compute, each two products of a step: one probabilities and dv, the other their gradients and dk. What
the first one finds passes to the second one through shared memory, in fp32. Tiles are transposed, `[keys, rows]`: what
is computed of scores is the left operand of dv and dk in the registers that it is in. dq has a kernel of its own,
`wide_rows`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..backward.dq_sums import scrambled, unscrambled
from ..backward.producer import BackwardInputs, Sources, copy_backward, new_rows
from ..backward.schedule import KeyWork, first_rows, next_rows, schedule_keys, take_keys
from ..backward.scores import place_of, scored
from ..shared import scores
from ..shared.chunks import add_weighted_rows, no_sums, product_of_rows, wait_for_sums
from ..shared.column_masks import where_bits
from ..shared.epilogue import Result, store_sums
from ..shared.masking import Window, row_blocks, rows_seen
from ..shared.pipeline import (
    FIRST_GATE,
    LAST_GATE,
    Gates,
    afresh,
    arrive_at,
    new_ring,
    release,
    rows_of,
    slot_of,
    wait_at,
    wait_full,
)
from ..shared.producer import ROWS
from ..shared.schedule import Sequences, new_queue
from ..shared.scores import Scoring
from ..shared.versions import kernel

BOTH = gl.constexpr(256)  # threads of the warpgroups that compute


class Weights(NamedTuple):
    """What gradients of probabilities are multiplied with: probabilities, times what features' derivatives make of
    them. A slot is free when that of the rows is: these are let go later.
    """

    data: gl.shared_memory_descriptor  # [STAGES, ROWS, BLOCK_M] fp32, `scrambled`
    full: Gates


class Scope(NamedTuple):
    """What both warpgroups have to know."""

    inputs: BackwardInputs
    weights: Weights
    group: gl.tensor
    window: Window
    scoring: Scoring


@kernel
def wide_keys_kernel(
    q_desc, k_desc, v_desc, dout_desc, start_desc, delta_desc, dk, dv, slopes, counter,
    cu_seqlens_q, cu_seqlens_k, seqused_k, stride_dk_b, stride_dk_h, stride_dk_m, stride_dv_b, stride_dv_h, stride_dv_m,
    stride_slopes_b, num_tiles, num_blocks, all_heads, section, num_heads_k, group, padded_rows, batch,
    seqlen_q, seqlen_k, diagonal, window_left, window_right, top_left,
    factor, multiplier, softcap, scale, TILE: gl.constexpr,
):  # fmt: skip
    """Boxes are [1, 1, 64, columns], those of the numbers of rows [1, 64]. Packed sequences are described as in
    `forward_kernel`.
    """
    HEAD_DIM: gl.constexpr = TILE.head_dim
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    PACKED: gl.constexpr = cu_seqlens_q is not None
    BLOCK_M: gl.constexpr = TILE.block_m
    FOR_K: gl.constexpr = FIRST_GATE + TILE.stages
    FOR_WEIGHTS: gl.constexpr = FOR_K + 2
    gl.static_assert(FOR_WEIGHTS + TILE.stages - 1 <= LAST_GATE)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, start_desc, delta_desc)
    inputs = BackwardInputs(
        new_rows(sources, Gates(FIRST_GATE, BOTH + 32), TILE),
        new_ring(k_desc, 1, Gates(FOR_K, 128 + 32), HEAD_DIM),
        new_ring(v_desc, 1, Gates(FOR_K + 1, 128 + 32), HEAD_DIM_V),
    )
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = Weights(
        gl.allocate_shared_memory(gl.float32, [TILE.stages, ROWS, BLOCK_M], layout), Gates(FOR_WEIGHTS, BOTH)
    )
    queue = new_queue(3)
    fence_async_shared()

    work = KeyWork(
        num_tiles, num_blocks, all_heads, section, counter, num_heads_k, group, padded_rows, diagonal
    )  # fmt: skip
    sequences = Sequences(seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_k, batch)
    window = Window(window_left, window_right, top_left)
    scoring = Scoring(factor, multiplier, softcap, slopes, stride_slopes_b, None, batch)
    scope = Scope(inputs, weights, group, window, scoring)
    result_k = Result(dk, stride_dk_b, stride_dk_h, stride_dk_m)
    result_v = Result(dv, stride_dv_b, stride_dv_h, stride_dv_m)
    gl.warp_specialize(
        [
            (compute_dv, (scope, result_v, queue, TILE)),
            (compute_dk, (scope, result_k, scale, queue, TILE)),
            (copy_backward, (sources, inputs, queue, group, padded_rows, TILE, PACKED)),
            (schedule_keys, (queue, work, sequences, window, TILE, PACKED)),
        ],
        [4, 1, 1],
        [TILE.consumer_registers, TILE.copy_registers, TILE.copy_registers],
    )


@gluon.jit
def compute_dv(scope, result, queue, TILE: gl.constexpr):
    """The warpgroup that computes probabilities and dv."""
    HEAD_DIM_V: gl.constexpr = TILE.head_dim_v
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k, rows, weights, scoring = scope.inputs.k, scope.inputs.rows, scope.weights, scope.scoring
    dtype: gl.constexpr = k.data[0].dtype
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    count = 0
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = unmasked(scope.window, tile, BLOCK_M)
        dv = no_sums(HEAD_DIM_V)
        wait_full(k, tile_count, 1)
        m, member = first_rows(tile, TILE.downwards), 0
        for _ in range(scope.group * (tile.hi - tile.lo)):
            slot = slot_of(count, STAGES)
            masked = (m < full_lo) | (m >= full_hi)
            wait_full(rows.q, count, STAGES)
            s = product_of_rows(rows_of(k, afresh(0), 1), rows_of(rows.q, count, STAGES), nothing)
            s = warpgroup_mma_wait(0, deps=(s,))
            score = scored(s, place_of(tile, scope.group, member, m, tile.first_key, TILE), scoring)
            p = gl.exp2(score.t * scoring.factor + rows.start.index(slot).load(s_layout))
            if masked:
                seen = seen_of(p, scope.window, tile, m * BLOCK_M)
                p = where_bits(seen, p, 0.0)
            weights.data.index(slot).store(scrambled(scores.derivative(p, score, scoring)))
            arrive_at(weights.full.first + slot, weights.full.threads)
            wait_full(rows.dout, count, STAGES)
            dv = add_weighted_rows(dv, p.to(dtype), rows_of(rows.dout, count, STAGES))
            dv = wait_for_sums(dv)
            release(rows.gates, count, STAGES)
            count += 1
            m, member = next_rows(m, member, tile, scope.group, TILE.downwards)
        release(k.gates, tile_count, 1)
        store_sums(
            result, dv, 1.0, tile.b, tile.head_k, tile.token_k, tile.first_key, tile.seqlen_k, HEAD_DIM_V
        )  # fmt: skip
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def compute_dk(scope, result, scale, queue, TILE: gl.constexpr):
    """The warpgroup that computes gradients of probabilities and of scores, and dk."""
    HEAD_DIM: gl.constexpr = TILE.head_dim
    BLOCK_M: gl.constexpr = TILE.block_m
    STAGES: gl.constexpr = TILE.stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    v, rows, weights = scope.inputs.v, scope.inputs.rows, scope.weights
    dtype: gl.constexpr = v.data[0].dtype
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    in_memory: gl.constexpr = scrambled(nothing).type.layout
    count = 0
    tile_count = 0
    tile = take_keys(queue, 0)
    while tile.b >= 0:
        full_lo, full_hi = unmasked(scope.window, tile, BLOCK_M)
        dk = no_sums(HEAD_DIM)
        wait_full(v, tile_count, 1)
        m, member = first_rows(tile, TILE.downwards), 0
        for _ in range(scope.group * (tile.hi - tile.lo)):
            slot = slot_of(count, STAGES)
            masked = (m < full_lo) | (m >= full_hi)
            wait_full(rows.dout, count, STAGES)
            dp = product_of_rows(rows_of(v, afresh(0), 1), rows_of(rows.dout, count, STAGES), nothing)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            dp += rows.delta.index(slot).load(s_layout)
            if masked:  # 0 * dp would be NaN where dp is
                dp = where_bits(seen_of(dp, scope.window, tile, m * BLOCK_M), dp, 0.0)
            wait_at(weights.full.first + slot, weights.full.threads)
            weight = unscrambled(weights.data.index(slot).load(in_memory), s_layout)
            ds = (weight * dp).to(dtype)
            wait_full(rows.q, count, STAGES)
            dk = add_weighted_rows(dk, ds, rows_of(rows.q, count, STAGES))
            dk = wait_for_sums(dk)
            release(rows.gates, count, STAGES)
            count += 1
            m, member = next_rows(m, member, tile, scope.group, TILE.downwards)
        release(v.gates, tile_count, 1)
        store_sums(
            result, dk, scale, tile.b, tile.head_k, tile.token_k, tile.first_key, tile.seqlen_k, HEAD_DIM
        )  # fmt: skip
        tile_count += 1
        tile = take_keys(queue, tile_count)


@gluon.jit
def unmasked(window, tile, BLOCK_M: gl.constexpr):
    """Blocks of rows that see all keys of a tile."""
    blocks = row_blocks(window, tile.first_key, tile.first_key + (ROWS - 1), tile.shift, tile.seqlen_q, BLOCK_M)
    return gl.where(tile.first_key + ROWS > tile.seqlen_k, tile.hi, blocks.full_lo), blocks.full_hi


@gluon.jit
def seen_of(x, window, tile, first_row):
    return rows_seen(x, window, afresh(tile.first_key), first_row, tile.shift, tile.seqlen_q, tile.seqlen_k)
