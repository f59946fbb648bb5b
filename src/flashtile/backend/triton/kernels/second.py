"""The gradient of attention's tangents, which is its second derivative: two kernels, as `dq` and `dkdv`.

With directions tq, tk, tv and cotangents dout, dlse, the product of tangents and cotangents is
`L = sum p ((dp - delta) t + u)`: t is the tangent of a score, `dp = <dout, v>`, `u = <dout, tv>`,
`delta = <dout, out> - dlse`. Of a row, the tangents of lse and out are `T = sum p t` and tout, and `E = <dout, tout>`
(docs/design/exactness.md). Then

    r  = p ((dp - delta) (t - T) + u - E)        the gradient by the score
    ds = p (dp - delta)                          the gradient by its tangent
    dq = scale * sum (r k + ds tk),   dk = scale * sum (r q + ds tq),   dv = sum p (t - T) dout

A softcap c, whose tanh is h and slope g = 1 - h^2, makes `g r - 2 h / c ds t` of r, and then `g ds` of ds.

Products of directions that are absent are compiled away.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .dkdv import where
from .forward import split_of
from .kernel import Scalar, kernel
from .keys import key_tile, key_value_head, load_k, load_v
from .masking import (
    block_list,
    first_visit,
    key_blocks,
    key_bounds,
    mask_fill,
    nth_visit,
    num_visits,
    row_blocks,
    row_bounds,
    within,
)
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import add_product, inner_products, scaled, zeros
from .prologue import batch_index, head_info, prologue
from .rng import block_origin, keep_mask
from .rows import (
    HeadRows,
    elements,
    head_pointer,
    load_row_stats,
    load_rows,
    probabilities,
    row_pointers,
    store_rows,
)
from .score_gradient import KeyValueTile, load_row_tile
from .score_tangent import FeatureTangents, score_tangent
from .sequences import key_seqlen, query_seqlen, query_tile, work_tile


class Along(NamedTuple):
    """Directions, and what follows from them for each row: the tangent of lse, and `<dout, tout>`, fp32."""

    tq: QueryTensor
    tk: KeyTensor
    tv: KeyTensor
    tlse: RowTensor
    product: RowTensor


@kernel
def second_rows_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, dq: QueryTensor, row_stats: RowTensor,
    along: Along, moving: FeatureTangents, params: Params, scale: Scalar, stride_dq_split: Scalar,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dq`: one program for each block of rows, or `SPLITS` that share its keys and store sums of their own."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    SPLITS: tl.constexpr = CONFIG.SPLITS
    D: tl.constexpr = CONFIG.HEAD_DIM
    lengths = params.lengths
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    work = query_tile(lengths, program, lengths.num_heads_q, 1, BLOCK_M, tl.arange(0, CONFIG.BLOCK_B))
    if work.start < work.seqlen:
        position = work.start + tl.arange(0, BLOCK_M)  # [M]
        exists = position < work.seqlen
        head, head_k = work.head, work.head // (lengths.num_heads_q // lengths.num_heads_k)
        b = batch_index(params, work)
        kv, info = prologue(k, v, params, work.sequence, b, work.seqlen, head, head_k, CONFIG)
        tkv = directions(along, k, v, lengths, b, head_k, kv.seqlen, CONFIG)
        token = work.offset + position
        tile = load_row_tile(q, dout, row_stats, b, head, work.offset, position, exists, CONFIG)
        tq_i = tile.q
        if along.tq.data is not None:
            tq_rows = head_pointer(along.tq, b, head, ALIGN) + token[:, None] * elements(along.tq.stride_m, ALIGN)
            tq_i = load_rows(tq_rows, exists, D)
        tlse_i = tl.load(head_pointer(along.tlse, b, head, 1) + token, mask=exists, other=0.0)[:, None]
        product_i = tl.load(head_pointer(along.product, b, head, 1) + token, mask=exists, other=0.0)[:, None]

        last = tl.minimum(work.start + BLOCK_M, work.seqlen) - 1
        blocks = key_blocks(params, work.start, last, info.shift, kv.seqlen, CONFIG.BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, CONFIG.BLOCK_N)
        listed = block_list(params, b, head, work.start // BLOCK_M)
        bounds = key_bounds(params, tile.position, info.shift, kv.seqlen)
        dq_i = zeros(BLOCK_M, D, CONFIG.COMPENSATED)
        dq_i = loop_over_keys(
            dq_i, blocks, listed, tile, tq_i, tlse_i, product_i, kv, tkv, along, moving, params, info, bounds, True,
            CONFIG,
        )  # fmt: skip
        dq_i = loop_over_keys(
            dq_i, blocks, listed, tile, tq_i, tlse_i, product_i, kv, tkv, along, moving, params, info, bounds, False,
            CONFIG,
        )  # fmt: skip
        dq_rows = head_pointer(dq, b, head, ALIGN) + token[:, None] * elements(dq.stride_m, ALIGN)
        if SPLITS > 1:
            dq_rows += split * elements(stride_dq_split, ALIGN)
        store_rows(dq_rows, scaled(dq_i, scale, D), exists, D)


@triton.jit
def directions(along, k, v, lengths, b, head, seqlen, CONFIG: tl.constexpr):
    """The directions of a head's keys and values; in place of an absent one, what it is a direction of."""
    tk, tv = along.tk if along.tk.data is not None else k, along.tv if along.tv.data is not None else v
    return key_value_head(tk, tv, lengths, b, head, seqlen, CONFIG)


