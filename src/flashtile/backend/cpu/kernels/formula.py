"""Formulas of a `score_mod` in generated code: each operation of `expression.operations`, on scalars and vectors.

A vector has a lane for each of `code.lanes` query rows. The key and the sequence are the same in all lanes, so values
that depend on them alone stay scalars until they meet a vector. The score, the head and the row's position are vectors.
"""

from llvmlite import ir as llvm

from ....expression.program import BOOL, INT32, INT64, REAL
from . import elementary, formats
from .captured import Base, Captured, Position
from .codegen import Code, suffix
from .operands import BIT, FLOAT, INT, LONG, Value, element_type


class Emitter:
    """Emits operations. `inputs` has the inputs of the pair, by name; `b` is the same for all."""

    def __init__(self, code: Code, captured: Captured, b: Value):
        self.code, self.captured, self.inputs = code, captured, {"b": b}
        self.types = {REAL: code.real_type, INT32: INT, INT64: LONG, BOOL: BIT}

    # Leaves -----------------------------------------------------------------------------------------------------------

    def constant(self, value: float, kind: str) -> Value:
        return self.code.constant(value, self.types[kind])

    def input(self, name: str) -> Value:
        return self.inputs[name]

    def size(self, tensor: int, dimension: int) -> Value:
        return self.code.convert(self.captured.size(tensor, dimension), INT)

    def position(self, index: Value, tensor: int, dimension: int) -> Position:
        return self.captured.position(tensor, dimension, index)

    def base(self, positions: list[Position], tensor: int, others: tuple[int, ...]) -> Base:
        return self.captured.base(tensor, positions, others)

    def load(self, base: Base, positions: list[Position], tensor: int) -> Value:
        return self.captured.load(tensor, base, positions)

    # Conversions ------------------------------------------------------------------------------------------------------

    def cast(self, x: Value, source: str, kind: str) -> Value:
        if kind == BOOL:
            return x.differs(0)
        if source == REAL:
            return self.saturated(x, self.types[kind])
        return self.code.convert(x, self.types[kind], signed=source != BOOL)

    def saturated(self, x: Value, kind: llvm.Type) -> Value:
        """A real as an integer, rounded toward zero: the nearest one if it has none, and 0 for NaN."""
        code, source = self.code, x.ir.type
        result = llvm.VectorType(kind, source.count) if isinstance(source, llvm.VectorType) else kind
        name = f"llvm.fptosi.sat.{suffix(result)}.{suffix(source)}"
        function = code.module.declare_intrinsic(name, (), llvm.FunctionType(result, [source]))
        return Value(code, code.ir.call(function, [x.ir]))

    def round(self, x: Value, dtype: str) -> Value:
        single = self.code.convert(x, FLOAT)
        return formats.widen(self.code, formats.narrow(self.code, single, dtype), dtype)

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def is_real(self, x: Value) -> bool:
        return element_type(x.ir.type) is self.code.real_type

    def add(self, x: Value, y: Value) -> Value:
        return x + y

    def sub(self, x: Value, y: Value) -> Value:
        return x - y

    def mul(self, x: Value, y: Value) -> Value:
        return x * y

    def div(self, x: Value, y: Value) -> Value:
        return x / y

    def neg(self, x: Value) -> Value:
        return x * -1

    def abs(self, x: Value) -> Value:
        return self.code.intrinsic("llvm.fabs", x) if self.is_real(x) else self.code.maximum(x, 0 - x)

    def sign(self, x: Value) -> Value:
        return self.where(x > 0, self.like(x, 1), self.where(x < 0, self.like(x, -1), x))

    def minimum(self, x: Value, y: Value) -> Value:
        return self.chosen(x < y, x, y)

    def maximum(self, x: Value, y: Value) -> Value:
        return self.chosen(x > y, x, y)

    def chosen(self, first: Value, x: Value, y: Value) -> Value:
        """`x` if `first`, else `y`; NaN if either is. Comparisons with NaN are false, so that one in `y` is chosen."""
        return self.where(first | x.differs(x) if self.is_real(x) else first, x, y)

    def like(self, x: Value, value: float) -> Value:
        return self.code.constant(value, x.ir.type)

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        if isinstance(condition.ir.type, llvm.VectorType):
            x, y = self.code.splat(x), self.code.splat(y)
        return self.code.select(condition, x, y)

    def floordiv(self, x: Value, y: Value, nonnegative: bool) -> Value:
        return x // self.code.maximum(y, 1) if nonnegative else self.divided(x, y)[0]

    def mod(self, x: Value, y: Value, nonnegative: bool) -> Value:
        return x % self.code.maximum(y, 1) if nonnegative else self.divided(x, y)[1]  # a size may be 0

    def divided(self, x: Value, y: Value) -> tuple[Value, Value]:
        """The quotient, rounded down, and the remainder. Neither a divisor of 0 nor an overflow traps."""
        divisor = self.where(y.equals(0) | y.equals(-1), self.like(y, 1), y)
        quotient = x / divisor
        quotient = self.where(y.equals(-1), 0 - x, quotient)
        rest = x - quotient * y
        down = rest.differs(0) & ((rest < 0) ^ (y < 0))
        return self.where(down, quotient - 1, quotient), self.where(down, rest + y, rest)

    # Functions --------------------------------------------------------------------------------------------------------

    def exp(self, x: Value) -> Value:
        return elementary.exp(self.code, self.code.splat(x))

    def log(self, x: Value) -> Value:
        return elementary.log(self.code, self.code.splat(x))

    def tanh(self, x: Value) -> Value:
        return elementary.tanh(self.code, self.code.splat(x))

    def sigmoid(self, x: Value) -> Value:
        return elementary.sigmoid(self.code, self.code.splat(x))

    def erf(self, x: Value) -> Value:
        return elementary.erf(self.code, self.code.splat(x))

    def sqrt(self, x: Value) -> Value:
        return self.code.intrinsic("llvm.sqrt", x)

    def rsqrt(self, x: Value) -> Value:
        return 1.0 / self.sqrt(x)

    def floor(self, x: Value) -> Value:
        return elementary.floor(self.code, self.code.splat(x))

    # Comparison and logic ---------------------------------------------------------------------------------------------

    def lt(self, x: Value, y: Value) -> Value:
        return x < y

    def le(self, x: Value, y: Value) -> Value:
        return x <= y

    def gt(self, x: Value, y: Value) -> Value:
        return x > y

    def ge(self, x: Value, y: Value) -> Value:
        return x >= y

    def eq(self, x: Value, y: Value) -> Value:
        return x.equals(y)

    def ne(self, x: Value, y: Value) -> Value:
        return x.differs(y)

    def and_(self, x: Value, y: Value) -> Value:
        return x & y

    def or_(self, x: Value, y: Value) -> Value:
        return x | y

    def xor(self, x: Value, y: Value) -> Value:
        return x ^ y

    def not_(self, x: Value) -> Value:
        return x ^ -1
