"""The backward pass in one kernel, where all rows or all keys of a head are one block.

Each score is computed once: five products, and each input is read once, where the kernels of longer sequences take
seven to nine products. A program walks over the blocks of the other side, with the sums of its block in registers: dq
in a walk over keys, dk and dv in one over rows. Where both sides are one block there is no walk, sequences may be
packed, and a program adds up the gradient of a bias over the sequences and heads that share it. Where heads are few,
several programs share a walk, and the last one to finish adds up their sums in order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .combine import is_last_split
from .dbias import BiasGradient, store_bias_gradient
from .kernel import Pointer, Scalar, kernel
from .masking import key_bounds, row_bounds
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .preprocess import row_statistics
from .products import add_product, scaled, zeros
from .prologue import head_info, sequence_index
from .rows import Chunks, elements, head_pointer, load_rows, store_rows
from .score_gradient import KeyValueTile, RowTile, score_gradient, transposed_gradient
from .sequences import SeqlenInfo, key_seqlen, query_seqlen

MANY_ROWS = tl.constexpr(64)  # of a walk over keys; fewer do not fill the products of a warpgroup


class SharedHeads(NamedTuple):
    """Heads with a bias of their own, and the sequences and heads that share one: of each pair, one is 1. Without a
    gradient of a bias, every sequence and head is its own.
    """

    tiles_h: Scalar
    shared_b: Scalar
    shared_h: Scalar
    splits: Scalar  # programs that share the work of one bias, or one walk


class Partials(NamedTuple):
    """Sums of each program of a shared walk, fp32 `[splits, heads, S, D]`: dq, or dk and dv."""

    partial_a: Pointer
    partial_b: Pointer
    semaphores: Pointer  # one a head, 0 before and after


class Head(NamedTuple):
    """The inputs of one sequence and head."""

    q: QueryTensor
    k: KeyTensor
    v: KeyTensor
    out: QueryTensor
    dout: QueryTensor
    lse: RowTensor
    residual: Pointer
    dlse: QueryTensor
    b: tl.tensor  # int64
    head: tl.tensor
    offset_q: tl.tensor  # token of position 0; 0 where sequences are not packed
    seqlen_q: tl.tensor
    offset_k: tl.tensor
    seqlen_k: tl.tensor


class RowBlock(NamedTuple):
    """A block of query rows."""

    position: tl.tensor  # [M]
    exists: tl.tensor  # [M]
    tile: RowTile


class TileGradient(NamedTuple):
    """Probabilities and gradients of a tile, as operands of products."""

    p: tl.tensor  # [N, M]
    ds: tl.tensor  # [M, N], of `scale * <q, k>`
    ds_t: tl.tensor  # [N, M]
    score_ds: tl.tensor  # of the score before score_mod, fp32 in the layout that the tile has


@kernel
def fused_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, dout: QueryTensor, dq: QueryTensor, dk: KeyTensor,
    dv: KeyTensor, lse: RowTensor, residual: Pointer, dlse: QueryTensor, dslopes: RowTensor, dbias: BiasGradient,
    partials: Partials, heads: SharedHeads, params: Params, scale: Scalar, WALK: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dq`, `dk` and `dv`, and those of `dslopes [B, H, Sq]` and `dbias` that are not `None`. `WALK` is over
    "keys", "rows" or nothing; `dslopes` has `Sq` values for each split of a walk over keys.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    split, program = tl.program_id(0) % heads.splits, tl.program_id(0) // heads.splits
    own_h, own_b = program % heads.tiles_h, program // heads.tiles_h
    total_q, total_k = params.lengths.total_q, params.lengths.total_k
    if WALK == "keys":
        given = Head(q, k, v, out, dout, lse, residual, dlse, own_b.to(tl.int64), own_h, 0, total_q, 0, total_k)
        walk_keys(given, dq, dk, dv, dslopes, partials, split, heads.splits, program, params, scale, CONFIG)
    elif WALK == "rows":
        given = Head(q, k, v, out, dout, lse, residual, dlse, own_b.to(tl.int64), own_h, 0, total_q, 0, total_k)
        walk_rows(given, dq, dk, dv, dslopes, partials, split, heads.splits, program, params, scale, CONFIG)
    else:
        total = tl.zeros([N, M], tl.float32)
        for n in tl.range(split, heads.shared_b * heads.shared_h, heads.splits):
            sequence, head = own_b + n // heads.shared_h, own_h + n % heads.shared_h
            offset_q, seqlen_q = query_seqlen(params.lengths, sequence)
            info_k = key_seqlen(params.lengths, sequence)
            b = sequence.to(tl.int64)
            if params.lengths.cu_seqlens_q is not None:
                b = sequence_index(sequence, params.lengths.batch)
            given = Head(
                q, k, v, out, dout, lse, residual, dlse, b, head, offset_q, seqlen_q, info_k.offset, info_k.seqlen
            )
            ds = whole_head(given, dq, dk, dv, dslopes, params, scale, CONFIG)
            if dbias.data is not None:
                total += ds
            if params.lengths.cu_seqlens_q is not None:
                store_no_gradients(given, sequence, dq, dk, dv, dslopes, params, CONFIG)
        if dbias.data is not None:
            row, position = tl.arange(0, M), tl.arange(0, N)
            store_bias_gradient(dbias, split, own_b, own_h, row, position, tl.trans(total))


@triton.jit
def whole_head(given, dq, dk, dv, dslopes, params, scale, CONFIG: tl.constexpr):
    """Store the gradients of one sequence and head whose scores are one tile; returns those of its scores, `[N, M]`."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    keys = load_key_block(given, 0, params, CONFIG)
    rows = load_row_block(given, 0, params, CONFIG)
    info = info_of(given, params)
    found = tile_gradient(keys, rows, 0, params, info, True, CONFIG)
    dk_j, dv_j = add_to_keys(zeros(N, D, False), zeros(N, DV, False), found, rows, CONFIG)
    dq_i = add_product(zeros(M, D, False), None, found.ds, keys.k, D, CONFIG)
    store_row_gradient(dq, given, 0, rows, dq_i, scale, CONFIG)
    store_key_gradients(dk, dv, given, 0, dk_j, dv_j, params, scale, CONFIG)
    if dslopes.data is not None:
        store_slopes(dslopes, given, 0, rows, slopes_of_rows(found, info, rows, keys, True))
    return found.score_ds


