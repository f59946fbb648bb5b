"""Probabilities and gradients of scores, between matrix products that PyTorch computes. A program has a row.

With `PARTS` they are stored in bfloat16 parts (`signed_split`), else in the dtype of their memory and laid out as the
scores, whose memory they may have. A row has `NUM_BLOCKS` blocks of `WIDTH` keys, a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import scores, softmax
from .kernel import Pointer, Scalar, kernel
from .masking import key_bounds, mask_fill
from .parameters import Params, QueryTensor, RowTensor
from .products import MAX_FLOAT
from .prologue import HeadInfo, head_info
from .rng import keep_mask
from .rows import elements, head_pointer, load_row_stats, probabilities
from .sequences import SeqlenInfo
from .signed_split import store_parts
from .softmax import INFINITY, LN2, LOG2E

UNIT = tl.constexpr(16)  # of strides and of the first key, in elements


class ScoreBlock(NamedTuple):
    """Key heads, their rows `position * group + head` and keys, whose scores are in memory."""

    first_head: Scalar  # of all sequences
    first_row: Scalar
    num_rows: Scalar
    first_key: Scalar  # in UNITs, as the next two
    pitch: Scalar  # from row to row of scores
    padded_keys: Scalar  # of parts


class ScoreRow(NamedTuple):
    """The row of a program."""

    at: tl.tensor  # in the block, int64
    b: tl.tensor  # int64
    head: tl.tensor  # of queries
    position: tl.tensor
    rows: tl.tensor  # the position, [1, 1]
    info: HeadInfo


@triton.jit
def score_row(block, params, at_head, row):
    """The row of a block's key head."""
    lengths = params.lengths
    group = lengths.num_heads_q // lengths.num_heads_k
    head_k, row_of_head = block.first_head + at_head, block.first_row + row
    b = (head_k // lengths.num_heads_k).to(tl.int64)
    head = head_k % lengths.num_heads_k * group + row_of_head % group
    position = row_of_head // group
    info = head_info(params, b, head, lengths.total_k - lengths.total_q + params.window.diagonal)
    at = at_head.to(tl.int64) * block.num_rows + row
    return ScoreRow(at, b, head, position, position + tl.zeros([1, 1], tl.int32), info)


@triton.jit
def visible_keys(params, row, key, exists):
    """Which keys `[1, N]` the row sees."""
    seqlen_k = SeqlenInfo(0, params.lengths.total_k, 0, params.lengths.total_k)
    bounds = key_bounds(params, row.rows, row.info.shift, seqlen_k)
    shown = tl.full([1, key.shape[1]], 1.0, tl.float32)
    return mask_fill(shown, 0.0, bounds, params, row.info, row.rows, key, exists, True, True) > 0


@triton.jit
def load_scores(s, block, params, row, n, ACCURATE: tl.constexpr, WIDTH: tl.constexpr):
    """The n-th scores of a row `[1, WIDTH]`, natural or base-2 logarithms, -inf where a key is hidden."""
    NATURAL: tl.constexpr = params.scores.bias.data is not None or params.scores.score_mod is not None
    local = n * WIDTH + tl.arange(0, WIDTH)[None, :]
    exists = local < block.pitch * UNIT  # whole vectors
    key = block.first_key * UNIT + local
    product = tl.load(s + row.at * elements(block.pitch, UNIT) + local, mask=exists, other=0.0)
    t = scores.forward(product, params, row.info, row.rows, key, key < params.lengths.total_k, ACCURATE).t
    t = t if NATURAL else t * row.info.factor
    return tl.where(visible_keys(params, row, key, key < params.lengths.total_k), t, -INFINITY)


@triton.jit
def exponent(t, m, NATURAL: tl.constexpr):
    """The exponent of 2 of a score relative to a maximum."""
    return (t - subtrahend(m)) * LOG2E if NATURAL else t - subtrahend(m)


@triton.jit
def subtrahend(m):
    """A finite number near a maximum of scores."""
    return tl.minimum(tl.maximum(m, -MAX_FLOAT), MAX_FLOAT)


@kernel
def softmax_kernel(
    s: Pointer, p: Pointer, lse: RowTensor, residual: Pointer, block: ScoreBlock, params: Params,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, NUM_BLOCKS: tl.constexpr, PARTS: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Store probabilities of scores `[heads, rows, keys]` and `lse`. Parts are `[heads, rows, chunks, 3, CHUNK]`."""
    dropout = params.dropout
    NATURAL: tl.constexpr = params.scores.bias.data is not None or params.scores.score_mod is not None
    program = tl.program_id(0)
    row = score_row(block, params, program // block.num_rows, program % block.num_rows)
    m, l = tl.full([1], -INFINITY, tl.float32), tl.zeros([1], tl.float32)  # noqa: E741
    if params.scores.sinks is not None:  # a key without a value
        sink = tl.load(params.scores.sinks + row.head).to(tl.float32) + tl.zeros([1], tl.float32)
        sink = sink if NATURAL else sink * LOG2E
        m = sink if NATURAL else tl.ceil(sink)
        l = tl.where(m == -INFINITY, 0.0, tl.where(sink == m, 1.0, tl.exp2(sink - m)))  # noqa: E741
    for n in tl.static_range(NUM_BLOCKS):
        t = load_scores(s, block, params, row, n, ACCURATE, WIDTH)
        # As in `softmax`: the subtrahend is finite, whole in base 2, and NaN reaches the sum.
        top = tl.max(t, 1)
        row_max = tl.maximum(m, top if NATURAL else tl.ceil(top))
        p_i = tl.exp2(exponent(t, row_max[:, None], NATURAL))
        l = l * tl.exp2(exponent(subtrahend(m), row_max, NATURAL)) + tl.sum(p_i, 1)  # noqa: E741
        m = row_max
    divisor = tl.where(l == INFINITY, float("nan"), tl.where(l == 0, 1.0, l))
    of_row = tl.arange(0, 1)
    lse_row = head_pointer(lse, row.b, row.head, 1) + row.position
    l = tl.where(l == 0, 1.0, l)  # noqa: E741
    log_l = tl.log2(l)
    row_lse = m + log_l * LN2 if NATURAL else (m + log_l) * LN2
    tl.store(lse_row + of_row, row_lse)
    if residual is not None:
        of_head = head_pointer(RowTensor(residual, lse.stride_b, lse.stride_h), row.b, row.head, 1)
        tl.store(of_head + row.position + of_row, softmax.residual(m, l, row_lse))
    weight = 1.0 / divisor
    if dropout.threshold is not None:
        weight *= dropout.keep_scale
    for n in tl.static_range(NUM_BLOCKS):
        local = n * WIDTH + tl.arange(0, WIDTH)[None, :]
        if NUM_BLOCKS > 1:
            t = load_scores(s, block, params, row, n, ACCURATE, WIDTH)
            p_i = tl.exp2(exponent(t, m[:, None], NATURAL))
        if dropout.threshold is not None:
            first_key = block.first_key * UNIT + n * WIDTH
            p_i = tl.where(keep_mask(dropout, row.info.stream, row.rows, first_key, WIDTH), p_i, 0.0)
        p_i *= weight[:, None]
        if PARTS:
            at = row.at * (3 * elements(block.padded_keys, UNIT)) + local // CHUNK * (3 * CHUNK) + local % CHUNK
            store_parts(p + at, CHUNK, p_i, local < block.padded_keys * UNIT)
        else:
            at = row.at * elements(block.pitch, UNIT) + local
            tl.store(p + at, p_i, mask=local < block.pitch * UNIT)


@kernel
def gradient_kernel(
    s: Pointer, dp: Pointer, row_stats: RowTensor, p_t: Pointer, ds_t: Pointer, ds: Pointer, dslopes: RowTensor,
    block: ScoreBlock, padded_rows: Scalar, params: Params, ROW_CHUNK: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, NUM_BLOCKS: tl.constexpr, PARTS: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Store probabilities, of the pairs that dropout keeps and not scaled, and gradients of scores
    `[heads, rows, keys]`: in parts for sums over rows `p_t` and `ds_t`, `[heads, chunks, 3, ROW_CHUNK, keys]` with
    zeros past the last row, and `ds`, as `softmax_kernel` stores probabilities. Those that are `None` are left out.
    Without `PARTS` there are `p_t` and `ds`. `dslopes` are the rows' parts of the gradients of slopes.
    """
    at_head, row_in_block = tl.program_id(0) // padded_rows, tl.program_id(0) % padded_rows
    in_block = row_in_block < block.num_rows
    row = score_row(block, params, at_head, tl.minimum(row_in_block, block.num_rows - 1))
    NATURAL: tl.constexpr = params.scores.bias.data is not None or params.scores.score_mod is not None
    of_row = tl.arange(0, 1)
    row_exists = of_row < tl.where(in_block, 1, 0)
    stats_head = head_pointer(row_stats, row.b, row.head, 2)
    lse_i, delta_i, residual_i = load_row_stats(stats_head, row.position + of_row, row_exists, NATURAL)
    of_rows = residual_i[:, None] if NATURAL else 0.0
    dslope_i = tl.zeros([1], tl.float32)
    for n in tl.static_range(NUM_BLOCKS):
        local = n * WIDTH + tl.arange(0, WIDTH)[None, :]
        exists = local < tl.where(in_block, block.pitch * UNIT, 0)  # whole vectors
        key, at = block.first_key * UNIT + local, row.at * elements(block.pitch, UNIT) + local
        product = tl.load(s + at, mask=exists, other=0.0)
        dp_i = tl.load(dp + at, mask=exists, other=0.0)
        key_exists = key < params.lengths.total_k
        score = scores.forward(product, params, row.info, row.rows, key, key_exists, ACCURATE)
        shown = visible_keys(params, row, key, key_exists) & in_block
        p_i = probabilities(score.t, row.info.factor, lse_i[:, None], of_rows, NATURAL)
        p_kept = p_i
        if params.dropout.threshold is not None:
            first_key = block.first_key * UNIT + n * WIDTH
            keep = keep_mask(params.dropout, row.info.stream, row.rows, first_key, WIDTH)
            p_kept = tl.where(keep, p_i, 0.0)
            dp_i = tl.where(keep, dp_i * params.dropout.keep_scale, 0.0)
        ds_i = scores.unmodified(p_i * (dp_i - delta_i[:, None]), score, lse_i[:, None], params)
        if dslopes.data is not None:
            dslope_i -= tl.sum(tl.where(shown, ds_i, 0.0) * scores.distance(row.info, row.rows, key), 1)
        # Hidden scores may be NaN, and beyond the last key they are whatever was in memory.
        p_kept, ds_i = tl.where(shown, p_kept, 0.0), tl.where(shown, scores.backward(ds_i, score, params), 0.0)
        if not PARTS:
            tl.store(p_t + at, p_kept, mask=exists)
            tl.store(ds + at, ds_i, mask=exists)
        else:
            stored = local < block.pitch * UNIT
            chunk = at_head.to(tl.int64) * padded_rows + row_in_block // ROW_CHUNK * ROW_CHUNK
            to = (chunk * 3 + row_in_block % ROW_CHUNK) * elements(block.pitch, UNIT) + local
            step = ROW_CHUNK * elements(block.pitch, UNIT)
            if p_t is not None:
                store_parts(p_t + to, step, p_kept, stored)
            if ds_t is not None:
                store_parts(ds_t + to, step, ds_i, stored)
            if ds is not None:
                to = row.at * (3 * elements(block.padded_keys, UNIT)) + local // CHUNK * (3 * CHUNK) + local % CHUNK
                store_parts(ds + to, CHUNK, ds_i, local < tl.where(in_block, block.padded_keys * UNIT, 0))
    if dslopes.data is not None:
        tl.store(head_pointer(dslopes, row.b, row.head, 1) + row.position + of_row, dslope_i, mask=row_exists)


class FoldedRows(NamedTuple):
    """A tile of rows `position * group + head` of a key head, and where they lie in `[B, H, S, D]`."""

    at_head: tl.tensor  # of the key heads of a launch
    row: tl.tensor  # [M]
    exists: tl.tensor  # [M]
    pointers: tl.tensor  # [M]


@triton.jit
def folded_rows(x, first_head, first_row, num_rows, num_heads, group, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tile of a program. `num_heads` are the key heads of a sequence."""
    tiles = tl.cdiv(num_rows, BLOCK_M)
    tile, at_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head_k, row_of_head = first_head + at_head, first_row + row
    head, position = head_k % num_heads * group + row_of_head % group, row_of_head // group
    of_head = head_pointer(x, (head_k // num_heads).to(tl.int64), head, ALIGN)
    return FoldedRows(at_head, row, row < num_rows, of_head + position * elements(x.stride_m, ALIGN))


@kernel
def fold_kernel(
    rows: QueryTensor, operand: Pointer, num_rows: Scalar, num_heads: Scalar, group: Scalar, WIDTH: tl.constexpr,
    D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store `rows [B, H, S, D]` as an operand `[heads, S * group, D]`. `WIDTH` is a power of two."""
    tile = folded_rows(rows, 0, 0, num_rows, num_heads, group, ALIGN, BLOCK_M)
    d = tl.arange(0, WIDTH)[None, :]
    exists = tile.exists[:, None] & (d < D)
    to = operand + (tile.at_head.to(tl.int64) * num_rows + tile.row)[:, None] * D + d
    tl.store(to, tl.load(tile.pointers[:, None] + d, mask=exists, other=0.0), mask=exists)


@kernel
def store_kernel(
    sums: Pointer, rows: QueryTensor, first_head: Scalar, first_row: Scalar, num_rows: Scalar,
    num_heads: Scalar, group: Scalar, WIDTH: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store sums `[heads, num_rows, D]` of a block in `rows [B, H, S, D]`, the inverse of `fold_kernel`."""
    tile = folded_rows(rows, first_head, first_row, num_rows, num_heads, group, ALIGN, BLOCK_M)
    at = tile.at_head.to(tl.int64) * num_rows + tile.row
    d = tl.arange(0, WIDTH)[None, :]
    exists = tile.exists[:, None] & (d < D)
    x = tl.load(sums + at[:, None] * D + d, mask=exists, other=0.0)
    tl.store(tile.pointers[:, None] + d, x, mask=exists)
