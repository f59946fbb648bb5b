"""Code that the forward and backward kernels share: the task loop, a thread's workspace, mask and bias of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..variant import Arguments, Variant
from ..workspace import Workspace
from .codegen import Code
from .formats import STORAGE_TYPES
from .masking import mask_has_visible
from .operands import BYTE, Pointer, Value
from .products import Panel
from .scores import ScoreTables
from .tiles import Task, load_transposed

COUNTER_STRIDE = 64  # bytes between the counters of tasks and of threads: a cache line each, since all threads add


def thread_workspace(code: Code, a: Arguments) -> Pointer:
    """This thread's slice of the workspace. Threads number themselves, so that any thread may call a kernel."""
    thread = code.fetch_add(a.pointer("counter", BYTE) + COUNTER_STRIDE)
    return a.pointer("workspace", BYTE) + thread * a.integer("work_size")


@contextmanager
def task_loop(code: Code, a: Arguments) -> Iterator[Value]:
    """Claim tasks from a shared counter until none is left; the loop's value is the task's index."""
    with code.loop_forever() as done:
        task_index = code.fetch_add(a.pointer("counter"))
        code.break_if(task_index >= a.integer("tasks"), done)
        yield task_index


def store_rows(code: Code, source: Pointer, to: Pointer, row_offsets: Pointer, rows: Value) -> None:
    """Store one element for each row."""
    with code.loop(0, rows) as r:
        to[row_offsets[r]] = source[r]


class Kernel:
    """Base class of kernel generators: emits the code of one task, with its arguments, workspace and panel."""

    def __init__(self, code: Code, a: Arguments, variant: Variant, panel: Panel, w: Workspace, task: Task):
        self.code, self.a, self.variant, self.panel, self.w, self.task = code, a, variant, panel, w, task

    def load_mask_and_bias(self, p: Value, first: Value, count: Value) -> Value:
        """Load the block's bias and mask, transposed, into the workspace; return whether any pair is visible."""
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        for name, dtype in (("mask", "bool" if variant.mask else None), ("bias", variant.bias)):
            if dtype is None:
                continue
            stride, offsets = a.integer(f"{name}_j"), getattr(w, f"{name}_offsets") + p * panel.rows
            at = a.pointer(name, STORAGE_TYPES[dtype]) + first * stride
            load_transposed(code, panel, at, offsets, count, stride, dtype, getattr(w, name), code.real(1))
        return mask_has_visible(code, panel, w.mask, count) if variant.mask else code.index(0).equals(0)

    def score_tables(self, p: Value) -> ScoreTables:
        rows = p * self.panel.rows
        terms = {symbol: getattr(self.w, symbol) + rows for symbol in self.variant.head_terms}
        return ScoreTables(self.w.bias, self.w.diagonal_key + rows, terms)
