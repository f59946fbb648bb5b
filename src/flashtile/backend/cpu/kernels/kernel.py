"""Code that the forward and backward kernels share: the task loop, a thread's workspace, mask and bias of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from ....expression import Formula
from ....expression.blocks import FULL, HIDDEN, PARTIAL
from ..variant import Arguments, Variant
from ..workspace import Workspace
from .captured import Captured
from .codegen import Code
from .formats import STORAGE_TYPES
from .formula import Emitter
from .masking import mask_state
from .operands import BYTE, INT, LONG, Pointer, Value
from .products import Panel
from .scores import ScoreTables
from .stages import StagedCode, staged
from .tiles import Task, load_transposed, num_valid_rows, rows_in_use

COUNTER_STRIDE = 64  # bytes between the counters of tasks and of threads: a cache line each, since all threads add
COUNTERS = 2 * COUNTER_STRIDE  # where those of the splits that each tile has finished begin


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

    def load_mask_and_bias(self, p: Value, first: Value, count: Value, state: Value) -> Value:
        """Load the block's bias and mask, transposed, into the workspace, as far as they are needed. `state` is that of
        the block by the mask function; return that by the bool mask, too.
        """
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        if variant.mask:
            offsets = w.mask_offsets + p * panel.rows
            num_valid = num_valid_rows(code, panel, self.task, p)
            state = code.minimum(state, mask_state(code, a, offsets, num_valid, first, count))
        needed = state > HIDDEN
        partly = needed if variant.formula is not None else state.equals(PARTIAL)  # as `with_and_without_mask`
        inputs = (("mask", "bool" if variant.mask else None, partly), ("bias", variant.bias, needed))
        for name, dtype, condition in inputs:
            if dtype is None:
                continue
            with code.if_then(condition):
                stride, offsets = a.integer(f"{name}_j"), getattr(w, f"{name}_offsets") + p * panel.rows
                at = a.pointer(name, STORAGE_TYPES[dtype]) + first * stride
                rows = rows_in_use(code, panel, self.task, p)
                load_transposed(code, panel, at, offsets, rows, count, stride, dtype, getattr(w, name), code.real(1))
        return state

    def with_narrow_panels(self, p: Value, emit: Callable[[Self], None]) -> None:
        """Emit code for panel `p`, and for narrower ones, which the last rows of a sequence fill."""
        num_valid = num_valid_rows(self.code, self.panel, self.task, p)

        def choose(panels: list[Panel]) -> None:
            panel, *wider = panels
            if not wider:
                emit(self)
                return
            with self.code.if_else(num_valid <= panel.vectors * self.code.lanes) as (then, otherwise):
                with then:
                    emit(type(self)(self.code, self.a, self.variant, panel, self.w, self.task))
                with otherwise:
                    choose(wider)

        choose(self.panel.widths())

    def with_and_without_window(self, edge: Value, emit: Callable[[bool], None]) -> None:
        """Emit a block's code with the test of the window, for blocks at its edge, and without it for others; with a
        formula the former serves all, since the formula's code takes longer to compile than the test to run.
        """
        if self.variant.functions is not None:
            emit(True)
            return
        with self.code.if_else(edge) as (then, otherwise):
            with then:
                emit(True)
            with otherwise:
                emit(False)

    def with_and_without_mask(self, state: Value, emit: Callable[[Self], None]) -> None:
        """Emit code with the masks, for partial blocks, and without them for full ones. With a score_mod the former
        serves both, since its code takes longer to compile than a mask to run.
        """
        variant = self.variant._replace(mask_mod=None, mask=False)
        if variant == self.variant or self.variant.formula is not None:
            emit(self)
            return
        unmasked = type(self)(self.code, self.a, variant, self.panel, self.w, self.task)
        with self.code.if_else(state.equals(FULL)) as (full, partial):
            with full:
                emit(unmasked)
            with partial:
                emit(self)

    def score_tables(self, p: Value) -> ScoreTables:
        """The inputs of the score features, for a loop over keys that begins here."""
        rows = p * self.panel.rows
        terms = {symbol: getattr(self.w, symbol) + rows for symbol in self.variant.head_terms}
        functions = self.variant.functions
        code = None if functions is None else self.formula_code(functions, rows)
        return ScoreTables(self.w.bias, self.w.diagonal_key + rows, terms, code)

    def formula_code(self, formula: Formula, first_row: Value) -> StagedCode:
        code, a, w = self.code, self.a, self.w
        captured = Captured(code, formula.tensors, a.pointer("captured", LONG), self.variant.wide)
        emitter = Emitter(code, captured, code.convert(self.task.b + a.integer("b0"), INT))
        starts = [first_row + n * code.lanes for n in range(self.panel.vectors)]
        rows = [{"h": w.head.vector(n), "q_idx": w.position.vector(n)} for n in starts]
        return StagedCode(staged(formula.program, self.variant.loads), emitter, rows)

    def key_position(self, j: Value) -> Value:
        """The position of a key in the whole sequence."""
        return self.code.convert(j + self.a.integer("j0"), INT)
