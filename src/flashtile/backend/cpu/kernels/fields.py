"""The argument block in generated code."""

from llvmlite import ir

from ..variant import FIELDS
from .codegen import Code
from .operands import ADDRESS, DOUBLE, LONG, Pointer, Value


class Arguments:
    """The argument block: `a.integer("head_dim")` is that field, loaded at a function's start."""

    def __init__(self, code: Code, block: Value):
        self.code, self.block = code, block
        self._loaded: dict[tuple[str, ir.Type], Value] = {}

    def _field(self, name: str, kind: ir.Type) -> Value:
        if (name, kind) not in self._loaded:
            with self.code.function_start():
                self._loaded[name, kind] = (self.code.pointer(self.block, LONG) + FIELDS.index(name)).load(kind)
        return self._loaded[name, kind]

    def pointer(self, name: str, kind: ir.Type | None = None) -> Pointer:
        return self.code.pointer(self._field(name, ADDRESS), kind)

    def integer(self, name: str) -> Value:
        return self._field(name, LONG)

    def real(self, name: str) -> Value:
        return self.code.convert(self._field(name, DOUBLE), self.code.real_type)
