"""The gradient of a bias, in memory proportional to the bias.

One program for each tile of the bias adds the score gradients of all sequences, heads, rows and keys that share it. No
atomics: one writer, one order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .kernel import Pointer, Scalar, kernel
from .keys import key_tile, load_k, load_v
from .masking import key_bounds
from .parameters import KeyTensor, Params, QueryTensor, RowTensor
from .products import add, zero_sum
from .prologue import prologue, with_bias
from .rng import block_origin
from .rows import elements
from .score_gradient import load_row_tile, score_gradient
from .scores import load_pairs
from .sequences import query_seqlen


class BiasGradient(NamedTuple):
    """`[splits, B, H, Sq, Sk]`, contiguous; a broadcast row or column has no stride."""

    data: Pointer
    stride_split: Scalar
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar
    stride_n: Scalar
    bias_rows: Scalar
    bias_keys: Scalar
    dbias_align: tl.constexpr  # the unit of strides, in elements


class BiasTiles(NamedTuple):
    """The bias's own tiles, and the sequences, heads, row and key blocks that share one. Of each pair, one is 1."""

    tiles_h: Scalar
    tiles_m: Scalar
    tiles_n: Scalar
    shared_b: Scalar
    shared_h: Scalar
    shared_m: Scalar
    shared_n: Scalar
    splits: Scalar  # programs that share the work of one tile


@kernel
def dbias_kernel(
    q: QueryTensor, k: KeyTensor, v: KeyTensor, dout: QueryTensor, row_stats: RowTensor, dbias: BiasGradient,
    tiles: BiasTiles, params: Params, BIAS_ONCE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dbias`. Each of `splits` programs adds every `splits`-th problem that shares the tile."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    MASKED: tl.constexpr = not CONFIG.EVEN
    lengths, program = params.lengths, tl.program_id(0)
    split, program = program % tiles.splits, program // tiles.splits
    own_n, program = program % tiles.tiles_n, program // tiles.tiles_n
    own_m, program = program % tiles.tiles_m, program // tiles.tiles_m
    own_h, own_b = program % tiles.tiles_h, program // tiles.tiles_h
    origin = block_origin(params.dropout)
    bias = ()
    if BIAS_ONCE:  # all that shares the tile has its bias, whose latency is not in the loop then
        own_rows = (own_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        own_keys = (origin + own_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        in_bias = (own_keys >= 0) & (own_keys < dbias.bias_keys) if MASKED else None
        bias = (load_bias(params, own_b.to(tl.int64), own_h, own_rows, own_keys, in_bias),)
    total = zero_sum(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), CONFIG.COMPENSATED)
    for n in tl.range(split, tiles.shared_b * tiles.shared_h * tiles.shared_m * tiles.shared_n, tiles.splits):
        # One of each pair is 0: the bias's own index, or the shared one.
        tile_n, n = own_n + n % tiles.shared_n, n // tiles.shared_n
        tile_m, n = own_m + n % tiles.shared_m, n // tiles.shared_m
        head, b = own_h + n % tiles.shared_h, (own_b + n // tiles.shared_h).to(tl.int64)
        offset_q, seqlen_q = query_seqlen(lengths, b)
        head_k = head // (lengths.num_heads_q // lengths.num_heads_k)
        kv, info = prologue(k, v, params, b, b, seqlen_q, head, head_k, CONFIG)
        info = with_bias(info, bias)
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = row < seqlen_q
        row_tile = load_row_tile(q, dout, row_stats, b, head, offset_q, row, exists, CONFIG)
        first_key = origin + tile_n * BLOCK_N
        tile = key_tile(kv, first_key, CONFIG)
        keys = first_key + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        keys_exist = tile.exists if MASKED else None
        k_j = load_k(kv, tile, keys_exist, CONFIG)  # [N, D]
        v_j = load_v(kv, tile, keys_exist, CONFIG)  # [N, Dv]
        bounds = key_bounds(params, row_tile.position, info.shift, kv.seqlen)
        ds = score_gradient(row_tile, k_j, v_j, keys, first_key, keys_exist, params, info, bounds, MASKED, CONFIG).ds
        if MASKED:
            ds = tl.where(exists[:, None], ds, 0.0)
        total = add(total, ds, CONFIG.COMPENSATED)

    rows = own_m * BLOCK_M + tl.arange(0, BLOCK_M)
    store_bias_gradient(dbias, split, own_b, own_h, rows, origin + own_n * BLOCK_N + tl.arange(0, BLOCK_N), total.total)


@triton.jit
def load_bias(params, b, head, rows, keys, exists):
    """A tile of the bias."""
    return load_pairs(params.scores.bias, params, b, head, rows, keys, exists, 0.0)


@triton.jit
def store_bias_gradient(dbias, split, b, head, rows, keys, total):
    """Store the sums `[M, N]` of a tile, added up where rows or keys are broadcast."""
    ALIGN: tl.constexpr = dbias.dbias_align
    pointer = dbias.data + split * elements(dbias.stride_split, ALIGN) + b * elements(dbias.stride_b, ALIGN)
    pointer += head * elements(dbias.stride_h, ALIGN)
    if dbias.stride_m is None and dbias.stride_n is None:
        tl.store(pointer, tl.sum(total))
    elif dbias.stride_m is None:
        exists = (keys >= 0) & (keys < dbias.bias_keys)
        tl.store(pointer + keys, tl.sum(total, 0), mask=exists)
    elif dbias.stride_n is None:
        tl.store(pointer + rows * elements(dbias.stride_m, ALIGN), tl.sum(total, 1), mask=rows < dbias.bias_rows)
    else:
        rows, keys = rows[:, None], keys[None, :]
        exists = (rows < dbias.bias_rows) & (keys >= 0) & (keys < dbias.bias_keys)
        if ALIGN > 1:  # where one of ALIGN keys exists, the tensor has all of them
            exists = tl.max_constancy(exists, [1, ALIGN])
        tl.store(pointer + rows * elements(dbias.stride_m, ALIGN) + keys, total, mask=exists)