@triton.jit
def walk_keys(
    given, dq, dk, dv, dslopes, partials, split, splits, program, params, scale, CONFIG: tl.constexpr
):  # fmt: skip
    """Store the gradients of a head whose rows are one block."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    SLOPES: tl.constexpr = dslopes.data is not None
    TRANSPOSED: tl.constexpr = M < MANY_ROWS
    rows = load_row_block(given, 0, params, CONFIG)
    info = info_of(given, params)
    dq_i, dslope_i = zeros(M, D, False), tl.zeros([M], tl.float32)
    lo, hi = split_of(params.lengths.total_k, split, splits, N)
    for start in tl.range(lo, hi, N):
        keys = load_key_block(given, start, params, CONFIG)
        found = tile_gradient(keys, rows, start, params, info, TRANSPOSED, CONFIG)
        dk_j, dv_j = add_to_keys(zeros(N, D, False), zeros(N, DV, False), found, rows, CONFIG)
        dq_i = add_product(dq_i, None, found.ds, keys.k, D, CONFIG)
        store_key_gradients(dk, dv, given, start, dk_j, dv_j, params, scale, CONFIG)
        if SLOPES:
            dslope_i += slopes_of_rows(found, info, rows, keys, TRANSPOSED)
    if SLOPES:
        store_slopes(dslopes, given, split * params.lengths.total_q, rows, dslope_i)
    if partials.semaphores is None:
        store_row_gradient(dq, given, 0, rows, dq_i, scale, CONFIG)
    else:
        part = partial_rows(partials.partial_a, program, rows.position, params.lengths.total_q, D)
        stride = tl.num_programs(0) // splits * elements(params.lengths.total_q, D.WIDTH)
        store_rows(part + split * stride, dq_i, rows.exists, D)
        if is_last_split(partials.semaphores + program, splits):
            total = sum_of_splits(part, stride, splits, rows.exists, M, D)
            store_row_gradient(dq, given, 0, rows, total, scale, CONFIG)


@triton.jit
def walk_rows(
    given, dq, dk, dv, dslopes, partials, split, splits, program, params, scale, CONFIG: tl.constexpr
):  # fmt: skip
    """Store the gradients of a head whose keys are one block."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    keys = load_key_block(given, 0, params, CONFIG)
    info = info_of(given, params)
    dk_j, dv_j = zeros(N, D, False), zeros(N, DV, False)
    lo, hi = split_of(params.lengths.total_q, split, splits, M)
    for start in tl.range(lo, hi, M):
        rows = load_row_block(given, start, params, CONFIG)
        found = tile_gradient(keys, rows, 0, params, info, True, CONFIG)
        dk_j, dv_j = add_to_keys(dk_j, dv_j, found, rows, CONFIG)
        dq_i = add_product(zeros(M, D, False), None, found.ds, keys.k, D, CONFIG)
        store_row_gradient(dq, given, start, rows, dq_i, scale, CONFIG)
        if dslopes.data is not None:
            store_slopes(dslopes, given, 0, rows, slopes_of_rows(found, info, rows, keys, True))
    if partials.semaphores is None:
        store_key_gradients(dk, dv, given, 0, dk_j, dv_j, params, scale, CONFIG)
    else:
        position, seqlen_k = tl.arange(0, N), params.lengths.total_k
        exists = position < seqlen_k
        part_k = partial_rows(partials.partial_a, program, position, seqlen_k, D)
        part_v = partial_rows(partials.partial_b, program, position, seqlen_k, DV)
        programs = tl.num_programs(0) // splits
        stride_k, stride_v = programs * elements(seqlen_k, D.WIDTH), programs * elements(seqlen_k, DV.WIDTH)
        store_rows(part_k + split * stride_k, dk_j, exists, D)
        store_rows(part_v + split * stride_v, dv_j, exists, DV)
        if is_last_split(partials.semaphores + program, splits):
            total_k = sum_of_splits(part_k, stride_k, splits, exists, N, D)
            total_v = sum_of_splits(part_v, stride_v, splits, exists, N, DV)
            store_key_gradients(dk, dv, given, 0, total_k, total_v, params, scale, CONFIG)


