"""Loads and stores of tiles of rows.

A row of any width is held in one or two chunks whose widths are powers of two (96 = 64 + 32, 192 = 128 + 64), because
Triton's tensors must be. Memory needs no padding.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .split import Split


class Chunks(NamedTuple):
    """Rows of one tile: `[N, D]` as `a` and `b`; `b` is the number 0 without a second chunk."""

    a: tl.tensor
    b: tl.tensor


class HeadRows(NamedTuple):
    """The rows of one sequence and head in memory."""

    data: tl.tensor  # pointer to position 0
    stride: tl.tensor  # elements from row to row, int64


class RowTile(NamedTuple):
    """A tile of rows of one head that a program owns, where sequences are not told apart."""

    b: tl.tensor  # int64; 0 for packed tokens
    head: tl.tensor
    row: tl.tensor  # [M]
    exists: tl.tensor


@triton.jit
def row_tile(num_tiles, num_heads, rows, BLOCK_M: tl.constexpr):
    """The tile of a program, of `num_tiles` for each head."""
    program = tl.program_id(0)
    tile, head = program % num_tiles, program // num_tiles % num_heads
    b = (program // num_tiles // num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return RowTile(b, head, row, row < rows)


@triton.jit
def elements(stride, ALIGN: tl.constexpr):
    """A stride in elements, from units of ALIGN elements: offsets are 64-bit, and the compiler sees their alignment."""
    return stride.to(tl.int64) * ALIGN


@triton.jit
def head_pointer(x, b, head, ALIGN: tl.constexpr):
    """Pointer to a head of a sequence, for a tensor with `stride_b` and `stride_h`."""
    return x.data + b * elements(x.stride_b, ALIGN) + head * elements(x.stride_h, ALIGN)


@triton.jit
def row_pointers(x, first, N: tl.constexpr, AXIS: tl.constexpr = 1):
    """Pointers `[N, 1]`, or `[1, N]` for AXIS 0, to the rows from position `first` on: a scalar that moves and offsets
    that do not.
    """
    return (x.data + first * x.stride) + tl.expand_dims(tl.arange(0, N), AXIS) * x.stride


@triton.jit
def load_chunk(pointers, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Load features `FIRST` to `FIRST + WIDTH` of rows `[N, 1]`; 0 past `D` and for rows that do not exist."""
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    if FIRST + WIDTH > D:
        if exists is None:
            return tl.load(pointers + d, mask=d < D, other=0.0)
        else:
            return tl.load(pointers + d, mask=exists[:, None] & (d < D), other=0.0)
    elif exists is None:
        return tl.load(pointers + d)
    else:
        return tl.load(pointers + d, mask=exists[:, None], other=0.0)


