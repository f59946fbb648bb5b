"""Operands of generated code: values with arithmetic operators, typed pointers, variables. Each has the `codegen.Code`
that it belongs to, and appends its instructions there.

Python numbers become constants of the other operand's type; scalars are broadcast to vectors. Variables live on the
stack until LLVM's `sroa` pass promotes them to registers. Arithmetic is IEEE: no fast-math flags, so nothing is
reassociated or assumed finite.
"""

import functools
from typing import Any

from llvmlite import ir as llvm

BIT, BYTE, SHORT, INT, LONG = (llvm.IntType(n) for n in (1, 8, 16, 32, 64))
FLOAT, DOUBLE, HALF, VOID, ADDRESS = (
    llvm.FloatType(),
    llvm.DoubleType(),
    llvm.HalfType(),
    llvm.VoidType(),
    llvm.PointerType(),
)
SIZES = {BYTE: 1, SHORT: 2, HALF: 2, INT: 4, FLOAT: 4, LONG: 8, DOUBLE: 8, ADDRESS: 8}
FLOATING = (FLOAT, DOUBLE, HALF)
REAL_TYPES = {"float32": FLOAT, "float64": DOUBLE}  # types of scores, sums and accumulators


@functools.cache  # llvmlite writes the name of each type object anew
def vector_type(kind: llvm.Type, lanes: int) -> llvm.VectorType:
    return llvm.VectorType(kind, lanes)


@functools.cache
def undefined(kind: llvm.Type) -> llvm.Constant:
    return llvm.Constant(kind, llvm.Undefined)


@functools.cache
def lane_numbers(lanes: tuple[int, ...]) -> llvm.Constant:
    """A constant of 32-bit integers, such as the mask of a shuffle."""
    return llvm.Constant(vector_type(INT, len(lanes)), list(lanes))


def element_type(kind: llvm.Type) -> llvm.Type:
    return kind.element if isinstance(kind, llvm.VectorType) else kind


class Value:
    """A scalar or a vector in the generated code. Integers are signed."""

    __slots__ = ("code", "ir")

    def __init__(self, code: Any, value: Any):
        self.code, self.ir = code, value

    def _binary(self, other: Any, integer: str, floating: str | None = None, swap: bool = False) -> "Value":
        a, b = self.code.broadcast(self, other)
        a, b = (b, a) if swap else (a, b)
        name = floating if floating is not None and element_type(a.type) in FLOATING else integer
        return Value(self.code, getattr(self.code.ir, name)(a, b))

    def __add__(self, other: Any) -> "Value":
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> "Value":
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Any) -> "Value":
        return self._binary(other, "mul", "fmul")

    def __rsub__(self, other: Any) -> "Value":
        return self._binary(other, "sub", "fsub", swap=True)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> "Value":
        return self._binary(other, "sdiv", "fdiv")

    def __rtruediv__(self, other: Any) -> "Value":
        return self._binary(other, "sdiv", "fdiv", swap=True)

    def __floordiv__(self, other: Any) -> "Value":
        """Unsigned division: neither integer may be negative."""
        return self._binary(other, "udiv")

    def __mod__(self, other: Any) -> "Value":
        return self._binary(other, "urem")

    def __and__(self, other: Any) -> "Value":
        return self._binary(other, "and_")

    def __or__(self, other: Any) -> "Value":
        return self._binary(other, "or_")

    def __xor__(self, other: Any) -> "Value":
        return self._binary(other, "xor")

    def __lshift__(self, other: Any) -> "Value":
        return self._binary(other, "shl")

    def __rshift__(self, other: Any) -> "Value":
        """Logical shift."""
        return self._binary(other, "lshr")

    def _compare(self, operator: str, other: Any) -> "Value":
        a, b = self.code.broadcast(self, other)
        # Ordered comparisons are false for NaN; != is unordered, true for NaN.
        floating = self.code.ir.fcmp_unordered if operator == "!=" else self.code.ir.fcmp_ordered
        compare = floating if element_type(a.type) in FLOATING else self.code.ir.icmp_signed
        return Value(self.code, compare(operator, a, b))

    def __lt__(self, other: Any) -> "Value":
        return self._compare("<", other)

    def __le__(self, other: Any) -> "Value":
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: Any) -> "Value":
        return self._compare(">=", other)

    def equals(self, other: Any) -> "Value":
        return self._compare("==", other)

    def differs(self, other: Any) -> "Value":
        return self._compare("!=", other)


class Pointer:
    """A typed address: `p[i]` is an element, `p.vector(i)` a vector from element `i` on."""

    __slots__ = ("code", "ir", "kind")

    def __init__(self, code: Any, address: Any, kind: llvm.Type):
        self.code, self.ir, self.kind = code, address, kind

    def __add__(self, i: "Value | int") -> "Pointer":
        if isinstance(i, int) and i == 0:
            return self
        step = self.code.ir.gep(self.ir, [self.code.index(i).ir], source_etype=self.kind)
        step.type = ADDRESS  # llvmlite types the result by its element
        return Pointer(self.code, step, self.kind)

    def __getitem__(self, i: "Value | int") -> Value:
        return (self + i).load(self.kind)

    def load(self, kind: llvm.Type) -> Value:
        """The one element of another kind at this address."""
        return Value(self.code, self.code.ir.load(self.ir, typ=kind, align=SIZES[kind]))

    def __setitem__(self, i: "Value | int", x: Value) -> None:
        self.code.ir.store(self.code.scalar(x, self.kind).ir, (self + i).ir, align=SIZES[self.kind])

    def vector(self, i: "Value | int" = 0) -> Value:
        kind = vector_type(self.kind, self.code.lanes)
        return Value(self.code, self.code.ir.load((self + i).ir, typ=kind, align=SIZES[self.kind]))

    def store(self, x: Value, i: "Value | int" = 0) -> None:
        """Store all lanes of a vector."""
        self.code.ir.store(x.ir, (self + i).ir, align=SIZES[self.kind])

    def cast(self, kind: llvm.Type) -> "Pointer":
        return Pointer(self.code, self.ir, kind)

    def is_null(self) -> Value:
        return Value(self.code, self.code.ir.icmp_unsigned("==", self.ir, llvm.Constant(ADDRESS, None)))


class Variable:
    """A mutable value: a stack slot in IR, a register after `sroa`."""

    __slots__ = ("code", "kind", "slot")

    def __init__(self, code: Any, start: Value):
        self.code, self.kind = code, start.ir.type
        with code.ir.goto_entry_block():
            self.slot = code.ir.alloca(self.kind)
        self.slot.type = ADDRESS  # llvmlite 0.45 types a slot by its kind, and prints `ptr*` for one of addresses
        self.set(start)

    def get(self) -> Value:
        return Value(self.code, self.code.ir.load(self.slot, typ=self.kind))

    def set(self, x: Value) -> None:
        self.code.ir.store(x.ir, self.slot)
