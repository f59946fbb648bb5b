"""The loop over keys for tiles of 8 rows: scores `[N, M]` and sums `[Dv, M]`, transposed.

Matrix units take 16 rows of their left operand, but 8 columns of the right one. With keys and values on the left, few
rows take half of the instructions that they take among 16.
"""

import triton
import triton.language as tl

from . import scores, softmax
from .eight_bit import bf16_remainder, number_rows, scaled_by_key, scaled_scores, scales_of_tile
from .keys import load_k, load_pages, load_v_columns, tile_in_pages
from .masking import mask_edges
from .products import Sum, Sums, inner_products
from .rows import Chunks
from .softmax import INFINITY, RowState


@triton.jit
def zeros(M: tl.constexpr, D: tl.constexpr):
    """Empty sums `[D, M]`."""
    D0: tl.constexpr = D.CHUNK_0
    D1: tl.constexpr = D.CHUNK_1
    b = 0.0 if D1 == 0 else tl.zeros([D1, M], tl.float32)
    return Sums(tl.zeros([D0, M], tl.float32), b, 0.0, 0.0)


@triton.jit
def transposed(x, D: tl.constexpr):
    """Sums `[D, M]` as rows `[M, D]`."""
    if D.CHUNK_1 == 0:
        return Chunks(x.a.T, x.b)
    else:
        return Chunks(x.a.T, x.b.T)


@triton.jit
def inner_loop(state, blocks, q_i, rows, kv, descales, params, info, bounds, CONFIG: tl.constexpr):
    """Update the rows' state with all blocks; rows and bounds are `[1, M]`."""
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.HEAD_DIM
    DV: tl.constexpr = CONFIG.HEAD_DIM_V
    IN_RANGE: tl.constexpr = CONFIG.PAGE_SIZE == 0
    KEYS: tl.constexpr = q_i.a.dtype
    VALUES: tl.constexpr = KEYS if CONFIG.VALUES == "" else tl.float32 if CONFIG.VALUES == "fp32" else tl.bfloat16
    n = tl.arange(0, BLOCK_N)
    # Each key of a block has its own row sum until the last block: no sum over keys in the loop.
    m, acc = state.m, state.acc
    l = tl.where(n[:, None] == 0, state.l.total[None, :], 0.0)  # noqa: E741  [N, M]
    pages = 0
    if CONFIG.PAGE_SIZE > 0:
        pages = load_pages(kv, blocks.lo, CONFIG)
    for start_n in range(blocks.lo, blocks.hi, BLOCK_N):
        tile = tile_in_pages(kv, start_n, pages, CONFIG)
        if CONFIG.PAGE_SIZE > 0:
            pages = load_pages(kv, start_n + BLOCK_N, CONFIG)
        exists = tile.exists
        if IN_RANGE and params.lengths.leftpad_k is None:
            exists = n < kv.seqlen.end - start_n  # the same by fewer instructions
        keys, keys_exist = (start_n + n)[:, None], exists[:, None]
        k_j = number_rows(load_k(kv, tile, exists, CONFIG), KEYS, D, CONFIG)  # [N, D]
        k_scale = scales_of_tile(descales.k, kv, tile, start_n, K_SCALES, CONFIG)
        kq = scaled_scores(inner_products(k_j, q_i, D, CONFIG), descales, k_scale, 1, CONFIG)  # [N, M]
        t = scores.forward(kq, params, info, rows, keys, keys_exist, False).t
        t = mask_edges(t, -INFINITY, bounds, blocks, start_n, params, info, rows, keys, keys_exist, IN_RANGE)
        m, alpha, p = softmax.update(RowState(m, state.l, acc), t, info.factor, False, CONFIG.NATURAL, AXIS=0)
        l = l * alpha[None, :] + p  # noqa: E741
        if CONFIG.V_SCALES == "key":
            v_scale = scales_of_tile(descales.v, kv, tile, start_n, "key", CONFIG)
            p = scaled_by_key(p, v_scale, "key", 1)
        v_j = number_rows(load_v_columns(kv, tile, exists, CONFIG), VALUES, DV, CONFIG)  # [Dv, N]
        acc = add_columns(acc, alpha[None, :], p, v_j, DV)
        if CONFIG.VALUES == "bf16x2":
            acc = add_columns(acc, 1.0, bf16_remainder(p), v_j, DV)
    return RowState(m, Sum(tl.sum(l, 0), 0.0), acc)


@triton.jit
def add_columns(acc, alpha, p, v, D: tl.constexpr):
    """`acc [D, M] * alpha + v [D, N] @ p [N, M]`; `alpha` is `[1, M]` or a number."""
    p = p.to(v.a.dtype)
    a = tl.dot(v.a, p, acc.a * alpha)
    if D.CHUNK_1 == 0:
        return Sums(a, acc.b, acc.compensation_a, acc.compensation_b)
    else:
        return Sums(a, tl.dot(v.b, p, acc.b * alpha), acc.compensation_a, acc.compensation_b)