@triton.jit
def load_rows(pointers, exists, D: tl.constexpr):
    """Load rows `[N, D]`; `exists [N]` is `None` where every row does. Pairs of features are in one chunk, and those of
    8 bits each are one number of 16.
    """
    if D.PAIRS:
        if pointers.dtype.element_ty.primitive_bitwidth == 8:
            words = pointers.to(tl.pointer_type(tl.uint16), bitcast=True)
            return Chunks(load_chunk(words, exists, 0, D.CHUNK_0, D.WIDTH // 2), 0.0)
        else:
            return Chunks(load_chunk(pointers, exists, 0, 2 * D.CHUNK_0, D.WIDTH), 0.0)
    elif D.SPLIT:
        if D.CHUNK_1 == 0:
            return Chunks(load_split(pointers, exists, 0, D.CHUNK_0, D), 0.0)
        else:
            return Chunks(
                load_split(pointers, exists, 0, D.CHUNK_0, D),
                load_split(pointers, exists, D.CHUNK_0, D.CHUNK_1, D),
            )
    elif D.CHUNK_1 == 0:
        return Chunks(load_chunk(pointers, exists, 0, D.CHUNK_0, D.WIDTH), 0.0)
    else:
        return Chunks(
            load_chunk(pointers, exists, 0, D.CHUNK_0, D.WIDTH),
            load_chunk(pointers, exists, D.CHUNK_0, D.CHUNK_1, D.WIDTH),
        )


@triton.jit
def chunked(x, D: tl.constexpr):
    """Rows as one chunk, or as the chunks of `D`."""
    if D.PAIRS:
        a, b = tl.split(x.a.reshape([x.a.shape[0], D.CHUNK_0, 2]))
        return Chunks(a, b)
    else:
        return x


@triton.jit
def interleaved(x, D: tl.constexpr):
    """The chunks of `D` as rows are in memory."""
    if D.PAIRS:
        return Chunks(tl.join(x.a, x.b).reshape([x.a.shape[0], 2 * D.CHUNK_0]), 0.0)
    else:
        return x


@triton.jit
def load_columns(pointers, exists, D: tl.constexpr):
    """Load rows as columns `[D, N]`, from pointers `[1, N]`; as `load_rows`."""
    if D.PAIRS:
        words = pointers.to(tl.pointer_type(tl.uint16), bitcast=True)
        return Chunks(load_column_chunk(words, exists, 0, D.CHUNK_0, D.WIDTH // 2), 0.0)
    elif D.CHUNK_1 == 0:
        return Chunks(load_column_chunk(pointers, exists, 0, D.CHUNK_0, D.WIDTH), 0.0)
    else:
        a = load_column_chunk(pointers, exists, 0, D.CHUNK_0, D.WIDTH)
        return Chunks(a, load_column_chunk(pointers, exists, D.CHUNK_0, D.CHUNK_1, D.WIDTH))


@triton.jit
def load_column_chunk(pointers, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)[:, None]
    mask = exists[None, :] & (d < D) if FIRST + WIDTH > D else exists[None, :]
    return tl.load(pointers + d, mask=mask, other=0.0)


@triton.jit
def load_split(pointers, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Load a chunk of rows that `split_kernel` has stored: no row has features past its last chunk."""
    W: tl.constexpr = D.CHUNK_0 + D.CHUNK_1
    return Split(
        load_chunk(pointers, exists, FIRST, WIDTH, W),
        load_chunk(pointers + W, exists, FIRST, WIDTH, W),
        load_chunk(pointers + 2 * W, exists, FIRST, WIDTH, W),
    )


@triton.jit
def store_chunk(pointers, x, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers + d, x.to(pointers.dtype.element_ty), mask=exists[:, None] & (d < D))


@triton.jit
def store_rows(pointers, x, exists, D: tl.constexpr):
    """Store those rows `[N, D]` that exist; pairs of features are in one chunk."""
    FIRST: tl.constexpr = D.CHUNK_0 + D.CHUNK_1 if D.PAIRS else D.CHUNK_0
    store_chunk(pointers, x.a, exists, 0, FIRST, D.WIDTH)
    if D.CHUNK_1 > 0 and not D.PAIRS:
        store_chunk(pointers, x.b, exists, D.CHUNK_0, D.CHUNK_1, D.WIDTH)


@triton.jit
def load_row_stats(first, row, exists, NATURAL: tl.constexpr):
    """Load lse (base 2) and delta of each row, fp32 `[M]`; of natural scores, lse as it is and its residual in base 2.

    The pair is loaded as one int64: in the layout that a tile wants, each thread loads many of them. Rows that do not
    exist get an infinite lse, which makes their probabilities 0; `exists` is `None` where every row does.
    """
    pointers = first + (2 * row if NATURAL else row)
    pair = tl.load(pointers) if exists is None else tl.load(pointers, mask=exists, other=0x7F800000)
    low, high = (pair & 0xFFFFFFFF).to(tl.int32), (pair >> 32).to(tl.int32)
    lse, delta = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    if NATURAL:
        rest = tl.load(pointers + 1) if exists is None else tl.load(pointers + 1, mask=exists, other=0)
        return lse, delta, (rest & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return lse, delta, 0.0


@triton.jit
def probabilities(t, factor, lse, residual, NATURAL: tl.constexpr):
    """`exp(t - lse)` of scores, from the statistics of their rows, which broadcast to them."""
    if NATURAL:
        return tl.exp2((t - lse) * factor - residual)
    else:
        return tl.exp2(t * factor - lse)
