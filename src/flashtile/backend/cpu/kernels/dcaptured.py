"""The gradients of the tensors that a formula reads: each pair adds to the elements that it has read.

Neighboring keys mostly read the same element for a row, so every lane adds up a run of such keys, and only then adds to
the element itself, with a compensated sum (`sums`). A block ends all runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir as llvm

from ....expression.derivative import Load
from .captured import Captured, Position, pattern
from .codegen import Code
from .kernel import Kernel
from .operands import ADDRESS, BIT, INT, LONG, Pointer, Value, Variable, vector_type
from .sums import fast_two_sum

NONE = -1  # the element of a lane that has read none yet


class Run(NamedTuple):
    """The current run of each lane."""

    total: Variable
    element: Variable  # offset in the gradient


class ElementGradients:
    """Adds gradients of elements for a vector of rows, in a loop over keys: make it before the loop, and flush it after
    it.
    """

    def __init__(self, kernel: Kernel):
        self.code, self.loads = kernel.code, kernel.variant.loads
        code, task = kernel.code, kernel.task
        self.kind = LONG if kernel.variant.wide else INT
        assert kernel.variant.formula is not None
        captured = Captured(
            code, kernel.variant.formula.tensors, kernel.a.pointer("captured", LONG), kernel.variant.wide
        )
        self.sums = {x.tensor: task_sums(captured, x.tensor, (task.b, task.kv_head, task.split)) for x in self.loads}
        none = code.constant(NONE, vector_type(self.kind, code.lanes))
        self.runs = [Run(code.variable(code.full()), code.variable(none)) for _ in self.loads]

    def add(self, results: Sequence[Any], ds: Value, visible: Value) -> None:
        """Add the terms of a vector of rows: `ds` times the partial derivatives in the formula's results."""
        code = self.code
        for load, run in zip(self.loads, self.runs, strict=True):
            element, inside = self.element([results[m] for m in load.indices])
            counts = visible & inside
            element = code.select(counts, element, run.element.get())
            with code.if_then(code.any(element.differs(run.element.get()))):
                self.end(load, run)
                run.element.set(element)
            term = code.select(counts, code.splat(ds * results[load.partial]), 0.0)
            run.total.set(run.total.get() + term)

    def element(self, positions: list[Position]) -> tuple[Value, Value]:
        """The offset of a load's element, and whether there is one."""
        code = self.code
        offset, inside = code.constant(0, vector_type(self.kind, code.lanes)), code.constant(1, BIT)
        for x in positions:
            offset, inside = offset + code.convert(x.offset, self.kind), inside & x.inside
        return offset, inside

    def end(self, load: Load, run: Run) -> None:
        """Add the runs of all lanes to their elements."""
        sums, errors = self.sums[load.tensor]
        add_elements(self.code, sums, errors, run.element.get(), run.total.get())
        run.total.set(self.code.full())

    def flush(self) -> None:
        for load, run in zip(self.loads, self.runs, strict=True):
            self.end(load, run)


def task_sums(captured: Captured, tensor: int, places: tuple[Value, ...]) -> tuple[Pointer, Pointer]:
    """A task's sums and their errors."""
    sums = captured.address(tensor)
    for d, place in enumerate(places, start=1):
        sums = sums + place * captured.stride(tensor, d)
    return sums, sums + captured.stride(tensor, 0)


def add_elements(code: Code, sums: Pointer, errors: Pointer, element: Value, x: Value) -> None:
    """Add each lane of `x` to its element. Where all lanes have the same one, their sum is added at once, and neighbors
    as a vector.
    """
    kinds = (ADDRESS, ADDRESS, element.ir.type, x.ir.type)
    with code.shared_function("add_elements", *kinds) as args:
        if args:
            sums_, errors_, element_, x_ = code.pointer(args[0]), code.pointer(args[1]), args[2], args[3]
            lanes = [(lane(element_, n), lane(x_, n)) for n in range(code.lanes)]
            first, same, neighbors = pattern(element_)
            with code.if_else(same) as (one, several):
                with one:
                    add_element(code, sums_, errors_, first, pairwise_sum([y for _, y in lanes]))
                with several, code.if_else(neighbors & (first >= 0)) as (contiguous, scattered):
                    with contiguous:
                        error, total = fast_two_sum(code, errors_.vector(first) + x_, sums_.vector(first))
                        errors_.store(error, first)
                        sums_.store(total, first)
                    with scattered:
                        for at, y in lanes:
                            add_element(code, sums_, errors_, at, y)
    code.call("add_elements", sums, errors, element, x)


def lane(x: Value, n: int) -> Value:
    return Value(x.code, x.code.ir.extract_element(x.ir, llvm.Constant(INT, n)))


def pairwise_sum(x: list[Value]) -> Value:
    while len(x) > 1:
        x = [a + b for a, b in zip(x[::2], x[1::2], strict=True)]
    return x[0]


def add_element(code: Code, sums: Pointer, errors: Pointer, at: Value, x: Value) -> None:
    with code.if_then(at.differs(NONE)):
        at = code.convert(at, LONG)
        errors[at], sums[at] = fast_two_sum(code, errors[at] + x, sums[at])
