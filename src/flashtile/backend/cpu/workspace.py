"""Layout of a thread's workspace: row tables, transposed queries and outputs, a block of scores, keys and values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from ...call.call import HEAD_TERMS
from .kernels.operands import ADDRESS, BYTE, INT, LONG, SIZES, Pointer

BLOCK_N = 96  # keys of a block: its scores stay in the first-level cache
BLOCK_PARTS = 3  # parts of a block; mask functions hide the first and last ones
DROPOUT_KEYS = 8  # keys that share a random counter; a block may begin and end inside such a group
CACHE_LINE = 64  # bytes
TILE_ROWS = 16  # rows of a matrix tile
TILE_DEPTH = 32  # bfloat16 numbers in a row of it


Layout = Iterator[tuple[str, Any, ir.Type]]
MOST_BUFFERS = 64
TASK_FIELDS = 12


def beginning() -> Layout:
    """The addresses of all buffers, and the task at hand (`tiles.Task`)."""
    yield "addresses", MOST_BUFFERS, LONG
    yield "task", TASK_FIELDS, LONG


def row_tables(real_type: ir.Type, rows: int, panels: Any) -> Layout:
    """Tables with one entry for each row of each panel (`tiles.fill_row_tables`)."""
    for name in ("q_offsets", "out_offsets", "lse_offsets", "bias_offsets", "mask_offsets"):
        yield name, panels * rows, LONG
    for name in ("low", "high", "diagonal_key", "position", "head", "sequence_head"):
        yield name, panels * rows, INT
    for symbol in HEAD_TERMS:
        yield symbol, panels * rows, real_type
    yield "bounds", panels * 4, LONG


def key_block(real_type: ir.Type, rows: int, head_dim: Any, head_dim_v: Any) -> Layout:
    """Buffers for one block of keys. Dropout writes whole groups of keys, hence the rows before and after `scores`."""
    yield "new_m", rows, real_type
    yield "alpha", rows, real_type
    yield "scores_front", DROPOUT_KEYS * rows, real_type
    yield "scores", (BLOCK_N + DROPOUT_KEYS) * rows, real_type  # [keys, rows]
    yield "bias", BLOCK_N * rows, real_type
    yield "mask", BLOCK_N * rows, real_type
    yield "k", head_dim * BLOCK_N, real_type  # [keys, D]
    yield "v", head_dim_v * BLOCK_N, real_type


def forward_layout(real_type: ir.Type, rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Layout:
    """Name, number of elements and element type of each buffer. Numbers are ints on the host, `Value`s in a kernel."""
    yield from beginning()
    yield from row_tables(real_type, rows, panels)
    yield from key_block(real_type, rows, head_dim, head_dim_v)
    yield "m", panels * rows, real_type
    yield "l", panels * rows, real_type
    yield "q", panels * head_dim * rows, real_type  # [panels, D, rows]
    yield "out", panels * head_dim_v * rows, real_type  # [panels, Dv, rows]
    yield "total_m", panels * rows, real_type  # the maximum that totals are relative to
    yield "total_l", panels * rows, real_type
    yield "total_out", panels * head_dim_v * rows, real_type


def tile_layout(real_type: ir.Type, rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Layout:
    """The same for products of matrix tiles: q, k and v have bfloat16 numbers in place of reals, padded to tiles."""
    depth, width = round_up(head_dim, TILE_DEPTH), round_up(head_dim_v, TILE_DEPTH)
    yield from forward_layout(real_type, rows, panels, depth, width)
    yield "p", BLOCK_N * rows // 2, INT  # pairs of keys
    yield "product", 4 * TILE_ROWS * TILE_ROWS, real_type
    yield "copied", TILE_DEPTH * (depth + width) // 2, INT  # keys before they are packed


def backward_layout(
    real_type: ir.Type, rows: int, lanes: int, head_dim: Any, head_dim_v: Any, total_keys: Any
) -> Layout:
    """The same for backward. `total_keys` is the number of keys that have totals of dk and dv; 0 for few rows."""
    yield from beginning()
    yield "touched", 2, LONG  # keys (`dkdv.Touched`)
    yield from row_tables(real_type, rows, 1)
    yield from key_block(real_type, rows, head_dim, head_dim_v)
    for name in ("lse", "residual", "delta", "dslope", "total_dslope"):
        yield name, rows, real_type
    yield "dq_offsets", rows, LONG
    yield "q", head_dim * rows, real_type  # [D, rows]
    yield "dq", head_dim * rows, real_type
    yield "total_dq", head_dim * rows, real_type
    yield "dout", head_dim_v * rows, real_type  # [Dv, rows]
    yield "q_rows", round_up(head_dim, lanes) * rows, real_type  # [rows, D], rounded up to whole vectors
    yield "dout_rows", round_up(head_dim_v, lanes) * rows, real_type
    yield "dscores", BLOCK_N * rows, real_type  # [keys, rows]
    yield "dbias", BLOCK_N * rows, real_type
    yield "keep_front", DROPOUT_KEYS * rows, real_type
    yield "keep", (BLOCK_N + DROPOUT_KEYS) * rows, real_type
    yield "total_dk", total_keys * round_up(head_dim, lanes), real_type
    yield "total_dv", total_keys * round_up(head_dim_v, lanes), real_type


def round_up(n: Any, step: int) -> Any:
    """`n` rounded up to a multiple of `step`."""
    return (n + (step - 1)) // step * step


@functools.lru_cache(maxsize=1024)
def num_bytes(layout: Callable[..., Layout], *sizes: Any) -> int:
    """The size of one thread's workspace, `layout(*sizes)`."""
    return sum(round_up(count * SIZES[kind], CACHE_LINE) for _, count, kind in layout(*sizes))


class Workspace:
    """A thread's workspace in generated code; attributes are pointers to its buffers, loaded at a function's start. It
    begins with their addresses (`write_addresses`), so that its own address is all that a function needs.
    """

    def __init__(self, base: Pointer, layout: Layout):
        self._base = base.cast(LONG)
        self._kinds = {name: kind for name, _, kind in layout}
        self._numbers = {name: n for n, name in enumerate(self._kinds)}
        self._buffers: dict[str, Pointer] = {}

    def __getattr__(self, name: str) -> Pointer:
        if name not in self._buffers:
            code = self._base.code
            with code.function_start():
                address = (self._base + self._numbers[name]).load(ADDRESS)
            self._buffers[name] = code.pointer(address, self._kinds[name])
        return self._buffers[name]


def write_addresses(base: Pointer, layout: Layout) -> None:
    """Write the addresses of a workspace's buffers to its beginning, once in each thread."""
    code, at = base.code, base.cast(BYTE)
    for n, (_, count, kind) in enumerate(layout):
        assert n < MOST_BUFFERS
        code.ir.store(at.ir, (base.cast(LONG) + n).ir, align=SIZES[LONG])
        at = at + round_up(count * SIZES[kind], CACHE_LINE)
