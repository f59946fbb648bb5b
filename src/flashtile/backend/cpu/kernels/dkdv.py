"""Sums of dk and dv over query rows, in place in the result; totals of many rows are in the workspace (`sums`)."""

from collections.abc import Iterator

from ..workspace import round_up
from .buffers import Workspace
from .codegen import Code
from .fields import Arguments
from .kernel import Kernel
from .operands import LONG, Pointer, Value
from .products import accumulate
from .sums import carry
from .tiles import Task, num_valid_rows

VectorLoop = Iterator[tuple[Pointer, Pointer, Value]]


def accumulate_key_gradient(
    kernel: Kernel, name: str, first: Value, count: Value, p: Pointer, x: Pointer, width: Value
) -> None:
    """Add a block's part of dk or dv, `p^T @ x`, to its keys' rows, which are whole vectors."""
    code, a, w, panel = kernel.code, kernel.a, kernel.w, kernel.panel
    with code.if_then(a.pointer(name).is_null().equals(0)):
        at, step = key_gradient_row(a, kernel.task, name, first), a.integer(f"{name}_s")
        num_rows, from_row = num_valid_rows(code, panel, kernel.task, code.index(0)), code.variable(code.index(0))

        def first_row(j: Value) -> Value:
            """The first row that sees key `j`. Later rows see at least as far, so the search goes on from there."""
            with code.loop_forever() as done:
                row = from_row.get()
                sees = code.convert(w.high[row], LONG) >= first + j
                code.break_if(sees | row.equals(num_rows - 1), done)
                from_row.set(row + 1)
            return from_row.get()

        accumulate(code, panel, p, count, x, round_up(width, code.lanes), at, step, first_row, num_rows)


def key_gradient_row(a: Arguments, task: Task, name: str, key: Value) -> Pointer:
    """The row of dk or dv of a sequence's key."""
    step, head = a.integer(f"{name}_s"), task.b * a.integer(f"{name}_b") + task.kv_head * a.integer(f"{name}_h")
    return a.pointer(name) + (head + (task.k_first + key) * step)


class Touched:
    """The keys whose recent sums have changed since the last carry, from `lo` to `hi`, exclusive."""

    def __init__(self, kernel: Kernel):
        self.code, self.task, self.keys = kernel.code, kernel.task, kernel.w.touched

    @property
    def lo(self) -> Value:
        return self.keys[0]

    @property
    def hi(self) -> Value:
        return self.keys[1]

    def add(self, first: Value, last: Value) -> None:
        self.keys[0] = self.code.minimum(self.lo, first)
        self.keys[1] = self.code.maximum(self.hi, last)

    def clear(self) -> None:
        task = self.task
        self.keys[0] = self.code.maximum(task.last_key + 1, task.first_key)  # a last split may be empty
        self.keys[1] = task.first_key


def key_gradient_vectors(
    code: Code, a: Arguments, task: Task, w: Workspace, touched: Touched | None = None
) -> VectorLoop:
    """Loop over the vectors of a task's dk and dv, if requested: pointers to recent sums and totals, and the index.
    Those of all keys, or of touched ones alone.
    """
    start = code.index(0) if touched is None else touched.lo - task.first_key
    stop = task.last_key + 1 if touched is None else touched.hi
    for name, width in (("dk", "head_dim"), ("dv", "head_dim_v")):
        step, padded = a.integer(f"{name}_s"), round_up(a.integer(width), code.lanes)
        with code.if_then(a.pointer(name).is_null().equals(0)):
            recent, total = key_gradient_row(a, task, name, task.first_key), getattr(w, f"total_{name}")
            with code.loop(start, stop - task.first_key) as j, code.loop(0, padded, code.lanes) as d:
                yield recent + j * step, total + j * padded, d


def clear_key_gradients(code: Code, a: Arguments, task: Task, w: Workspace, many_rows: Value) -> None:
    """Zero the sums of a task; the host allocates dense dk and dv uninitialized."""
    for recent, total, d in key_gradient_vectors(code, a, task, w):
        recent.store(code.full(), d)
        with code.if_then(many_rows):
            total.store(code.full(), d)


def carry_key_gradients(
    code: Code, a: Arguments, task: Task, w: Workspace, last: bool, touched: Touched | None = None
) -> None:
    for recent, total, d in key_gradient_vectors(code, a, task, w, touched):
        carry(code, recent, total, d, last)
    if touched is not None:
        touched.clear()