@triton.jit
def split_of(seqlen, split, splits, BLOCK: tl.constexpr):
    """The positions of one of `splits` equal runs of blocks."""
    each = tl.cdiv(tl.cdiv(seqlen, BLOCK), splits) * BLOCK
    lo = tl.minimum(split * each, seqlen)
    return lo, tl.minimum(lo + each, seqlen)


@triton.jit
def store_no_gradients(given, sequence, dq, dk, dv, dslopes, params, CONFIG: tl.constexpr):
    """Store 0 for packed tokens that belong to no sequence, and for those past the longest one that was promised."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    lengths = params.lengths
    begin_q, end_q = given.offset_q + M, given.offset_q + given.seqlen_q
    begin_k, end_k = given.offset_k + N, given.offset_k + given.seqlen_k
    if sequence == lengths.batch:
        begin_q, end_q = tl.load(lengths.cu_seqlens_q + lengths.batch).to(tl.int32), lengths.total_q
        begin_k, end_k = tl.load(lengths.cu_seqlens_k + lengths.batch).to(tl.int32), lengths.total_k
    for start in tl.range(begin_q, end_q, M):
        exists = start + tl.arange(0, M) < end_q
        rows = block_pointers(dq, 0, given.head, start, dq.stride_m, M, CONFIG.ALIGN)
        store_rows(rows, zeros(M, D, False), exists, D)
        if dslopes.data is not None:
            at = head_pointer(dslopes, 0, given.head, 1) + start + tl.arange(0, M)
            tl.store(at, tl.zeros([M], tl.float32), mask=exists)
    for start in tl.range(begin_k, end_k, N):
        exists = start + tl.arange(0, N) < end_k
        store_rows(
            block_pointers(dk, 0, given.head, start, dk.stride_n, N, CONFIG.ALIGN), zeros(N, D, False), exists, D
        )
        store_rows(
            block_pointers(dv, 0, given.head, start, dv.stride_n, N, CONFIG.ALIGN), zeros(N, DV, False), exists, DV
        )


@triton.jit
def info_of(given, params):
    shift = given.seqlen_k - given.seqlen_q + params.window.diagonal
    return head_info(params, given.b, given.head, shift)


@triton.jit
def load_row_block(given, start, params, CONFIG: tl.constexpr):
    """Load the rows from position `start` on."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    b, head = given.b, given.head
    row = start + tl.arange(0, M)
    exists = row < given.seqlen_q
    first = given.offset_q + start
    q_i = load_rows(block_pointers(given.q, b, head, first, given.q.stride_m, M, ALIGN), exists, D)
    out_i = load_rows(block_pointers(given.out, b, head, first, given.out.stride_m, M, ALIGN), exists, DV)
    dout_i = load_rows(block_pointers(given.dout, b, head, first, given.dout.stride_m, M, ALIGN), exists, DV)
    token = first + tl.arange(0, M)
    lse_i, delta_i, residual_i = row_statistics(
        out_i, dout_i, given.lse, given.residual, given.dlse, b, head, token, exists, DV, CONFIG.NATURAL
    )
    return RowBlock(row, exists, RowTile(row[:, None], q_i, dout_i, lse_i, delta_i, residual_i))


