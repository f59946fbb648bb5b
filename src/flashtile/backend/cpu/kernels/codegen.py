"""A builder for LLVM IR, so that a kernel generator reads like the loop it emits:

    with code.loop(0, n) as i:
        total.set(total.get() + x.vector(i) * factor)

`operands` has the values, pointers and variables. "Real" is the floating-point type that a kernel computes in.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir as llvm

from ..targets import Target
from .operands import (
    BIT,
    DOUBLE,
    FLOAT,
    FLOATING,
    HALF,
    INT,
    LONG,
    SIZES,
    VOID,
    Pointer,
    Value,
    Variable,
    element_type,
    lane_numbers,
    undefined,
    vector_type,
)


class Function(NamedTuple):
    ir: llvm.Function
    parameters: tuple[llvm.Type, ...]


class Source(NamedTuple):
    """A module's IR, and the IR of parts whose functions it calls, by names that tell all that they depend on but the
    target. Other kernels have the same parts, so they are compiled apart, and generated only where they have to be.
    """

    text: str
    parts: dict[str, Callable[[], "Source"]]

    def texts(self) -> dict[str, str]:
        """The IR of all parts, by name, and of the module itself, by ""."""
        nested = [(name, part().texts()) for name, part in self.parts.items()]
        return {"": self.text} | {of_part or name: x for name, found in nested for of_part, x in found.items()}


class Code:
    """A module under construction, and the position of its next instruction."""

    ir: Any  # llvmlite's builder

    def __init__(self, target: Target, real_type: llvm.Type, is_part: bool = False):
        self.is_part, self.parts = is_part, dict[str, dict[str, Callable[[Code], None]]]()
        self.module = llvm.Module("flashtile")
        self.target, self.real_type = target, real_type
        self.lanes = target.vector_bytes // SIZES[real_type]
        # The integer type for a real's bits.
        self.bits = LONG if real_type is DOUBLE else INT
        self.functions: dict[str, Function] = {}
        self.constants: dict[tuple[str, str], Value] = {}

    # Values ----------------------------------------------------------------------------------------------------------

    def constant(self, x: float, kind: llvm.Type) -> Value:
        number = float(x) if element_type(kind) in FLOATING else int(x)
        key = (str(kind), repr(number))
        if key not in self.constants:  # llvmlite is slow at making constants
            content: Any = number
            if isinstance(kind, llvm.VectorType):  # `None` is all zeros, which is a word to write and to parse
                content = None if key[1] in ("0", "0.0") else [number] * kind.count
            self.constants[key] = Value(self, llvm.Constant(kind, content))
        return self.constants[key]

    def index(self, x: "Value | int") -> Value:
        """A 64-bit integer."""
        return x if isinstance(x, Value) else self.constant(x, LONG)

    def real(self, x: float) -> Value:
        return self.constant(x, self.real_type)

    def full(self, x: float = 0.0) -> Value:
        """A vector constant of reals, all equal."""
        return self.constant(x, vector_type(self.real_type, self.lanes))

    def lane_indices(self) -> Value:
        """0, 1, 2, ... as 32-bit integers."""
        return Value(self, lane_numbers(tuple(range(self.lanes))))

    def scalar(self, x: "Value | float", kind: llvm.Type) -> Value:
        return x if isinstance(x, Value) else self.constant(x, kind)

    def splat(self, x: Value) -> Value:
        """A vector with `x` in all lanes."""
        if isinstance(x.ir.type, llvm.VectorType):
            return x
        nothing = undefined(vector_type(x.ir.type, self.lanes))
        one = self.ir.insert_element(nothing, x.ir, self.constant(0, INT).ir)
        return self.shuffle(Value(self, one), Value(self, nothing), (0,) * self.lanes)

    def broadcast(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Two operands converted to one type: Python numbers to constants, scalars to vectors."""
        if not isinstance(a, Value):
            return self.constant(a, b.ir.type).ir, b.ir
        if not isinstance(b, Value):
            return a.ir, self.constant(b, a.ir.type).ir
        if a.ir.type == b.ir.type:
            return a.ir, b.ir
        return self.splat(a).ir, self.splat(b).ir

    def select(self, condition: Value, a: Any, b: Any) -> Value:
        x, y = self.broadcast(a, b)
        return Value(self, self.ir.select(condition.ir, x, y))

    def maximum(self, a: Any, b: Any) -> Value:
        """The larger; `b` if either is NaN."""
        a, b = (Value(self, x) for x in self.broadcast(a, b))
        return self.select(a > b, a, b)

    def minimum(self, a: Any, b: Any) -> Value:
        """The smaller; `b` if either is NaN."""
        a, b = (Value(self, x) for x in self.broadcast(a, b))
        return self.select(a < b, a, b)

    def multiply_add(self, a: Value, b: Any, c: Any) -> Value:
        """`a * b + c`, fused where the hardware has FMA."""
        if not self.target.fma:
            return a * b + c
        x, y = (Value(self, v) for v in self.broadcast(a, b))
        y, z = (Value(self, v) for v in self.broadcast(y, c))
        return self.intrinsic("llvm.fma", x, y, z)

    def intrinsic(self, name: str, *operands: Value) -> Value:
        kind = operands[0].ir.type
        kinds = [x.ir.type for x in operands]
        function = self.module.declare_intrinsic(f"{name}.{suffix(kind)}", (), llvm.FunctionType(kind, kinds))
        return Value(self, self.ir.call(function, [x.ir for x in operands]))

    def prefetch(self, to: Pointer, level: int = 1) -> None:
        """Load the cache line of an address, which need not be readable, into the caches from this level on."""
        kinds = [to.ir.type, INT, INT, INT]
        function = self.module.declare_intrinsic("llvm.prefetch.p0", (), llvm.FunctionType(llvm.VoidType(), kinds))
        read, locality, data = (llvm.Constant(INT, n) for n in (0, 4 - level, 1))
        self.ir.call(function, [to.ir, read, locality, data])

    def masked_gather(self, addresses: Value, kind: llvm.Type) -> Value:
        """Elements of type `kind` at a vector of readable addresses."""
        lanes, result = addresses.ir.type.count, llvm.VectorType(kind, addresses.ir.type.count)
        mask = llvm.VectorType(BIT, lanes)
        name = f"llvm.masked.gather.{suffix(result)}.v{lanes}p0"
        kinds = [addresses.ir.type, INT, mask, result]
        function = self.module.declare_intrinsic(name, (), llvm.FunctionType(result, kinds))
        every, nothing = llvm.Constant(mask, [1] * lanes), llvm.Constant(result, llvm.Undefined)
        return Value(self, self.ir.call(function, [addresses.ir, llvm.Constant(INT, SIZES[kind]), every, nothing]))

    def reduce(self, name: str, x: Value) -> Value:
        """Reduce a vector to a scalar by `and`, `or`, `smax`, `smin`, ..."""
        kind = x.ir.type
        full = f"llvm.vector.reduce.{name}.{suffix(kind)}"
        function = self.module.declare_intrinsic(full, (), llvm.FunctionType(kind.element, [kind]))
        return Value(self, self.ir.call(function, [x.ir]))

    def any(self, condition: Value) -> Value:
        return self.reduce("or", condition)

    def convert(self, x: Value, kind: llvm.Type, signed: bool = True) -> Value:
        """Convert to another scalar type, lane by lane."""
        source, old = x.ir.type, element_type(x.ir.type)
        if old is kind:
            return x
        result_type = vector_type(kind, source.count) if isinstance(source, llvm.VectorType) else kind
        wider = kind in SIZES and old in SIZES and SIZES[kind] > SIZES[old]
        if old in FLOATING:
            name = ("fpext" if wider else "fptrunc") if kind in FLOATING else "fptosi"
        elif kind in FLOATING:
            name = "sitofp" if signed else "uitofp"
        elif wider or old is BIT:
            name = "sext" if signed and old is not BIT else "zext"
        else:
            name = "trunc"
        return Value(self, getattr(self.ir, name)(x.ir, result_type))

    def bitcast(self, x: Value, kind: llvm.Type) -> Value:
        source = x.ir.type
        wanted = vector_type(kind, source.count) if isinstance(source, llvm.VectorType) else kind
        return Value(self, self.ir.bitcast(x.ir, wanted))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """A vector of chosen lanes of `a` and `b`; lanes of `b` are numbered behind the lanes of `a`."""
        shuffled = self.ir.shuffle_vector(a.ir, b.ir, lane_numbers(tuple(lanes)))
        shuffled.type = vector_type(element_type(a.ir.type), len(lanes))
        return Value(self, shuffled)

    # Control ---------------------------------------------------------------------------------------------------------

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    @contextmanager
    def loop(self, start: "Value | int", stop: "Value | int", step: "Value | int" = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)`, with 64-bit integers."""
        first, end, step = self.index(start), self.index(stop), self.index(step)
        head, body, done = (self.ir.append_basic_block(name) for name in ("loop", "body", "done"))
        before = self.ir.block
        self.ir.branch(head)
        self.ir.position_at_end(head)
        i = self.ir.phi(LONG)
        i.add_incoming(first.ir, before)
        self.ir.cbranch(self.ir.icmp_signed("<", i, end.ir), body, done)
        self.ir.position_at_end(body)
        yield Value(self, i)
        i.add_incoming(self.ir.add(i, step.ir), self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(done)

    @contextmanager
    def loop_forever(self) -> Iterator[llvm.Block]:
        """A loop that only `break_if` leaves."""
        body, done = self.ir.append_basic_block("body"), self.ir.append_basic_block("done")
        self.ir.branch(body)
        self.ir.position_at_end(body)
        yield done
        self.ir.branch(body)
        self.ir.position_at_end(done)

    def break_if(self, condition: Value, done: llvm.Block) -> None:
        more = self.ir.append_basic_block("more")
        self.ir.cbranch(condition.ir, done, more)
        self.ir.position_at_end(more)

    @contextmanager
    def if_then(self, condition: Value) -> Iterator[None]:
        with self.ir.if_then(condition.ir):
            yield

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """`with code.either(c) as (then, otherwise): with then: ... with otherwise: ...`"""
        with self.ir.if_else(condition.ir) as branches:
            yield branches

    # Functions -------------------------------------------------------------------------------------------------------

    @contextmanager
    def function(self, name: str, *kinds: llvm.Type, public: bool = False) -> Iterator[list[Value]]:
        """Emit a function that returns nothing, and yield its arguments. Addresses come without an element type."""
        function = llvm.Function(self.module, llvm.FunctionType(VOID, kinds), name)
        function.attributes.add("nounwind")
        if not public:
            function.linkage = "internal"
            function.attributes.add("noinline")
        self.functions[name] = Function(function, kinds)
        outer = getattr(self, "ir", None)
        self.ir = llvm.IRBuilder(function.append_basic_block("entry"))
        yield [Value(self, argument) for argument in function.args]
        self.ir.ret_void()
        if outer is not None:
            self.ir = outer

    def part(self, name: str, emit: "Callable[[Code], None]", member: str = "") -> None:
        """Declare the functions that `emit` emits in a module of their own, by `part_function`, beside other members of
        that part.
        """
        members = self.parts.setdefault(name, {})
        if member not in members:
            members[member] = emit
            own, self.is_part = self.is_part, False
            emit(self)
            self.is_part = own

    def part_function(self, name: str, *kinds: llvm.Type) -> Iterator[list[Value]]:
        """Emit a function of a part: a loop over its arguments, that runs once in the part's own module, and not at all
        where the function is declared.
        """
        if self.is_part:
            with self.function(name, *kinds, public=True) as args:
                yield args
        else:
            self.functions[name] = Function(llvm.Function(self.module, llvm.FunctionType(VOID, kinds), name), kinds)

    def source(self) -> Source:
        def source_of(members: Iterable[Callable[[Code], None]]) -> Source:
            code = Code(self.target, self.real_type, is_part=True)
            for emit in members:
                emit(code)
            return code.source()

        parts = {
            " ".join((name, *members, str(self.real_type))): functools.partial(source_of, members.values())
            for name, members in self.parts.items()
        }
        return Source(str(self.module), parts)

    def function_start(self) -> Any:
        """What this context emits runs once, before the rest of the function."""
        return self.ir.goto_entry_block()

    @contextmanager
    def shared_function(self, name: str, *kinds: llvm.Type) -> Iterator[list[Value]]:
        """Emit a function once for each module: yields its arguments, or nothing if it exists already."""
        if name in self.functions:
            yield []
        else:
            with self.function(name, *kinds) as args:
                yield args

    def call(self, name: str, *args: "Value | Pointer") -> None:
        self.ir.call(self.functions[name].ir, [x.ir for x in args])

    def pointer(self, x: Value, kind: llvm.Type | None = None) -> Pointer:
        return Pointer(self, x.ir, self.real_type if kind is None else kind)

    def fetch_add(self, counter: Pointer, ordering: str = "monotonic") -> Value:
        """Atomically add 1 to a counter and return its value before."""
        return Value(self, self.ir.atomic_rmw("add", counter.ir, llvm.Constant(LONG, 1), ordering))


def suffix(kind: llvm.Type) -> str:
    """The suffix of an intrinsic's name for a type."""
    if isinstance(kind, llvm.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    return {FLOAT: "f32", DOUBLE: "f64", HALF: "f16"}.get(kind) or str(kind)
