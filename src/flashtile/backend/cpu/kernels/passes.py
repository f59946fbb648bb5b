"""What forward and backward have in common: tasks, a thread's memory, and the parts of masks and biases for a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..variant import Arguments, Variant
from ..workspace import Workspace
from .codegen import Code
from .formats import STORED
from .masking import mask_shows_any
from .operands import BYTE, Pointer, Value
from .products import Panel
from .scores import Tables
from .tiles import Task, turn_in

COUNTERS_APART = 64  # bytes: tasks and threads are counted on cache lines of their own


def own_memory(code: Code, a: Arguments) -> Pointer:
    """This thread's part of the workspace."""
    thread = code.next_of(a.pointer("counter", BYTE) + COUNTERS_APART)
    return a.pointer("workspace", BYTE) + thread * a.number("work_size")


@contextmanager
def tasks(code: Code, a: Arguments) -> Iterator[Value]:
    """Take tasks, by number, until none is left."""
    with code.forever() as done:
        number = code.next_of(a.pointer("counter"))
        code.leave_if(number >= a.number("tasks"), done)
        yield number


def store_rows(code: Code, source: Pointer, to: Pointer, rows_at: Pointer, rows: Value) -> None:
    """One number of each row."""
    with code.loop(0, rows) as r:
        to[rows_at[r]] = source[r]


class Pass:
    """A task's emission: what it is given and where it keeps things."""

    def __init__(self, code: Code, a: Arguments, variant: Variant, panel: Panel, w: Workspace, task: Task):
        self.code, self.a, self.variant, self.panel, self.w, self.task = code, a, variant, panel, w, task

    def load_pairs(self, p: Value, first: Value, count: Value) -> Value:
        """Turn in the block's part of bias and mask; whether the mask shows any of it."""
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        for name, dtype in (("mask", "bool" if variant.mask else None), ("bias", variant.bias)):
            if dtype is None:
                continue
            step, table = a.number(f"{name}_j"), getattr(w, f"{name}_at") + p * panel.rows
            at = a.pointer(name, STORED[dtype]) + first * step
            turn_in(code, panel, at, table, count, step, dtype, getattr(w, name), code.number(1))
        return mask_shows_any(code, panel, w.mask, count) if variant.mask else code.whole(0).equals(0)

    def score_tables(self, p: Value) -> Tables:
        rows = p * self.panel.rows
        return Tables(self.w.bias, self.w.place + rows, self.w.slope + rows)
