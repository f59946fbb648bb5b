"""Products of the weights of pairs (`second_weights`) with keys and with rows: one sum of `BLOCK_D` columns a program.

of keys:  dq = scale (r k + ds tk),   tout = p tv + w v
of rows:  dk = scale (r^T q + ds^T tq),   dv = w^T dout
"""

import triton
import triton.language as tl

from .combine import is_last_split
from .forward import split_of
from .kernel import Pointer, Scalar, kernel
from .masking import key_blocks, row_blocks
from .parameters import KeyTensor, QueryTensor
from .products import add_chunk
from .rng import block_origin
from .rows import elements, head_pointer
from .second_weights import HeadRange, Visibility, columns, first_weight, head_of_range
from .sequences import key_seqlen


@kernel
def weighted_keys_kernel(
    first: Pointer, second: Pointer, x: KeyTensor, y: KeyTensor, result: QueryTensor, span: HeadRange,
    params: Visibility, partials: Pointer, semaphores: Pointer, scale: Scalar, D: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `result [B, H, Sq, D] = scale * (first @ x + second @ y)` for the rows of a range. `SPLITS` programs that
    share the keys of a sum leave `partials [programs, SPLITS, BLOCK_M, BLOCK_D]`, which the last one adds up in order.
    """
    ALIGN: tl.constexpr = CONFIG.ALIGN
    SPLITS: tl.constexpr = CONFIG.SPLITS
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    COLUMN_BLOCKS: tl.constexpr = (D.WIDTH + BLOCK_D - 1) // BLOCK_D
    lengths, split, sum_of = params.lengths, tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    tiles, program = span.range_rows * (UNIT // BLOCK_M), sum_of
    column, program = program % COLUMN_BLOCKS * BLOCK_D, program // COLUMN_BLOCKS
    tile, number = tiles - 1 - program % tiles, program // tiles  # the last rows of a causal call see the most keys
    start = span.first_row + tile * BLOCK_M
    if start < lengths.total_q:
        b, head = head_of_range(span, lengths, number)
        head_k = head // (lengths.num_heads_q // lengths.num_heads_k)
        seqlen_k = key_seqlen(lengths, b)
        shift = seqlen_k.seqlen - lengths.total_q + params.window.diagonal
        last = tl.minimum(start + BLOCK_M, lengths.total_q) - 1
        blocks = key_blocks(params, start, last, shift, seqlen_k, CONFIG.BLOCK_N)
        if SPLITS > 1:
            blocks = split_of(blocks, split, SPLITS, CONFIG.BLOCK_N)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        at = first_weight(span, number, rows, UNIT) - block_origin(params.dropout)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        compensation = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) if CONFIG.COMPENSATED else 0.0
        acc, compensation = over_keys(
            acc, compensation, first + at, head_pointer(x, b, head_k, ALIGN), x, blocks, seqlen_k, column, D, BLOCK_D,
            CONFIG,
        )  # fmt: skip
        if y.data is not None:
            acc, compensation = over_keys(
                acc, compensation, second + at, head_pointer(y, b, head_k, ALIGN), y, blocks, seqlen_k, column, D,
                BLOCK_D, CONFIG,
            )  # fmt: skip
        is_last = True
        if SPLITS > 1:
            tile_size: tl.constexpr = BLOCK_M * BLOCK_D
            own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            of_sum = partials + sum_of.to(tl.int64) * (SPLITS * tile_size) + own
            tl.store(of_sum + split * tile_size, acc)
            is_last = is_last_split(semaphores + sum_of, SPLITS)
            if is_last:
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for n in range(SPLITS):
                    acc += tl.load(of_sum + n * tile_size, cache_modifier=".cg")
        if is_last:
            row, d = start + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_D)[None, :]
            pointers = head_pointer(result, b, head, ALIGN) + row * elements(result.stride_m, ALIGN) + d
            exists = (row < lengths.total_q) & (d < D.WIDTH)
            tl.store(pointers, (acc * scale).to(result.data.dtype.element_ty), mask=exists)


@triton.jit
def over_keys(
    acc, compensation, weights, x, keys, blocks, seqlen_k, column, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the product of weights, whose pointers are `[M, 1]`, and columns of keys. Keys past the last one repeat it:
    they have weights 0.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    stride = elements(keys.stride_n, CONFIG.ALIGN)
    for start in range(blocks.lo, blocks.hi, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = tl.maximum(tl.minimum(key, seqlen_k.end - 1), 0)[:, None] * stride
        weight = tl.load(weights + key[None, :])
        acc, compensation = add_chunk(
            acc, compensation, None, weight, columns(x, at, column, BLOCK_D, D.WIDTH), D, CONFIG
        )
    return acc, compensation


@kernel
def weighted_rows_kernel(
    first: Pointer, second: Pointer, x: QueryTensor, y: QueryTensor, sums: Pointer, span: HeadRange, params: Visibility,
    scale: Scalar, range_group: Scalar, D: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Add `scale * (first^T @ x + second^T @ y)`, for the rows of a range, to fp32 `sums [B * Hkv, Sk, D]`. Programs
    add the `range_group` heads of the range that share a key head.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    COLUMN_BLOCKS: tl.constexpr = (D.WIDTH + BLOCK_D - 1) // BLOCK_D
    lengths, program = params.lengths, tl.program_id(0)
    tiles = span.pitch * (UNIT // BLOCK_N)
    column, program = program % COLUMN_BLOCKS * BLOCK_D, program // COLUMN_BLOCKS
    tile, program = program % tiles, program // tiles
    group = lengths.num_heads_q // lengths.num_heads_k
    start = block_origin(params.dropout) + tile * BLOCK_N
    head_k = (span.first_head + program * range_group) // group  # of all sequences
    b = (head_k // lengths.num_heads_k).to(tl.int64)
    seqlen_k = key_seqlen(lengths, b)
    shift = seqlen_k.seqlen - lengths.total_q + params.window.diagonal
    last = tl.minimum(start + BLOCK_N, seqlen_k.end) - 1
    num_rows = tl.where(last >= start, lengths.total_q, 0)
    blocks = row_blocks(params.window, start, last, shift, num_rows, CONFIG.BLOCK_M)
    lo = tl.maximum(blocks.lo, span.first_row)
    hi = tl.minimum(blocks.hi, span.first_row + span.range_rows * UNIT)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    compensation = tl.zeros([BLOCK_N, BLOCK_D], tl.float32) if CONFIG.COMPENSATED else 0.0
    for g in tl.range(0, range_group):
        number = program * range_group + g
        _, head = head_of_range(span, lengths, number)
        at = first_weight(span, number, -span.first_row, UNIT) + tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        acc, compensation = over_rows(
            acc, compensation, first + at, head_pointer(x, b, head, CONFIG.ALIGN), x, lo, hi, span, lengths, column, D,
            UNIT, BLOCK_D, CONFIG,
        )  # fmt: skip
        if y.data is not None:
            acc, compensation = over_rows(
                acc, compensation, second + at, head_pointer(y, b, head, CONFIG.ALIGN), y, lo, hi, span, lengths,
                column, D, UNIT, BLOCK_D, CONFIG,
            )  # fmt: skip
    key, d = start + tl.arange(0, BLOCK_N)[:, None], column + tl.arange(0, BLOCK_D)[None, :]
    pointers = sums + (head_k.to(tl.int64) * lengths.total_k + key) * D.WIDTH + d
    exists = (key >= seqlen_k.begin) & (key < seqlen_k.end) & (d < D.WIDTH)
    tl.store(pointers, tl.load(pointers, mask=exists, other=0.0) + acc * scale, mask=exists)


@triton.jit
def over_rows(
    acc, compensation, weights, x, rows, lo, hi, span, lengths, column, D: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the product of transposed weights, whose pointers are `[1, N]`, and columns of rows. Rows past the last one
    repeat it: they have weights 0.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    stride, pitch = elements(rows.stride_m, CONFIG.ALIGN), elements(span.pitch, UNIT)
    for start in range(lo, hi, BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M))[:, None]
        weight = tl.load(weights + row * pitch)
        at = tl.minimum(row, lengths.total_q - 1) * stride
        acc, compensation = add_chunk(
            acc, compensation, None, weight.T, columns(x, at, column, BLOCK_D, D.WIDTH), D, CONFIG
        )
    return acc, compensation
