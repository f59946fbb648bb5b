"""Formulas that a function calls while it is traced: their operations become a part of the function's program."""

from collections.abc import Sequence
from typing import Any

from .builder import Node
from .program import INPUTS, INTEGERS, Program, emit
from .stand_ins import Captured, Proxy, Standing
from .trace import Tracer


class Inlined:
    """An emitter (`program.Emitter`) that adds to a trace."""

    def __init__(self, tracer: Tracer, inputs: Sequence[Any], tensors: Sequence[Captured]):
        self.tracer, self.builder, self.tensors = tracer, tracer.builder, tensors
        self.inputs = {name: tracer.node(x) for name, x in zip(INPUTS[-len(inputs) :], inputs, strict=True)}

    def constant(self, value: float, kind: str) -> Node:
        return self.builder.constant(value)

    def input(self, name: str) -> Node:
        return self.inputs[name]

    def size(self, tensor: int, dimension: int) -> Node:
        return self.tensors[tensor].size(dimension).node

    def load(self, tensor: int, indices: Sequence[Node]) -> Node:
        return self.tensors[tensor][tuple(self.tracer.proxy(x) for x in indices)].loaded()

    def cast(self, x: Node, source: str, kind: str) -> Node:
        return x if kind in INTEGERS and x.kind in INTEGERS else self.builder.cast(x, kind)  # ranges tell their width

    def round(self, x: Node, dtype: str) -> Node:
        return self.builder.round(x, dtype)

    def floordiv(self, x: Node, y: Node, nonnegative: bool) -> Node:
        return self.builder.op("floordiv", x, y)

    def mod(self, x: Node, y: Node, nonnegative: bool) -> Node:
        return self.builder.op("mod", x, y)

    def __getattr__(self, op: str) -> Any:
        """The method of an operation of `operations`."""
        return lambda *operands: self.builder.op(op, *operands)


def inlined(program: Program, inputs: Sequence[Any], tensors: Sequence[Any]) -> Proxy:
    """The stand-in of a program's result, for inputs and tensors where some are stand-ins."""
    tracer: Any = next(x.tracer for x in (*inputs, *tensors) if isinstance(x, Standing))
    captured = [tracer.standing(x) for x in tensors]
    return tracer.proxy(emit(program, Inlined(tracer, inputs, captured))[0])
