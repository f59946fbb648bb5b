"""A thread's own memory: the tables of its rows, turned queries and outputs, a block of scores, keys and values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from .kernels.operands import BYTE, INT, LONG, SIZES, Pointer

BLOCK = 96  # keys at a time: their scores stay in the first-level cache
DROPOUT_KEYS = 8  # keys that share a random counter; a block may begin and end inside such a group
LINE = 64


Pieces = Iterator[tuple[str, Any, ir.Type]]


def tables(real: ir.Type, rows: int, panels: Any) -> Pieces:
    """One entry for each row of each panel (`tiles.fill_rows`)."""
    for name in ("q_at", "out_at", "lse_at", "bias_at", "mask_at"):
        yield name, panels * rows, LONG
    for name in ("low", "high", "place", "position", "sequence_head"):
        yield name, panels * rows, INT
    yield "slope", panels * rows, real
    yield "bounds", panels * 4, LONG


def block(real: ir.Type, rows: int, head_dim: Any, head_dim_v: Any) -> Pieces:
    """What belongs to one block of keys."""
    yield "new_m", rows, real
    yield "alpha", rows, real
    yield "before_scores", DROPOUT_KEYS * rows, real
    yield "scores", (BLOCK + DROPOUT_KEYS) * rows, real  # [keys, rows]
    yield "bias", BLOCK * rows, real
    yield "mask", BLOCK * rows, real
    yield "k", head_dim * BLOCK, real  # [keys, D]
    yield "v", head_dim_v * BLOCK, real


def forward_pieces(real: ir.Type, rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Pieces:
    """Name, number of elements and their type; the numbers are ints, or values in a program."""
    yield from tables(real, rows, panels)
    yield from block(real, rows, head_dim, head_dim_v)
    yield "m", panels * rows, real
    yield "l", panels * rows, real
    yield "q", panels * head_dim * rows, real  # [panels, D, rows]
    yield "out", panels * head_dim_v * rows, real  # [panels, Dv, rows]
    yield "total_m", panels * rows, real  # the maximum that totals are relative to
    yield "total_l", panels * rows, real
    yield "total_out", panels * head_dim_v * rows, real


def backward_pieces(real: ir.Type, rows: int, lanes: int, head_dim: Any, head_dim_v: Any, total_keys: Any) -> Pieces:
    """As above; `total_keys` is the number of keys that have totals of dk and dv."""
    yield from tables(real, rows, 1)
    yield from block(real, rows, head_dim, head_dim_v)
    for name in ("lse", "delta", "dslope", "total_dslope"):
        yield name, rows, real
    yield "dq_at", rows, LONG
    yield "q", head_dim * rows, real  # [D, rows]
    yield "dq", head_dim * rows, real
    yield "total_dq", head_dim * rows, real
    yield "dout", head_dim_v * rows, real  # [Dv, rows]
    yield "q_rows", whole(head_dim, lanes) * rows, real  # [rows, D], rounded up to whole vectors
    yield "dout_rows", whole(head_dim_v, lanes) * rows, real
    yield "dscores", BLOCK * rows, real  # [keys, rows]
    yield "dbias", BLOCK * rows, real
    yield "before_keep", DROPOUT_KEYS * rows, real
    yield "keep", (BLOCK + DROPOUT_KEYS) * rows, real
    yield "total_dk", total_keys * whole(head_dim, lanes), real
    yield "total_dv", total_keys * whole(head_dim_v, lanes), real


def whole(n: Any, step: int) -> Any:
    """`n` rounded up to a multiple."""
    return (n + (step - 1)) // step * step


@functools.lru_cache(maxsize=1024)
def size(pieces: Callable[..., Pieces], *given: Any) -> int:
    """Bytes of one thread's memory, of `pieces(*given)`."""
    return sum(whole(count * SIZES[kind], LINE) for _, count, kind in pieces(*given))


class Workspace:
    """The pieces as a generator sees them, by name."""

    def __init__(self, base: Pointer, pieces: Pieces):
        self._pieces: dict[str, Pointer] = {}
        for name, count, kind in pieces:
            self._pieces[name] = base.of(kind)
            base = base.of(BYTE) + whole(count * SIZES[kind], LINE)

    def __getattr__(self, name: str) -> Pointer:
        return self._pieces[name]
