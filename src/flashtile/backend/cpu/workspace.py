"""Layout of a thread's workspace: row tables, transposed queries and outputs, a block of scores, keys and values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ...call.call import HEAD_TERMS

BLOCK_N = 96  # keys of a block: its scores stay in the first-level cache
BLOCK_PARTS = 3  # parts of a block; mask functions hide the first and last ones
DROPOUT_KEYS = 8  # keys that share a random counter; a block may begin and end inside such a group
CACHE_LINE = 64  # bytes
TILE_ROWS = 16  # rows of a matrix tile
TILE_DEPTH = 32  # bfloat16 numbers in a row of it
ROWS_PER_CARRY = 1024  # query rows in a recent sum (`kernels.sums`)
MAX_PLAIN_TERMS = 96  # terms of a sum that needs no total
LONG, INT, REAL = "long", "int", "real"  # kinds of elements: 64 and 32 bits, and the dtype of accumulation

Layout = Iterator[tuple[str, Any, str]]
MOST_BUFFERS = 64
TASK_FIELDS = 12


def beginning() -> Layout:
    """The addresses of all buffers, and the task at hand (`tiles.Task`)."""
    yield "addresses", MOST_BUFFERS, LONG
    yield "task", TASK_FIELDS, LONG


def row_tables(rows: int, panels: Any) -> Layout:
    """Tables with one entry for each row of each panel (`tiles.fill_row_tables`)."""
    for name in ("q_offsets", "out_offsets", "lse_offsets", "bias_offsets", "mask_offsets"):
        yield name, panels * rows, LONG
    for name in ("low", "high", "diagonal_key", "position", "head", "sequence_head"):
        yield name, panels * rows, INT
    for symbol in HEAD_TERMS:
        yield symbol, panels * rows, REAL
    yield "bounds", panels * 4, LONG


def key_block(rows: int, head_dim: Any, head_dim_v: Any) -> Layout:
    """Buffers for one block of keys. Dropout writes whole groups of keys, hence the rows before and after `scores`."""
    yield "new_m", rows, REAL
    yield "alpha", rows, REAL
    yield "scores_front", DROPOUT_KEYS * rows, REAL
    yield "scores", (BLOCK_N + DROPOUT_KEYS) * rows, REAL  # [keys, rows]
    yield "bias", BLOCK_N * rows, REAL
    yield "mask", BLOCK_N * rows, REAL
    yield "k", head_dim * BLOCK_N, REAL  # [keys, D]
    yield "v", head_dim_v * BLOCK_N, REAL


def forward_layout(rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Layout:
    """Name, number of elements and their kind of each buffer. Numbers are ints on the host, `Value`s in a kernel."""
    yield from beginning()
    yield from row_tables(rows, panels)
    yield from key_block(rows, head_dim, head_dim_v)
    yield "m", panels * rows, REAL
    yield "l", panels * rows, REAL
    yield "q", panels * head_dim * rows, REAL  # [panels, D, rows]
    yield "out", panels * head_dim_v * rows, REAL  # [panels, Dv, rows]
    yield "total_m", panels * rows, REAL  # the maximum that totals are relative to
    yield "total_l", panels * rows, REAL
    yield "total_out", panels * head_dim_v * rows, REAL
    for name in ("k_scales", "v_scales"):  # for a block of keys of 8 bits
        yield name, BLOCK_N + CACHE_LINE, REAL  # whole vectors


def tile_layout(rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Layout:
    """The same for products of matrix tiles: q, k and v have bfloat16 numbers in place of reals, padded to tiles."""
    depth, width = round_up(head_dim, TILE_DEPTH), round_up(head_dim_v, TILE_DEPTH)
    yield from forward_layout(rows, panels, depth, width)
    yield "p", BLOCK_N * rows // 2, INT  # pairs of keys
    yield "product", 4 * TILE_ROWS * TILE_ROWS, REAL
    yield "copied", TILE_DEPTH * (depth + width) // 2, INT  # keys before they are packed


def tangent_layout(rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Layout:
    """The same for forward mode: what forward has, and the tangents of all that a pair, a row or a key has."""
    yield from forward_layout(rows, panels, head_dim, head_dim_v)
    for name in ("dq_offsets", "dbias_offsets"):
        yield name, panels * rows, LONG
    for symbol in HEAD_TERMS:
        yield f"d{symbol}", panels * rows, REAL
    yield "ones", rows, REAL  # in place of `alpha`
    yield "dscores_front", DROPOUT_KEYS * rows, REAL
    yield "dscores", (BLOCK_N + DROPOUT_KEYS) * rows, REAL  # [keys, rows]; then p times that
    yield "dbias", BLOCK_N * rows, REAL
    yield "dk", head_dim * BLOCK_N, REAL
    yield "dv", head_dim_v * BLOCK_N, REAL
    yield "dl", panels * rows, REAL
    yield "dq", panels * head_dim * rows, REAL
    yield "dout", panels * head_dim_v * rows, REAL
    yield "total_dl", panels * rows, REAL
    yield "total_dout", panels * head_dim_v * rows, REAL


def backward_layout(rows: int, lanes: int, head_dim: Any, head_dim_v: Any, total_keys: Any) -> Layout:
    """The same for backward. `total_keys` is the number of keys that have totals of dk and dv; 0 for few rows."""
    yield from beginning()
    yield "touched", 2, LONG  # keys (`dkdv.Touched`)
    yield from row_tables(rows, 1)
    yield from key_block(rows, head_dim, head_dim_v)
    for name in ("lse", "residual", "delta", "dslope", "total_dslope"):
        yield name, rows, REAL
    yield "dq_offsets", rows, LONG
    yield "q", head_dim * rows, REAL  # [D, rows]
    yield "dq", head_dim * rows, REAL
    yield "total_dq", head_dim * rows, REAL
    yield "dout", head_dim_v * rows, REAL  # [Dv, rows]
    yield "q_rows", round_up(head_dim, lanes) * rows, REAL  # [rows, D], rounded up to whole vectors
    yield "dout_rows", round_up(head_dim_v, lanes) * rows, REAL
    yield "dscores", BLOCK_N * rows, REAL  # [keys, rows]
    yield "dbias", BLOCK_N * rows, REAL
    yield "keep_front", DROPOUT_KEYS * rows, REAL
    yield "keep", (BLOCK_N + DROPOUT_KEYS) * rows, REAL
    yield "total_dk", total_keys * round_up(head_dim, lanes), REAL
    yield "total_dv", total_keys * round_up(head_dim_v, lanes), REAL


def second_layout(rows: int, lanes: int, head_dim: Any, head_dim_v: Any, total_keys: Any) -> Layout:
    """The same for second derivatives: what backward has, and directions."""
    yield from backward_layout(rows, lanes, head_dim, head_dim_v, total_keys)
    for name in ("tlse", "product"):
        yield name, rows, REAL
    yield "tq", head_dim * rows, REAL  # [D, rows]
    yield "tq_rows", round_up(head_dim, lanes) * rows, REAL
    for name in ("tscores", "uscores"):  # [keys, rows]
        yield name, BLOCK_N * rows, REAL
    yield "tk", head_dim * BLOCK_N, REAL
    yield "tv", head_dim_v * BLOCK_N, REAL


def round_up(n: Any, step: int) -> Any:
    """`n` rounded up to a multiple of `step`."""
    return (n + (step - 1)) // step * step


@functools.lru_cache(maxsize=1024)
def num_bytes(layout: Callable[..., Layout], real_bytes: int, *sizes: Any) -> int:
    """The size of one thread's workspace, `layout(*sizes)`."""
    widths = {LONG: 8, INT: 4, REAL: real_bytes}
    return sum(round_up(count * widths[kind], CACHE_LINE) for _, count, kind in layout(*sizes))
