"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2) without atomics, in three kernels.

`preprocess_kernel` computes two numbers a row. `dkdv_kernel` owns a block of keys and walks over the rows that see it;
`dq_kernel` owns a block of rows and walks over its keys. Each recomputes the probabilities of a tile: seven products
instead of five, but every result has one writer, and the same call gives the same bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .kernel import Scalar, kernel
from .keys import key_tile, key_value_head, load_k, load_v
from .masking import block_list, first_visit, nth_visit, num_visits, row_blocks, row_bounds
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import add_product, scaled, zeros
from .prologue import batch_index, head_info
from .rng import block_origin
from .rows import Chunks, HeadRows, elements, head_pointer, load_row_stats, load_rows, row_pointers, store_rows
from .score_gradient import KeyValueTile, transposed_gradient
from .sequences import key_seqlen, query_seqlen, work_tile


class QueryHead(NamedTuple):
    """The rows of one sequence and query head."""

    q: HeadRows
    dout: HeadRows
    row_stats: tl.tensor  # pointer to position 0
    seqlen: tl.tensor


@kernel
def dkdv_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, dk: KeyTensor, dv: KeyTensor, row_stats: RowTensor,
    params: Params, scale: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dk` and `dv`. Tiles are transposed, `[N, M]`: probabilities are the left operand of both sums."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    lengths = params.lengths
    work = work_tile(
        tl.program_id(0), lengths.num_tiles, lengths.num_heads_k, lengths.cu_seqlens_k, None, lengths.batch,
        lengths.total_k, block_origin(params.dropout), 1, BLOCK_N, tl.arange(0, CONFIG.BLOCK_B),
    )  # fmt: skip
    if work.start < work.seqlen:
        b = batch_index(params, work)
        offset_q, seqlen_q = query_seqlen(lengths, work.sequence)
        seqlen_k = key_seqlen(lengths, work.sequence)
        kv = key_value_head(k, v, lengths, b, work.head, seqlen_k, CONFIG)
        tile = key_tile(kv, work.start, CONFIG)
        k_j = load_k(kv, tile, tile.exists, CONFIG)  # [N, D]
        v_j = load_v(kv, tile, tile.exists, CONFIG)  # [N, Dv]

        shift = seqlen_k.seqlen - seqlen_q + params.window.diagonal
        last = tl.minimum(work.start + BLOCK_N, kv.seqlen.end) - 1
        num_rows = tl.where(last >= work.start, seqlen_q, 0)  # no row sees a block without keys
        blocks = row_blocks(params.window, work.start, last, shift, num_rows, CONFIG.BLOCK_M)
        keys, exists = work.start + tl.arange(0, BLOCK_N)[:, None], tile.exists[:, None]  # [N, 1]
        bounds = row_bounds(params.window, keys, shift, exists, seqlen_q)
        key_block = KeyValueTile(keys, k_j, v_j, exists, bounds)
        stride_q, stride_dout = elements(q.stride_m, ALIGN), elements(dout.stride_m, ALIGN)

        dk_j, dv_j = zeros(BLOCK_N, D, CONFIG.COMPENSATED), zeros(BLOCK_N, DV, CONFIG.COMPENSATED)
        group = lengths.num_heads_q // lengths.num_heads_k
        for g in tl.range(0, group):
            head = work.head * group + g
            info = head_info(params, b, head, shift)
            listed = block_list(params, b, head, work.start // BLOCK_N)
            q_rows = HeadRows(head_pointer(q, b, head, ALIGN) + offset_q * stride_q, stride_q)
            dout_rows = HeadRows(head_pointer(dout, b, head, ALIGN) + offset_q * stride_dout, stride_dout)
            rows = QueryHead(
                q_rows,
                dout_rows,
                head_pointer(row_stats, b, head, 2) + (2 * offset_q if CONFIG.NATURAL else offset_q),
                seqlen_q,
            )
            if not CONFIG.EVEN:
                dk_j, dv_j = inner_loop(dk_j, dv_j, blocks, listed, key_block, rows, params, info, True, CONFIG)
            dk_j, dv_j = inner_loop(dk_j, dv_j, blocks, listed, key_block, rows, params, info, False, CONFIG)

        # Positions of this sequence without a key get 0.
        position = work.start + tl.arange(0, BLOCK_N)
        stored = (position >= 0) & (position < work.seqlen)
        dv_scale = 1.0 if params.dropout.threshold is None else params.dropout.keep_scale
        dk_j, dv_j = scaled(dk_j, scale, D), scaled(dv_j, dv_scale, DV)
        token = (work.offset + position)[:, None]
        dk_head, dv_head = head_pointer(dk, b, work.head, ALIGN), head_pointer(dv, b, work.head, ALIGN)
        store_rows(dk_head + token * elements(dk.stride_n, ALIGN), where(exists, dk_j, D), stored, D)
        store_rows(dv_head + token * elements(dv.stride_n, ALIGN), where(exists, dv_j, DV), stored, DV)


@triton.jit
def inner_loop(dk_j, dv_j, blocks, listed, tile, rows, params, info, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Add the gradients of the blocks of rows that need masks, or of those that do not."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    first = first_visit(listed, params, MASKED)
    for n in range(num_visits(blocks, listed, params, MASKED, BLOCK_M)):
        start_m = nth_visit(blocks, first, n, params, MASKED, BLOCK_M)
        row = start_m + tl.arange(0, BLOCK_M)
        exists = row < rows.seqlen if MASKED else None
        q_i = load_rows(row_pointers(rows.q, start_m, BLOCK_M), exists, D)  # [M, D]
        lse_i, delta_i, residual_i = load_row_stats(rows.row_stats, row, exists, CONFIG.NATURAL)  # [M]
        dout_i = load_rows(row_pointers(rows.dout, start_m, BLOCK_M), exists, DV)  # [M, Dv]
        found = transposed_gradient(tile, q_i, dout_i, lse_i, delta_i, residual_i, row, params, info, MASKED, CONFIG)
        dv_j = add_product(dv_j, None, found.p, dout_i, DV, CONFIG)
        ds = scores.backward(found.ds, found.score, params)
        dk_j = add_product(dk_j, None, ds, q_i, D, CONFIG)
    return dk_j, dv_j


@triton.jit
def where(condition, x, D: tl.constexpr):
    """`x [N, D]` where `condition [N, 1]` holds, else 0."""
    if D.CHUNK_1 == 0:
        return Chunks(tl.where(condition, x.a, 0.0), x.b)
    else:
        return Chunks(tl.where(condition, x.a, 0.0), tl.where(condition, x.b, 0.0))
