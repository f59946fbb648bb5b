"""The backward pass of short sequences in one kernel: all scores of a sequence and head are one tile.

They are computed once: five products, and each input is read once, where the kernels of longer sequences take seven to
nine products. A program adds up the gradient of a bias over the sequences and heads that share it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores
from .dbias import BiasGradient, store_bias_gradient
from .kernel import Scalar, kernel
from .masking import row_bounds
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .preprocess import row_statistics
from .products import add, add_product, scaled, zero_sum, zeros
from .prologue import head_info
from .rows import head_pointer, load_rows, store_rows
from .score_gradient import KeyValueTile, transposed_gradient


class SharedHeads(NamedTuple):
    """Heads with a bias of their own, and the sequences and heads that share one: of each pair, one is 1. Without a
    gradient of a bias, every sequence and head is its own.
    """

    tiles_h: Scalar
    shared_b: Scalar
    shared_h: Scalar
    splits: Scalar  # programs that share the work of one bias


@kernel
def short_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, out: QueryTensor, dout: QueryTensor, dq: QueryTensor, dk: KeyTensor,
    dv: KeyTensor, lse: RowTensor, dlse: QueryTensor, dslopes: RowTensor, dbias: BiasGradient, heads: SharedHeads,
    params: Params, scale: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dq`, `dk` and `dv`, and those of `dslopes [B, H, Sq]` and `dbias` that are not `None`. Each of `splits`
    programs takes every `splits`-th of the sequences and heads that share a bias.
    """
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    split, program = tl.program_id(0) % heads.splits, tl.program_id(0) // heads.splits
    own_h, own_b = program % heads.tiles_h, program // heads.tiles_h
    row = tl.arange(0, M)
    position = tl.arange(0, N)
    total = zero_sum(tl.zeros([N, M], tl.float32), CONFIG.COMPENSATED)
    for n in tl.range(split, heads.shared_b * heads.shared_h, heads.splits):
        b, head = (own_b + n // heads.shared_h).to(tl.int64), own_h + n % heads.shared_h
        ds = gradients(
            q, k, v, out, dout, dq, dk, dv, lse, dlse, dslopes, b, head, row, position, params, scale, CONFIG
        )
        if dbias.data is not None:
            total = add(total, ds, CONFIG.COMPENSATED)
    if dbias.data is not None:
        store_bias_gradient(dbias, split, own_b, own_h, row, position, tl.trans(total.total))


@triton.jit
def gradients(
    q, k, v, out, dout, dq, dk, dv, lse, dlse, dslopes, b, head, row, position, params, scale, CONFIG: tl.constexpr
):  # fmt: skip
    """Store the gradients of one sequence and head; returns those of its scores, `[N, M]`."""
    ALIGN: tl.constexpr = CONFIG.ALIGN
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    M: tl.constexpr = CONFIG.BLOCK_M
    N: tl.constexpr = CONFIG.BLOCK_N
    seqlen_q, seqlen_k = params.lengths.total_q, params.lengths.total_k
    row_exists, key_exists = row < seqlen_q, position < seqlen_k
    k_j = load_rows(tile_pointers(k, b, head, position, k.stride_n, ALIGN), key_exists, D)  # [N, D]
    v_j = load_rows(tile_pointers(v, b, head, position, v.stride_n, ALIGN), key_exists, DV)  # [N, Dv]
    q_i = load_rows(tile_pointers(q, b, head, row, q.stride_m, ALIGN), row_exists, D)  # [M, D]
    out_i = load_rows(tile_pointers(out, b, head, row, out.stride_m, ALIGN), row_exists, DV)  # [M, Dv]
    dout_i = load_rows(tile_pointers(dout, b, head, row, dout.stride_m, ALIGN), row_exists, DV)  # [M, Dv]
    lse_i, delta_i = row_statistics(out_i, dout_i, lse, dlse, b, head, row, row_exists, DV)

    shift = seqlen_k - seqlen_q + params.window.diagonal
    keys, exists = position[:, None], key_exists[:, None]  # [N, 1]
    key_block = KeyValueTile(keys, k_j, v_j, exists, row_bounds(params.window, keys, shift, exists, seqlen_q))
    info = head_info(params, b, head, shift)
    found = transposed_gradient(key_block, q_i, dout_i, lse_i, delta_i, row, params, info, True, CONFIG)
    ds = scores.backward(found.ds, found.score, params)
    dv_j = add_product(zeros(N, DV, CONFIG.COMPENSATED), None, found.p, dout_i, DV, CONFIG)
    dk_j = add_product(zeros(N, D, CONFIG.COMPENSATED), None, ds, q_i, D, CONFIG)
    dq_i = add_product(zeros(M, D, CONFIG.COMPENSATED), None, tl.trans(ds), k_j, D, CONFIG)

    dv_scale = 1.0 if params.dropout.threshold is None else params.dropout.keep_scale
    store_rows(tile_pointers(dq, b, head, row, dq.stride_m, ALIGN), scaled(dq_i, scale, D), row_exists, D)
    store_rows(tile_pointers(dk, b, head, position, dk.stride_n, ALIGN), scaled(dk_j, scale, D), key_exists, D)
    store_rows(tile_pointers(dv, b, head, position, dv.stride_n, ALIGN), scaled(dv_j, dv_scale, DV), key_exists, DV)
    if dslopes.data is not None:
        dslope = -tl.sum(found.ds * scores.distance(info, row[None, :], keys), 0)
        tl.store(head_pointer(dslopes, b, head, 1) + row, dslope, mask=row_exists)
    return found.ds


@triton.jit
def tile_pointers(x, b, head, positions, stride, ALIGN: tl.constexpr):
    """Pointers `[N, 1]` to rows of a head; within it, offsets have 32 bits."""
    return head_pointer(x, b, head, ALIGN) + positions[:, None] * (stride * ALIGN)
