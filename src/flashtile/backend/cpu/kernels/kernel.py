"""Code that the forward and backward kernels share: the task loop, a thread's workspace, mask and bias of a block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from ....expression import Formula
from ....expression.blocks import FULL, HIDDEN, PARTIAL
from ..targets import Target
from ..variant import Variant
from ..workspace import Layout
from .buffers import Workspace, write_addresses
from .captured import Captured
from .codegen import Code, Source
from .fields import Arguments
from .formats import STORAGE_TYPES
from .formula import Emitter
from .masking import mask_state
from .operands import ADDRESS, BYTE, INT, LONG, REAL_TYPES, Pointer, Value
from .products import Panel
from .scores import ScoreTables
from .stages import StagedCode, staged
from .tiles import Task, load_transposed, num_valid_rows, rows_in_use

COUNTER_STRIDE = 64  # bytes between the counters of tasks and of threads: a cache line each, since all threads add
COUNTERS = 2 * COUNTER_STRIDE  # where the counts of each tile's finished splits begin


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
    """Base class of kernel generators: emits the code of one task, with its arguments, workspace and panel.

    Methods that `call` calls become functions of their own, once in a module: several passes of LLVM take more than
    linear time in a function's length. They find the task in the workspace. Those in `SHARED` are parts, which all
    kernels without their features have, too.
    """

    SIZES: tuple[str, ...]  # arguments that the sizes of buffers depend on
    SHARED: tuple[str, ...]  # methods that depend on `variant.without_features` alone
    suffix: tuple[str, ...] = ()  # behind the names of functions

    def __init__(self, code: Code, variant: Variant, panel: Panel, block: Value, base: Pointer):
        self.code, self.variant, self.panel, self.block, self.base = code, variant, panel, block, base
        self.a = Arguments(code, block)
        self.w = Workspace(base, self.buffers(*[0] * len(self.SIZES)))
        self.task = Task(code, self.w)

    def buffers(self, *sizes: Any) -> Layout:
        """The workspace."""
        raise NotImplementedError

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        """Declare the microkernels."""
        raise NotImplementedError

    @staticmethod
    def thread_state(code: Code) -> AbstractContextManager[None]:
        """Emit code before and after a thread's tasks."""
        return nullcontext()

    def run(self, task_index: Value) -> None:
        """One task."""
        raise NotImplementedError

    def call(self, method: str, *args: Value | Pointer, **options: Any) -> None:
        """Call the function that `method(*args, **options)` emits; options are constants."""
        code, make = self.code, type(self)
        kinds = (ADDRESS, ADDRESS, *(x.ir.type for x in args))
        pointers = [x.kind if isinstance(x, Pointer) else None for x in args]

        def emit(code: Code, variant: Variant, parameters: list[Value]) -> None:
            block, base, *values = parameters
            kernel = make(code, variant, Panel(code, variant.vectors), block, code.pointer(base, BYTE))
            given = [x if kind is None else code.pointer(x, kind) for x, kind in zip(values, pointers, strict=True)]
            getattr(kernel, method)(*given, **options)

        name = "_".join(map(str, (method, *options.values(), *self.suffix)))
        if method in self.SHARED:
            variant = self.variant.without_features

            def emit_part(code: Code) -> None:
                for parameters in code.part_function(name, *kinds):
                    emit(code, variant, parameters)

            code.part(f"{make.__name__} {variant}", emit_part, name)
        else:
            with code.shared_function(name, *kinds) as parameters:
                if parameters:
                    emit(code, self.variant, parameters)
        code.call(name, self.block, self.base, *args)

    @contextmanager
    def columns(self, p: Value) -> Iterator[Value]:
        """Loop over the vectors of panel `p` that hold rows: the first row of each."""
        if self.panel.vectors == 1:
            yield self.code.index(0)
        else:
            num_valid = num_valid_rows(self.code, self.panel, self.task, p)
            with self.code.loop(0, num_valid, self.code.lanes) as row:
                yield row

    def load_mask_and_bias(self, p: Value, first: Value, count: Value, state: Value) -> Value:
        """Load the block's mask, bias and tangent of the bias, transposed, into the workspace, as far as needed.
        `state` is the block's by the mask function; return its state by the bool mask, too.
        """
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        if variant.mask:
            offsets = w.mask_offsets + p * panel.rows
            num_valid = num_valid_rows(code, panel, self.task, p)
            state = code.minimum(state, mask_state(code, a, offsets, num_valid, first, count))
        needed = state > HIDDEN
        partly = needed if variant.formula is not None else state.equals(PARTIAL)  # as `with_and_without_mask`
        inputs = (
            ("mask", "bool" if variant.mask else None, partly),
            ("bias", variant.bias, needed),
            ("dbias", variant.bias if "bias" in variant.tangents else None, needed),
        )
        for name, dtype, condition in inputs:
            if dtype is None:
                continue
            with code.if_then(condition):
                stride, offsets = a.integer(f"{name}_j"), getattr(w, f"{name}_offsets") + p * panel.rows
                at = a.pointer(name, STORAGE_TYPES[dtype]) + first * stride
                rows = rows_in_use(code, panel, self.task, p)
                load_transposed(code, panel, at, offsets, rows, count, stride, dtype, getattr(w, name), code.real(1))
        return state

    def with_narrow_panels(self, p: Value, emit: Callable[[Panel], None]) -> None:
        """Emit code for a full panel, and for narrower ones, which the last rows of a sequence fill."""
        num_valid = num_valid_rows(self.code, self.panel, self.task, p)

        def choose(panels: list[Panel]) -> None:
            panel, *wider = panels
            if not wider:
                emit(panel)
                return
            with self.code.if_else(num_valid <= panel.vectors * self.code.lanes) as (then, otherwise):
                with then:
                    emit(panel)
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
        unmasked = type(self)(self.code, variant, self.panel, self.block, self.base)
        unmasked.suffix = ("unmasked",)
        with self.code.if_else(state.equals(FULL)) as (full, partial):
            with full:
                emit(unmasked)
            with partial:
                emit(self)

    def score_tables(self, row: Value) -> ScoreTables:
        """The inputs of the score features, for a loop over keys that begins here; `row` is the first one of a vector,
        counted over all panels.
        """
        variant, w = self.variant, self.w
        terms = {symbol: (getattr(w, symbol) + row).vector() for symbol in variant.head_terms}
        diagonal_key = (w.diagonal_key + row).vector() if variant.head_terms else None
        functions = variant.functions
        return ScoreTables(diagonal_key, terms, None if functions is None else self.formula_code(functions, row))

    def formula_code(self, formula: Formula, row: Value) -> StagedCode:
        code, a, w = self.code, self.a, self.w
        captured = Captured(code, formula.tensors, a.pointer("captured", LONG), self.variant.wide)
        emitter = Emitter(code, captured, code.convert(self.task.b + a.integer("b0"), INT))
        rows = {"h": w.head.vector(row), "q_idx": w.position.vector(row)}
        return StagedCode(staged(formula.program, self.variant.loads), emitter, rows)


def kernel_source(kernel_class: type[Kernel], name: str, variant: Variant, target: Target) -> Source:
    """The LLVM module of a kernel, `name(block)`; any number of threads may run it at once."""
    code = Code(target, REAL_TYPES[variant.real_dtype])
    panel = Panel(code, variant.vectors)
    kernel_class.declare_products(code, panel, variant)
    with code.function(name, ADDRESS, public=True) as (block,):
        a = Arguments(code, block)
        kernel = kernel_class(code, variant, panel, block, thread_workspace(code, a))
        write_addresses(kernel.base, kernel.buffers(*(a.integer(name) for name in kernel.SIZES)))
        with kernel.thread_state(code), task_loop(code, a) as task_index:
            kernel.call("run", task_index)
    return code.source()
