"""dq, and each row's part of the gradient of its ALiBi slope: one program for each block of rows."""

import triton
import triton.language as tl

from . import scores
from .kernel import Scalar, kernel
from .keys import key_tile, load_k, load_v
from .masking import block_list, first_visit, key_blocks, key_bounds, nth_visit, num_visits
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import add, add_product, scaled, zero_sum, zeros
from .prologue import batch_index, prologue
from .rows import elements, head_pointer, store_rows
from .score_gradient import load_row_tile, score_gradient
from .sequences import query_tile


@kernel
def dq_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, dq: QueryTensor, row_stats: RowTensor,
    dslopes: RowTensor, params: Params, scale: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dq` and, unless it is `None`, `dslopes [B, H, Sq]`."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    D: tl.constexpr = CONFIG.HEAD_DIM
    lengths = params.lengths
    work = query_tile(lengths, tl.program_id(0), lengths.num_heads_q, 1, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B))
    if work.start < work.seqlen:
        position = work.start + tl.arange(0, BLOCK_M)  # [M]
        exists = position < work.seqlen
        head, head_k = work.head, work.head // (lengths.num_heads_q // lengths.num_heads_k)
        b = batch_index(params, work)
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head, head_k, CONFIG)
        token = (work.offset + position)[:, None]
        dq_head = head_pointer(dq, b, head, CONFIG.ALIGN)
        row_tile = load_row_tile(q, dout, row_stats, b, head, work.offset, position, exists, CONFIG)

        last = tl.minimum(work.start + BLOCK_M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        listed = block_list(params, b, head, work.start // BLOCK_M)
        bounds = key_bounds(params, row_tile.position, info.shift, kv.seqlen)
        dq_i = zeros(BLOCK_M, D, CONFIG.COMPENSATED)
        dslope_i = zero_sum(tl.zeros([BLOCK_M], tl.float32), CONFIG.COMPENSATED)
        SLOPES: tl.constexpr = dslopes.data is not None
        dq_i, dslope_i = inner_loop(
            dq_i, dslope_i, blocks, listed, row_tile, kv, params, info, bounds, SLOPES, True, CONFIG
        )
        dq_i, dslope_i = inner_loop(
            dq_i, dslope_i, blocks, listed, row_tile, kv, params, info, bounds, SLOPES, False, CONFIG
        )

        store_rows(dq_head + token * elements(dq.stride_m, CONFIG.ALIGN), scaled(dq_i, scale, D), exists, D)
        if SLOPES:
            dslopes_head = head_pointer(dslopes, b, head, 1) + work.offset
            tl.store(dslopes_head + position, dslope_i.total, mask=exists)


@triton.jit
def inner_loop(
    dq_i, dslope_i, blocks, listed, row_tile, kv, params, info, bounds, SLOPES: tl.constexpr, MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the blocks that need masks, or of those that do not."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    first = first_visit(listed, params, MASKED)
    for n in range(num_visits(blocks, listed, params, MASKED, BLOCK_N)):
        start_n = nth_visit(blocks, first, n, params, MASKED, BLOCK_N)
        tile = key_tile(kv, start_n, CONFIG)
        exists = tile.exists if MASKED or CONFIG.PAGE_SIZE > 0 else None
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(kv, tile, exists, CONFIG)  # [N, D]
        v_j = load_v(kv, tile, exists, CONFIG)  # [N, Dv]
        found = score_gradient(row_tile, k_j, v_j, keys, start_n, exists, params, info, bounds, MASKED, CONFIG)
        if SLOPES:
            dslope = tl.sum(found.ds * scores.distance(info, row_tile.position, keys), 1)
            dslope_i = add(dslope_i, -dslope, CONFIG.COMPENSATED)
        dq_i = add_product(dq_i, None, scores.backward(found.ds, found.score, params), k_j, D, CONFIG)
    return dq_i, dslope_i