@triton.jit
def loop_over_keys(
    dq_i, blocks, listed, tile, tq_i, tlse_i, product_i, kv, tkv, along, moving, params, info, bounds,
    MASKED: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the blocks that need masks, or of those that do not."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    residual_i = tile.residual[:, None] if CONFIG.NATURAL else 0.0
    first = first_visit(listed, params, MASKED)
    for n in range(num_visits(blocks, listed, params, MASKED, BLOCK_N)):
        start_n = nth_visit(blocks, first, n, params, MASKED, BLOCK_N)
        at = key_tile(kv, start_n, CONFIG)
        exists = at.exists if MASKED else None
        keys_exist = None if exists is None else exists[None, :]
        keys = start_n + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k_j = load_k(kv, at, exists, CONFIG)  # [N, D]
        tk_j = k_j
        s = scores.forward(
            inner_products(tile.q, k_j, D, CONFIG), params, info, tile.position, keys, keys_exist, CONFIG.COMPENSATED
        )
        dproduct = 0.0
        if along.tq.data is not None:
            dproduct = inner_products(tq_i, k_j, D, CONFIG)
        if along.tk.data is not None:
            tk_j = load_k(tkv, at, exists, CONFIG)
            dproduct += inner_products(tile.q, tk_j, D, CONFIG)
        t = score_tangent(dproduct, s, moving, 0.0, params, info, tile.position, keys, keys_exist, CONFIG)
        dp = inner_products(tile.dout, load_v(kv, at, exists, CONFIG), DV, CONFIG)
        u = 0.0
        if along.tv.data is not None:
            u = inner_products(tile.dout, load_v(tkv, at, exists, CONFIG), DV, CONFIG)
        if params.dropout.threshold is not None:
            keep = keep_mask(params.dropout, info.stream, tile.position, start_n, BLOCK_N)
            dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
            u = tl.where(keep, u * params.dropout.keep_scale, 0.0)
        p = probabilities(s.t, info.factor, tile.lse[:, None], residual_i, CONFIG.NATURAL)
        dp -= tile.delta[:, None]
        r, ds = by_product(p * (dp * (t - tlse_i) + u - product_i), p * dp, t, s, params)
        r = mask_fill(r, 0.0, bounds, params, info, tile.position, keys, keys_exist, MASKED, True)
        dq_i = add_product(dq_i, None, r, k_j, D, CONFIG)
        if along.tk.data is not None:
            ds = mask_fill(ds, 0.0, bounds, params, info, tile.position, keys, keys_exist, MASKED, True)
            dq_i = add_product(dq_i, None, ds, tk_j, D, CONFIG)
    return dq_i


@kernel
def second_keys_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, dk: KeyTensor, dv: KeyTensor, row_stats: RowTensor,
    along: Along, moving: FeatureTangents, params: Params, scale: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dk` and `dv`: one program for each block of keys. Tiles are transposed, `[N, M]`."""
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
        tkv = directions(along, k, v, lengths, b, work.head, seqlen_k, CONFIG)
        at = key_tile(kv, work.start, CONFIG)
        k_j, v_j = load_k(kv, at, at.exists, CONFIG), load_v(kv, at, at.exists, CONFIG)  # [N, D], [N, Dv]
        tk_j, tv_j = k_j, v_j
        if along.tk.data is not None:
            tk_j = load_k(tkv, at, at.exists, CONFIG)
        if along.tv.data is not None:
            tv_j = load_v(tkv, at, at.exists, CONFIG)

        shift = seqlen_k.seqlen - seqlen_q + params.window.diagonal
        last = tl.minimum(work.start + BLOCK_N, kv.seqlen.end) - 1
        num_rows = tl.where(last >= work.start, seqlen_q, 0)  # no row sees a block without keys
        blocks = row_blocks(params.window, work.start, last, shift, num_rows, CONFIG.BLOCK_M)
        keys, exists = work.start + tl.arange(0, BLOCK_N)[:, None], at.exists[:, None]  # [N, 1]
        tile = KeyValueTile(keys, k_j, v_j, exists, row_bounds(params.window, keys, shift, exists, seqlen_q))
        dk_j, dv_j = zeros(BLOCK_N, D, CONFIG.COMPENSATED), zeros(BLOCK_N, DV, CONFIG.COMPENSATED)
        group = lengths.num_heads_q // lengths.num_heads_k
        for g in tl.range(0, group):
            head = work.head * group + g
            info = head_info(params, b, head, shift)
            listed = block_list(params, b, head, work.start // BLOCK_N)
            rows = QueryRows(
                rows_of(q, b, head, offset_q, ALIGN),
                rows_of(dout, b, head, offset_q, ALIGN),
                rows_of(along.tq if along.tq.data is not None else q, b, head, offset_q, ALIGN),
                head_pointer(row_stats, b, head, 2) + (2 * offset_q if CONFIG.NATURAL else offset_q),
                head_pointer(along.tlse, b, head, 1) + offset_q,
                head_pointer(along.product, b, head, 1) + offset_q,
                seqlen_q,
            )
            dk_j, dv_j = loop_over_rows(
                dk_j, dv_j, blocks, listed, tile, tk_j, tv_j, rows, along, moving, params, info, True, CONFIG
            )
            dk_j, dv_j = loop_over_rows(
                dk_j, dv_j, blocks, listed, tile, tk_j, tv_j, rows, along, moving, params, info, False, CONFIG
            )

        position = work.start + tl.arange(0, BLOCK_N)
        stored = (position >= 0) & (position < work.seqlen)
        dv_scale = 1.0 if params.dropout.threshold is None else params.dropout.keep_scale
        dk_j, dv_j = scaled(dk_j, scale, D), scaled(dv_j, dv_scale, DV)
        token = (work.offset + position)[:, None]
        dk_head, dv_head = head_pointer(dk, b, work.head, ALIGN), head_pointer(dv, b, work.head, ALIGN)
        store_rows(dk_head + token * elements(dk.stride_n, ALIGN), where(exists, dk_j, D), stored, D)
        store_rows(dv_head + token * elements(dv.stride_n, ALIGN), where(exists, dv_j, DV), stored, DV)


class QueryRows(NamedTuple):
    """The rows of one sequence and query head."""

    q: HeadRows
    dout: HeadRows
    tq: HeadRows
    row_stats: tl.tensor  # pointers to position 0
    tlse: tl.tensor
    product: tl.tensor
    seqlen: tl.tensor


@triton.jit
def rows_of(x, b, head, offset, ALIGN: tl.constexpr):
    stride = elements(x.stride_m, ALIGN)
    return HeadRows(head_pointer(x, b, head, ALIGN) + offset * stride, stride)


@triton.jit
def loop_over_rows(
    dk_j, dv_j, blocks, listed, tile, tk_j, tv_j, rows, along, moving, params, info, MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
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
        tq_i = q_i
        lse_i, delta_i, residual_i = load_row_stats(rows.row_stats, row, exists, CONFIG.NATURAL)  # [M]
        tlse_i, product_i = load_numbers(rows.tlse, row, exists), load_numbers(rows.product, row, exists)
        position = row[None, :]
        s = scores.forward(
            inner_products(tile.k, q_i, D, CONFIG), params, info, position, tile.position, tile.exists,
            CONFIG.COMPENSATED,
        )  # fmt: skip
        dproduct = 0.0
        if along.tq.data is not None:
            tq_i = load_rows(row_pointers(rows.tq, start_m, BLOCK_M), exists, D)
            dproduct = inner_products(tile.k, tq_i, D, CONFIG)
        if along.tk.data is not None:
            dproduct += inner_products(tk_j, q_i, D, CONFIG)
        t = score_tangent(dproduct, s, moving, 0.0, params, info, position, tile.position, tile.exists, CONFIG)
        dout_i = load_rows(row_pointers(rows.dout, start_m, BLOCK_M), exists, DV)  # [M, Dv]
        dp = inner_products(tile.v, dout_i, DV, CONFIG)
        u = 0.0
        if along.tv.data is not None:
            u = inner_products(tv_j, dout_i, DV, CONFIG)
        residual = residual_i[None, :] if CONFIG.NATURAL else 0.0
        p = probabilities(s.t, info.factor, lse_i[None, :], residual, CONFIG.NATURAL)  # [N, M]
        kept = p
        if params.dropout.threshold is not None:
            keep = tl.trans(keep_mask(params.dropout, info.stream, row[:, None], tl.min(tile.position), CONFIG.BLOCK_N))
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * params.dropout.keep_scale, 0.0)
            u = tl.where(keep, u * params.dropout.keep_scale, 0.0)
        dp -= delta_i[None, :]
        moved = t - tlse_i[None, :]
        dv_j = add_product(dv_j, None, shown(kept * moved, tile, position, params, info, MASKED), dout_i, DV, CONFIG)
        r, ds = by_product(p * (dp * moved + u - product_i[None, :]), p * dp, t, s, params)
        dk_j = add_product(dk_j, None, shown(r, tile, position, params, info, MASKED), q_i, D, CONFIG)
        if along.tq.data is not None:
            dk_j = add_product(dk_j, None, shown(ds, tile, position, params, info, MASKED), tq_i, D, CONFIG)
    return dk_j, dv_j


@triton.jit
def by_product(r, ds, t, s, params):
    """The gradients by `scale * <q, k>` and by its tangent, from those by the score and by its tangent `t`."""
    if params.scores.softcap is not None:
        slope = 1 - s.tanh * s.tanh
        r = slope * r - (2 / params.scores.softcap) * s.tanh * ds * t
        ds = slope * ds
    return r, ds


@triton.jit
def load_numbers(first, row, exists):
    return tl.load(first + row) if exists is None else tl.load(first + row, mask=exists, other=0.0)


@triton.jit
def shown(x, tile, rows, params, info, MASKED: tl.constexpr):
    """`x [N, M]` where a row sees a key of the tile, else 0."""
    if MASKED:
        x = tl.where(within(tile.bounds, rows), x, 0.0)
    if params.scores.mask.data is not None and (MASKED or params.lists.data is None):
        x = tl.where(scores.load_mask(params, info, rows, tile.position, tile.exists), x, 0.0)
    if params.scores.mask_mod is not None and (MASKED or params.lists.data is None):
        x = tl.where(scores.visible_by_function(params, info, rows, tile.position), x, 0.0)
    return x
