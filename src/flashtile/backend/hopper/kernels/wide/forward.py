"""Forward kernel of heads above 256 features: a tile of 64 rows, whose sums of 512 columns are as many registers as two
warpgroups have.

The first warpgroup is that of `kernels.forward`: it computes scores and p, and the sums of the first half of the
columns. The second one takes p from it (`handoff`) and adds up the other half. The memory of a core holds one block of
keys and one of values. So their chunks are loaded and released one by one: a chunk of the next block is on its way as
soon as this one's product is done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..forward.forward import ForwardScheduler, finalize, result_coord
from ..forward.key_order import block_of_step
from ..forward.mainloop import (
    ForwardContext,
    ForwardOutputs,
    SoftmaxState,
    block_keys,
    load_tile,
    masked_scores,
    mma_operand,
    next_tile_state,
    pair_block,
    release_q_early,
    tile_units,
    warpgroup_tile,
    zero_scores,
)
from ..forward.page_producers import keys_warp, values_warp
from ..forward.producer import ForwardPipelines, producer_warp
from ..shared import softmax
from ..shared.block_lists import block_at, first_entry, load_bits, load_entry, partial_of
from ..shared.compat import Pointer, Scalar, kernel
from ..shared.dropout import Dropout, kept_pairs, load_stream, where_kept
from ..shared.epilogue import tma_store_columns
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait, gemm_wait_pair, scale_rows, zero_accumulators
from ..shared.partitions import run_partitions
from ..shared.pipeline import (
    FIRST_BARRIER,
    LAST_BARRIER,
    NamedBarriers,
    allocate_boxes,
    chunk_empty,
    chunk_wait,
    consumer_release,
    make_buffers,
    make_mbarriers,
    make_pipeline,
    stage_chunks,
)
from ..shared.ptx import opaque
from ..shared.score_mod import Loaded
from ..shared.scores import ScoreParams
from ..shared.tile_scheduler import SeqlenInfo, make_tile_queue, pop_tile, scheduler_warp
from .handoff import make_handoff, receive_block, receive_end, send_block, send_end

COLUMN_WARPGROUPS = gl.constexpr(2)


@kernel
def wide_forward_kernel(
    q_desc: Pointer, k_desc: Pointer, v_desc: Pointer, out_desc: Pointer, bias_desc: Pointer, lse: Pointer,
    residual: Pointer, stride_lse: Scalar, scheduler: ForwardScheduler, seqlens: SeqlenInfo, bounds: MaskBounds,
    params: ScoreParams, dropout: Dropout, CONFIG: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `forward_kernel`, but for tiles of a bias, which there are none of."""
    PACKED: gl.constexpr = seqlens.cu_seqlens_q is not None
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    PARTS: gl.constexpr = CONFIG.page_parts
    THREADS: gl.constexpr = 128 + 32  # one warpgroup and the producer
    gl.static_assert(FIRST_BARRIER + HEAD_DIM.loads + HEAD_DIM_V.loads - 1 <= LAST_BARRIER)
    gl.static_assert(CONFIG.column_warpgroups == COLUMN_WARPGROUPS)
    q = make_buffers(q_desc, 1, HEAD_DIM)
    k = make_pipeline(k_desc, 1, NamedBarriers(FIRST_BARRIER, THREADS), HEAD_DIM, PARTS)
    v = make_pipeline(v_desc, 1, NamedBarriers(FIRST_BARRIER + HEAD_DIM.loads, THREADS), HEAD_DIM_V, PARTS)
    pipelines = ForwardPipelines(q, make_mbarriers(1, 1), k, v, ())
    handoff = make_handoff(q_desc.dtype, CONFIG.block_n)
    queue = make_tile_queue(COLUMN_WARPGROUPS + CONFIG.num_producers)
    smem = allocate_boxes(out_desc, COLUMN_WARPGROUPS, CONFIG.epilogue_columns)
    fence_async_shared()

    pages, lists = seqlens.page_table, scheduler.lists
    outputs = ForwardOutputs(
        out_desc, smem, lse, residual, stride_lse, None if scheduler.num_splits is None else scheduler.num_heads
    )
    context = ForwardContext(pipelines, outputs, queue, bounds, scheduler.diagonal, params, dropout, lists, pages)
    if CONFIG.page_rows > 0:
        run_partitions(
            CONFIG,
            [
                (scores_warpgroup, (context, handoff, CONFIG, PACKED)),
                (columns_warpgroup, (context, handoff, CONFIG, PACKED)),
            ],
            [
                (keys_warp, (q_desc, k_desc, pipelines, queue, pages, CONFIG, PACKED)),
                (values_warp, (v_desc, pipelines, queue, pages, CONFIG)),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )
    else:
        run_partitions(
            CONFIG,
            [
                (scores_warpgroup, (context, handoff, CONFIG, PACKED)),
                (columns_warpgroup, (context, handoff, CONFIG, PACKED)),
            ],
            [
                (
                    producer_warp,
                    (q_desc, k_desc, v_desc, bias_desc, pipelines, queue, params, lists, CONFIG, PACKED),
                ),
                (scheduler_warp, (queue, scheduler, seqlens, bounds, CONFIG, PACKED)),
            ],
        )


@gluon.jit
def scores_warpgroup(context, handoff, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes scores and p of each tile, and the first half of its columns."""
    HALF: gl.constexpr = CONFIG.head_dim_v.half
    pipelines, outputs, queue, params = context.pipelines, context.outputs, context.queue, context.params
    lists, stream = context.lists, load_stream(context.dropout)
    count = 0  # steps of the main loop
    tile_count = 0
    tile = pop_tile(queue, 0)
    wg_tile = warpgroup_tile(tile, 0, context, CONFIG)
    acc = zero_accumulators(HALF)
    p = mma_operand(zero_scores(CONFIG.block_n), acc, pipelines.q.data[0].dtype)
    state = next_tile_state(acc, p, wg_tile, params, outputs, CONFIG)
    accumulate = count == 0
    # Coordinates and 1 / l of the tile whose last product with values is still to come.
    out_coord = result_coord(tile, wg_tile.first_row, outputs, PACKED)
    inv_l = gl.zeros([MMA_M], gl.float32, gl.SliceLayout(1, state.acc[0].type.layout))
    while tile.b >= 0:
        mbarrier.wait(pipelines.q.full.index(0), tile_count & 1)
        loaded = load_tile(params, wg_tile, CONFIG)
        units = tile_units(params, wg_tile, loaded, CONFIG)
        state = next_tile_state(state.acc, state.p, wg_tile, params, outputs, CONFIG)
        first = tile.hi - 1
        n, stop = first, first
        entry = first_entry(lists, tile)
        # As in `forward.consumer_warpgroup`, the first step completes the previous tile.
        while n >= tile.lo:
            while n >= stop:
                next_entry = load_entry(lists, tile.token_k, n - 1)
                state = scores_step(
                    state, accumulate, context, handoff, stream, loaded, units, count, tile_count, wg_tile, n, entry,
                    CONFIG,
                )  # fmt: skip
                accumulate = n != first
                n -= 1
                if lists.data is not None:
                    entry = next_entry
                count += 1
            if (stop == first) & (tile_count > 0):
                store_half(outputs, state.acc, inv_l, out_coord, 0, HALF)
            stop = tile.lo
        out_coord = result_coord(tile, wg_tile.first_row, outputs, PACKED)
        inv_l = finalize(outputs, params, state, wg_tile, CONFIG)
        if context.dropout.seed is not None:
            inv_l = inv_l * context.dropout.keep_scale
        send_end(handoff, zero_scores(CONFIG.block_n), inv_l, count + tile_count)
        tile_count += 1
        tile = pop_tile(queue, tile_count)
        wg_tile = warpgroup_tile(tile, 0, context, CONFIG)
    acc = gemm_wait(values_products(pipelines.v, state.acc, state.p, count, accumulate, 0, HALF))
    store_half(outputs, acc, inv_l, out_coord, 0, HALF)
    tma.store_wait(0)


@gluon.jit
def scores_step(
    state, accumulate, context, handoff, stream, loaded, units, count, tile_count, wg_tile, n, entry,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Step number `count`, as `forward.mainloop.mainloop_step`: scores and p of one block of keys, and the product of
    the previous block's p and values.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HALF: gl.constexpr = CONFIG.head_dim_v.half
    PV_GEMMS: gl.constexpr = len(HALF.chunks)
    LOADS: gl.constexpr = HEAD_DIM.loads
    pipelines, tile = context.pipelines, wg_tile.tile
    k, v = pipelines.k, pipelines.v
    block = block_at(context.lists, block_of_step(n, wg_tile.first_block, tile, CONFIG), entry)
    q = stage_chunks(pipelines.q, opaque(0), 1, HEAD_DIM)
    s = zero_scores(CONFIG.block_n)
    for c in gl.static_range(LOADS):
        s = gemm_nt((q[c],), (chunk_wait(k, c, count),), s, c > 0)
        if c > 0:
            s = warpgroup_mma_wait(1, deps=(s,))  # the product before has read its chunk
            consumer_release(chunk_empty(k, c - 1), 0, 1)
    acc = values_products(v, state.acc, state.p, count, accumulate, 0, HALF)
    of_keys, partial = block_keys(context, tile, block, CONFIG), partial_of(context.lists, entry)
    bits = load_bits(context.lists, entry, tile.token_k, n, 0, zero_scores(CONFIG.block_n), CONFIG.block_m)
    kept = kept_pairs(
        context.dropout, stream, tile.b, tile.head, wg_tile.first_row, block * CONFIG.block_n,
        zero_scores(CONFIG.block_n), False,
    )  # fmt: skip
    s = warpgroup_mma_wait(PV_GEMMS, deps=(s,))
    consumer_release(chunk_empty(k, LOADS - 1), 0, 1)
    release_q_early(pipelines.q_empty, tile_count, 0, n == tile.lo, CONFIG)
    pairs = pair_block(context.params, wg_tile, block, (), CONFIG)
    loaded = Loaded(loaded.head, loaded.rows, of_keys, partial, pairs)
    t = masked_scores(s, wg_tile, block, entry, bits, context, loaded, units, CONFIG)
    row_max, alpha, changed, p = softmax.update(
        state.row_max, t, units.scale_log2, CONFIG.speculative_exps, CONFIG.natural
    )
    l = state.l * alpha + softmax.thread_row_sum(p)  # noqa: E741
    p = where_kept(kept, p, False).to(v.data[0].dtype)
    send_block(handoff, p, alpha, changed, count + tile_count)
    acc, p, l = gemm_wait_pair(acc, p, l)  # noqa: E741
    for c in gl.static_range(PV_GEMMS):
        consumer_release(chunk_empty(v, c), 0, 1)
    p = mma_operand(p, acc, v.data[0].dtype)
    changed = gl.where(n == tile.hi - 1, 0, changed)  # in a first step, acc is the previous tile's
    return SoftmaxState(softmax.rescale(acc, alpha, changed), p, row_max, l)


@gluon.jit
def columns_warpgroup(context, handoff, CONFIG: gl.constexpr, PACKED: gl.constexpr):
    """The partition that computes the second half of the columns of each tile."""
    HALF: gl.constexpr = CONFIG.head_dim_v.half
    FIRST: gl.constexpr = len(HALF.chunks)
    v, outputs, queue = context.pipelines.v, context.outputs, context.queue
    item = 0
    tile_count = 0
    acc = zero_accumulators(HALF)
    for c in gl.static_range(FIRST):  # the load that is none
        chunk_wait(v, FIRST + c, 0)
        consumer_release(chunk_empty(v, FIRST + c), 0, 1)
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        for n in range(tile.lo, tile.hi):
            p, alpha, changed = receive_block(handoff, acc, item)
            # Before a tile's first block, acc is the previous tile's, and the product starts anew.
            acc = softmax.rescale(acc, alpha, changed)
            acc = gemm_wait(values_products(v, acc, p, item - tile_count + 1, n > tile.lo, FIRST, HALF))
            for c in gl.static_range(FIRST):
                consumer_release(chunk_empty(v, FIRST + c), 0, 1)
            item += 1
        factors = receive_end(handoff, acc, item)
        item += 1
        out_coord = result_coord(tile, tile.first_row, outputs, PACKED)
        inv_l = gl.convert_layout(gl.max(factors, 1), gl.SliceLayout(1, acc[0].type.layout))
        store_half(outputs, acc, inv_l, out_coord, 1, HALF)
        tile_count += 1
        tile = pop_tile(queue, tile_count)
    tma.store_wait(0)


@gluon.jit
def values_products(v, acc, p, count, accumulate, FIRST: gl.constexpr, HALF: gl.constexpr):
    """Issue the products of p with the chunks of load number `count` from FIRST on, as soon as each is there."""
    products = ()
    for c in gl.static_range(len(HALF.chunks)):
        products = products + gemm_rs((acc[c],), p, (chunk_wait(v, FIRST + c, count),), accumulate)
    return products


@gluon.jit
def store_half(outputs, acc, inv_l, out_coord, half: gl.constexpr, HALF: gl.constexpr):
    """Store half of the columns of 64 finished rows."""
    smem = outputs.smem.index(opaque(half))
    FIRST: gl.constexpr = half * HALF.width
    for c in gl.static_range(len(acc)):
        tma_store_columns(outputs.out, scale_rows(acc[c], inv_l), out_coord, smem, FIRST + HALF.offsets[c])