@triton.jit
def load_key_block(given, start, params, CONFIG: tl.constexpr):
    """Load the keys and values from position `start` on, with the rows that see them."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    N: tl.constexpr = CONFIG.BLOCK_N
    seqlen_q, seqlen_k, first = given.seqlen_q, given.seqlen_k, given.offset_k + start
    position = start + tl.arange(0, N)
    key_exists = position < tl.minimum(seqlen_k, params.lengths.max_seqlen_k)
    k_rows = block_pointers(given.k, given.b, given.head, first, given.k.stride_n, N, ALIGN)
    v_rows = block_pointers(given.v, given.b, given.head, first, given.v.stride_n, N, ALIGN)
    k_j = load_rows(k_rows, key_exists, D)
    v_j = load_rows(v_rows, key_exists, DV)
    keys, exists = position[:, None], key_exists[:, None]
    shift = seqlen_k - seqlen_q + params.window.diagonal
    return KeyValueTile(keys, k_j, v_j, exists, row_bounds(params.window, keys, shift, exists, seqlen_q))


@triton.jit
def tile_gradient(keys, rows, first_key, params, info, TRANSPOSED: tl.constexpr, CONFIG: tl.constexpr):
    """The gradient of a tile, whose scores are `[N, M]` if it is `TRANSPOSED`: then products for dk and dv take it from
    registers, otherwise that for dq.
    """
    q_i, dout_i = rows.tile.q, rows.tile.dout
    if TRANSPOSED:
        found = transposed_gradient(
            keys,
            q_i,
            dout_i,
            rows.tile.lse,
            rows.tile.delta,
            rows.tile.residual,
            rows.position,
            params,
            info,
            True,
            CONFIG,
        )
        ds_t = scores.backward(found.ds, found.score, params).to(q_i.a.dtype)
        return TileGradient(found.p.to(dout_i.a.dtype), tl.trans(ds_t), ds_t, found.ds)
    else:
        total = params.lengths.total_k
        bounds = key_bounds(params, rows.tile.position, info.shift, SeqlenInfo(0, total, 0, total))
        position = first_key + tl.arange(0, CONFIG.BLOCK_N)
        found = score_gradient(
            rows.tile,
            keys.k,
            keys.v,
            position[None, :],
            first_key,
            position < total,
            params,
            info,
            bounds,
            True,
            CONFIG,
        )
        ds = scores.backward(found.ds, found.score, params).to(q_i.a.dtype)
        return TileGradient(tl.trans(found.p.to(dout_i.a.dtype)), ds, tl.trans(ds), found.ds)


@triton.jit
def add_to_keys(dk_j, dv_j, found, rows, CONFIG: tl.constexpr):
    """Add the gradients of a tile to those of its keys and values."""
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    dv_j = add_product(dv_j, None, found.p, rows.tile.dout, DV, CONFIG)
    dk_j = add_product(dk_j, None, found.ds_t, rows.tile.q, D, CONFIG)
    return dk_j, dv_j


@triton.jit
def slopes_of_rows(found, info, rows, keys, TRANSPOSED: tl.constexpr):
    """The part of each row in the gradient of its slope, `[M]`."""
    if TRANSPOSED:
        return -tl.sum(found.score_ds * scores.distance(info, rows.position[None, :], keys.position), 0)
    else:
        return -tl.sum(found.score_ds * scores.distance(info, rows.tile.position, tl.trans(keys.position)), 1)


@triton.jit
def store_slopes(dslopes, given, first, rows, dslope):
    at = given.offset_q + first + rows.position
    tl.store(head_pointer(dslopes, given.b, given.head, 1) + at, dslope, mask=rows.exists)


@triton.jit
def store_row_gradient(dq, given, start, rows, dq_i, scale, CONFIG: tl.constexpr):
    D: tl.constexpr = CONFIG.HEAD_DIM
    first = given.offset_q + start
    pointers = block_pointers(dq, given.b, given.head, first, dq.stride_m, CONFIG.BLOCK_M, CONFIG.ALIGN)
    store_rows(pointers, scaled(dq_i, scale, D), rows.exists, D)


@triton.jit
def store_key_gradients(dk, dv, given, start, dk_j, dv_j, params, scale, CONFIG: tl.constexpr):
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    N: tl.constexpr = CONFIG.BLOCK_N
    exists, first = start + tl.arange(0, N) < given.seqlen_k, given.offset_k + start
    dv_scale = 1.0 if params.dropout.threshold is None else params.dropout.keep_scale
    dk_rows = block_pointers(dk, given.b, given.head, first, dk.stride_n, N, CONFIG.ALIGN)
    dv_rows = block_pointers(dv, given.b, given.head, first, dv.stride_n, N, CONFIG.ALIGN)
    store_rows(dk_rows, scaled(dk_j, scale, D), exists, D)
    store_rows(dv_rows, scaled(dv_j, dv_scale, DV), exists, DV)


@triton.jit
def block_pointers(x, b, head, start, stride, N: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers `[N, 1]` to the rows of a head from position `start` on; within a block, offsets have 32 bits."""
    first = head_pointer(x, b, head, ALIGN) + start * elements(stride, ALIGN)
    return first + tl.arange(0, N)[:, None] * (stride * ALIGN)


@triton.jit
def partial_rows(data, program, position, seqlen, D: tl.constexpr):
    """Pointers `[N, 1]` to the sums of the first split."""
    return data + (program * elements(seqlen, D.WIDTH) + position * D.WIDTH)[:, None]


@triton.jit
def sum_of_splits(part, stride, splits, exists, N: tl.constexpr, D: tl.constexpr):
    """The sums of all splits `[N, D]`, added up in order."""
    if D.CHUNK_1 == 0:
        return Chunks(chunk_of_splits(part, stride, splits, exists, N, 0, D.CHUNK_0, D.WIDTH), 0.0)
    else:
        return Chunks(
            chunk_of_splits(part, stride, splits, exists, N, 0, D.CHUNK_0, D.WIDTH),
            chunk_of_splits(part, stride, splits, exists, N, D.CHUNK_0, D.CHUNK_1, D.WIDTH),
        )


@triton.jit
def chunk_of_splits(
    part, stride, splits, exists, N: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([N, WIDTH], tl.float32)
    for split in tl.range(0, splits):
        # Other cores wrote these: load them from the L2 cache, which all cores share.
        found = tl.load(part + split * stride + d, mask=exists[:, None] & (d < D), other=0.0, cache_modifier=".cg")
        total += found
    return total
