"""A thread's own memory: the tables of its rows, turned queries and outputs, a block of scores, keys and values."""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from .codegen import BYTE, INT, LONG, SIZES, Code, Pointer, Value

BLOCK = 96  # keys at a time: their scores stay in the first-level cache
DROPOUT_KEYS = 8  # keys that share a random counter; a block may begin and end inside such a group
LINE = 64


def pieces(real: ir.Type, rows: int, panels: Any, head_dim: Any, head_dim_v: Any) -> Iterator[tuple[str, Any, ir.Type]]:
    """Name, number of elements and their type; the numbers are ints, or values in a program."""
    for name in ("q_at", "out_at", "lse_at", "bias_at", "mask_at"):
        yield name, panels * rows, LONG
    for name in ("low", "high", "place", "position", "sequence_head"):
        yield name, panels * rows, INT
    for name in ("slope", "m", "l"):
        yield name, panels * rows, real
    yield "bounds", panels * 4, LONG
    yield "q", panels * head_dim * rows, real  # [panels, D, rows]
    yield "out", panels * head_dim_v * rows, real  # [panels, Dv, rows]
    yield "new_m", rows, real
    yield "alpha", rows, real
    yield "before_scores", DROPOUT_KEYS * rows, real
    yield "scores", (BLOCK + DROPOUT_KEYS) * rows, real  # [keys, rows]
    yield "bias", BLOCK * rows, real
    yield "mask", BLOCK * rows, real
    yield "k", head_dim * BLOCK, real  # [keys, D]
    yield "v", head_dim_v * BLOCK, real


def whole_lines(count: Any, kind: ir.Type) -> Any:
    return (count * SIZES[kind] + (LINE - 1)) // LINE * LINE


def size(real: ir.Type, rows: int, panels: int, head_dim: int, head_dim_v: int) -> int:
    """Bytes of one thread's memory."""
    return sum(whole_lines(count, kind) for _, count, kind in pieces(real, rows, panels, head_dim, head_dim_v))


class Workspace:
    """The pieces as a generator sees them, by name; those of a panel begin at `panel * rows` of each table."""

    def __init__(self, code: Code, base: Pointer, rows: int, panels: Value, head_dim: Value, head_dim_v: Value):
        self._pieces: dict[str, Pointer] = {}
        for name, count, kind in pieces(code.real, rows, panels, head_dim, head_dim_v):
            self._pieces[name] = base.of(kind)
            base = base.of(BYTE) + whole_lines(count, kind)

    def __getattr__(self, name: str) -> Pointer:
        return self._pieces[name]
