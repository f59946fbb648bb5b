"""FlashAttention-2's forward pass over latent rows of 8 bits, of which the first 512 features are the values.

A block of rows is loaded into registers while the block before is multiplied, becomes numbers of 16 bits once, and
those are both operands: keys and values. Triton would convert once for each product, and pipeline no such loads. The
query heads of a group are rows of one tile, and `SPLITS` programs share its keys, as in `forward.py`.
"""

import triton
import triton.language as tl

from . import combine, scores, softmax
from .eight_bit import descales_of_head, scaled_by_key, scaled_rows, scales_of_tile
from .forward import Partials, split_of
from .kernel import Pointer, kernel
from .keys import key_pointers, load_pages, tile_in_pages
from .latent_words import (
    LATENT,
    ROPE,
    Quarters,
    halves,
    in_quarters,
    load_words,
    quarters,
    spread,
    together,
)
from .masking import key_blocks, key_bounds, mask_edges
from .parameters import KeyTensor, Params, QueryTensor, RowTensor, ScaleTensor
from .products import Sum
from .prologue import batch_index, prologue
from .rng import keep_mask
from .rows import elements, head_pointer
from .sequences import query_tile
from .softmax import INFINITY, RowState


@kernel
def latent_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, lse: RowTensor, residual: Pointer, partials: Partials,
    params: Params, k_descale: ScaleTensor, v_descale: ScaleTensor, CONFIG: tl.constexpr,
):  # fmt: skip
    """`out [B, H, Sq, 512]`, `lse [B, H, Sq]` and its residual of natural scores, or packed."""
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
    ALIGN: tl.constexpr = CONFIG.ALIGN
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    SPLITS: tl.constexpr = CONFIG.SPLITS
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    NATURAL: tl.constexpr = CONFIG.NATURAL
    lengths = params.lengths
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    work = query_tile(
        lengths, program, lengths.num_heads_k, PACK_GQA, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B), SHORT=True
    )
    if work.start < work.seqlen * PACK_GQA:
        row = work.start + tl.arange(0, BLOCK_M)
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [M]
        exists = position < work.seqlen
        b = batch_index(params, work)
        token = work.offset + position
        q_rows = head_pointer(q, b, head, ALIGN) + token * elements(q.stride_m, ALIGN)
        q_rows = q_rows[:, None]
        q_latent = tl.load(q_rows + tl.arange(0, LATENT)[None, :], mask=exists[:, None], other=0.0)
        q_rope = tl.load(q_rows + LATENT + tl.arange(0, ROPE)[None, :], mask=exists[:, None], other=0.0)
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head[:, None], work.head, CONFIG)

        descales = descales_of_head(k_descale, v_descale, 1.0, lengths, b, work.head, kv.seqlen, CONFIG)
        last = tl.minimum((work.start + BLOCK_M - 1) // PACK_GQA, work.seqlen - 1)
        blocks = key_blocks(params, work.start // PACK_GQA, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, CONFIG.BLOCK_N)
        bounds = key_bounds(params, position[:, None], info.shift, kv.seqlen)
        with_sink = (split == 0) & (work.sequence < lengths.batch)
        zero = tl.zeros([BLOCK_M, LATENT // 4], tl.float32)
        acc = Quarters(zero, zero, zero, zero)
        state = softmax.init(params.scores.sinks, head, with_sink, info.factor, acc, BLOCK_M, False, NATURAL)
        state = inner_loop(
            state, blocks, in_quarters(q_latent), q_rope, position[:, None], kv, descales, params, info, bounds, CONFIG
        )

        weight, row_lse, row_residual = softmax.finalize(state, info.factor, False, NATURAL)
        if params.dropout.threshold is not None:
            weight *= params.dropout.keep_scale
        weight = scaled_rows(weight, state.l.total, descales.v, V_SCALES)
        lse_row = b * elements(lse.stride_b, 1) + head * elements(lse.stride_h, 1) + token  # [M]
        out_i = together(state.acc) * weight[:, None]
        d = tl.arange(0, LATENT)[None, :]
        if SPLITS == 1:
            out_rows = head_pointer(out, b, head, ALIGN) + token * elements(out.stride_m, ALIGN)
            tl.store(out_rows[:, None] + d, out_i.to(out.data.dtype.element_ty), mask=exists[:, None])
            tl.store(lse.data + lse_row, row_lse, mask=exists)
            if NATURAL:
                tl.store(residual + lse_row, row_residual, mask=exists)
        else:
            partial_row = split * elements(partials.stride_split, 1) + lse_row
            tl.store(partials.partial_out + partial_row[:, None] * LATENT + d, out_i, mask=exists[:, None])
            tl.store(partials.partial_lse + partial_row, row_lse, mask=exists)
            if NATURAL:
                tl.store(partials.partial_residual + partial_row, row_residual, mask=exists)
            if combine.is_last_split(partials.semaphores + program, SPLITS):
                combine.combine_splits(partials, out, lse, residual, b, work, CONFIG)


@triton.jit
def load_block(kv, tile, blocks, CONFIG: tl.constexpr):
    """Load the rows of a block; 0 behind the last block."""
    exists = tile.exists & (tile.start + tl.arange(0, CONFIG.BLOCK_N) < blocks.hi)
    return load_words(key_pointers(kv.k, kv.page_stride_k, tile, CONFIG), exists, CONFIG)


@triton.jit
def inner_loop(
    state, blocks, q_i, q_rope, rows, kv, descales, params, info, bounds, CONFIG: tl.constexpr
):  # fmt: skip
    """Update the rows' state with all blocks. Rows of a block are loaded a block ahead, and its page two blocks."""
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    FORMAT: tl.constexpr = CONFIG.KEY_FORMAT
    PTX: tl.constexpr = CONFIG.PTX
    dtype: tl.constexpr = q_rope.dtype
    pages, next_pages = 0, 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, blocks.lo, CONFIG)
        next_pages = load_pages(kv, blocks.lo + BLOCK_N, CONFIG)
    words = load_block(kv, tile_in_pages(kv, blocks.lo, pages, CONFIG), blocks, CONFIG)
    for start_n in range(blocks.lo, blocks.hi, BLOCK_N):
        tile = tile_in_pages(kv, start_n, pages, CONFIG)
        pages = next_pages
        if CONFIG.PAGE_SIZE > 0:
            next_pages = load_pages(kv, start_n + 2 * BLOCK_N, CONFIG)
        own = words
        words = load_block(kv, tile_in_pages(kv, start_n + BLOCK_N, pages, CONFIG), blocks, CONFIG)
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        keys_exist = tile.exists[None, :]
        k_scale = scales_of_tile(descales.k, kv, tile, start_n, K_SCALES, CONFIG)
        if FORMAT == "packed" or FORMAT == "packed by bits":
            k_j = quarters(own.latent, spread(own.scales, BLOCK_N), dtype, FORMAT, True, PTX)
            even, odd = halves(own.rope, dtype)
            q_even, q_odd = tl.split(q_rope.reshape([q_rope.shape[0], ROPE // 2, 2]))
            qk = tl.dot(q_even, even.T)
            qk = tl.dot(q_odd, odd.T, qk)
        else:
            k_j = quarters(own.latent, 0.0, dtype, FORMAT, False, PTX)
            of_rope = quarters(own.rope, 0.0, dtype, FORMAT, False, PTX)
            q_4 = in_quarters(q_rope)
            qk = tl.dot(q_4.a, of_rope.a.T)
            qk = tl.dot(q_4.b, of_rope.b.T, qk)
            qk = tl.dot(q_4.c, of_rope.c.T, qk)
            qk = tl.dot(q_4.d, of_rope.d.T, qk)
        qk = tl.dot(q_i.a, k_j.a.T, qk)
        qk = tl.dot(q_i.b, k_j.b.T, qk)
        qk = tl.dot(q_i.c, k_j.c.T, qk)
        qk = tl.dot(q_i.d, k_j.d.T, qk)
        qk = scaled_by_key(qk, k_scale, K_SCALES, 0)
        s = scores.forward(qk, params, info, rows, keys, keys_exist, False)  # [M, N]
        t = mask_edges(
            s.t, -INFINITY, bounds, blocks, start_n, params, info, rows, keys, keys_exist, CONFIG.PAGE_SIZE == 0
        )
        m, alpha, p = softmax.update(state, t, info.factor, False, CONFIG.NATURAL)
        l = softmax.add_row_sums(state, alpha, p, False)  # noqa: E741
        if params.dropout.threshold is not None:
            p = tl.where(keep_mask(params.dropout, info.stream, rows, start_n, BLOCK_N), p, 0.0)
        if CONFIG.V_SCALES == "key":
            p = scaled_by_key(p, k_scale, "key", 0)  # values have the scales of keys
        p, alpha = p.to(dtype), alpha[:, None]
        acc = Quarters(
            tl.dot(p, k_j.a, state.acc.a * alpha),
            tl.dot(p, k_j.b, state.acc.b * alpha),
            tl.dot(p, k_j.c, state.acc.c * alpha),
            tl.dot(p, k_j.d, state.acc.d * alpha),
        )
        state = RowState(m, Sum(l.total, l.compensation), acc)
    return state
