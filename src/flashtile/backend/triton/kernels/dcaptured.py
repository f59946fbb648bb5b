"""The gradient of a tensor that a score_mod captures, for one load of its formula: one program for each block of rows.
The terms of an element are added exactly (`exact_sum`), so that no order of programs changes a bit.

Terms of the same element are added before: over the keys of a row, over the rows of a tile, or over both, where the
position depends on no more, and over a tile in which all positions happen to be equal, as far from the diagonal of a
clamped distance.
"""

import triton
import triton.language as tl

from . import exact_sum
from .kernel import Pointer, kernel
from .keys import key_tile, load_k, load_v
from .masking import key_blocks, key_bounds, nth_block, num_blocks
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import add, zero_sum
from .prologue import batch_index, prologue
from .score_gradient import load_row_tile, score_gradient
from .scores import modify
from .sequences import query_tile


@kernel
def dcaptured_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, row_stats: RowTensor, sums: Pointer, params: Params,
    BY_ROW: tl.constexpr, BY_KEY: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Add to `sums [elements, WORDS]`. The score_mod returns the score, its derivative by the element, and the
    element's position, which is the same for all rows unless BY_ROW, and for all keys unless BY_KEY.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    lengths = params.lengths
    work = query_tile(lengths, tl.program_id(0), lengths.num_heads_q, 1, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B))
    if work.start < work.seqlen:
        row = work.start + tl.arange(0, BLOCK_M)  # [M]
        exists = row < work.seqlen
        head, head_k = work.head, work.head // (lengths.num_heads_q // lengths.num_heads_k)
        b = batch_index(params, work)
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head, head_k, CONFIG)
        row_tile = load_row_tile(q, dout, row_stats, b, head, work.offset, row, exists, CONFIG)
        last = tl.minimum(work.start + BLOCK_M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        bounds = key_bounds(params, row_tile.position, info.shift, kv.seqlen)
        total = zero_sum(tl.zeros([BLOCK_M], tl.float32), True)
        total = inner_loop(
            total, blocks, row_tile, exists, kv, params, info, bounds, sums, BY_ROW, BY_KEY, True, CONFIG
        )
        total = inner_loop(
            total, blocks, row_tile, exists, kv, params, info, bounds, sums, BY_ROW, BY_KEY, False, CONFIG
        )
        if not BY_KEY:
            score = tl.zeros([BLOCK_M, 1], tl.float32)  # on which no position depends
            position = modify(score, params, info, row_tile.position, tl.zeros([1, 1], tl.int32))[2]
            if BY_ROW:
                exact_sum.add(sums, position, total.total[:, None], exists[:, None] & (position >= 0))
            else:
                exact_sum.add(sums, position, tl.sum(total.total, 0), position >= 0)


@triton.jit
def inner_loop(
    total, blocks, row_tile, exists, kv, params, info, bounds, sums, BY_ROW: tl.constexpr, BY_KEY: tl.constexpr,
    MASKED: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the terms of the blocks of keys that need masks, or of those that do not: to `total [M]`, or to `sums`."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    for n in range(num_blocks(blocks, MASKED, BLOCK_N)):
        start_n = nth_block(blocks, n, MASKED, BLOCK_N)
        tile = key_tile(kv, start_n, CONFIG)
        keys_exist = tile.exists if MASKED or CONFIG.PAGE_SIZE > 0 else None
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(kv, tile, keys_exist, CONFIG)  # [N, D]
        v_j = load_v(kv, tile, keys_exist, CONFIG)  # [N, Dv]
        found = score_gradient(row_tile, k_j, v_j, keys, start_n, keys_exist, params, info, bounds, MASKED, CONFIG)
        term = tl.where(exists[:, None], found.ds, 0.0)  # [M, N]
        if not BY_KEY:
            total = add(total, tl.sum(term, 1), True)
        elif not BY_ROW:
            position = found.score.modified[2]  # [1, N]
            exact_sum.add(sums, position, tl.sum(term, 0)[None, :], position >= 0)
        else:
            position = tl.broadcast_to(found.score.modified[2], term.shape)
            first, last = tl.min(tl.min(position, 1), 0), tl.max(tl.max(position, 1), 0)
            if first == last:
                exact_sum.add(sums, first, tl.sum(tl.sum(term, 1), 0), first >= 0)
            else:
                exact_sum.add(sums, position, term, (position >= 0) & (term != 0))
    return total
