"""The torch functions and methods that a traced function may call, by name, as operations of programs."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .builder import Builder, Node
from .program import BOOL, INT32, INTEGERS, REAL

FUNCTIONS: dict[str, Any] = {}
NARROW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class UntraceableError(Exception):
    """Why a function has no program."""


class ComputedError(UntraceableError):
    """Why a function has a program for one call only."""


def named(*names: str) -> Callable[[Any], Any]:
    """Register a function `(builder, *nodes) -> node` under the names of torch functions and methods."""

    def register(fn: Any) -> Any:
        def call(tracer: Any, *args: Any, **unknown: Any) -> Any:
            if unknown:
                raise UntraceableError(f"`{names[0]}` with the argument `{next(iter(unknown))}`")
            return tracer.proxy(fn(tracer.builder, *(tracer.node(x) for x in args)))

        FUNCTIONS.update(dict.fromkeys(names, call))
        return fn

    return register


def special(*names: str) -> Callable[[Any], Any]:
    """Register a function `(tracer, *args, **kwargs)` that looks at its arguments itself."""

    def register(fn: Any) -> Any:
        FUNCTIONS.update(dict.fromkeys(names, fn))
        return fn

    return register


def direct(op: str, *names: str) -> None:
    named(op, *names)(lambda b, *operands: b.op(op, *checked(op, *operands)))


NO_BOOL = ("neg", "abs", "floordiv", "mod", "floor")  # PyTorch has none of bools alone
NO_REAL = ("and_", "or_", "xor", "not_")


def checked(op: str, *operands: Node) -> tuple[Node, ...]:
    """The operands of an operation that PyTorch has of their kinds."""
    kinds = {x.kind for x in operands}
    if (op in NO_BOOL and kinds == {BOOL}) or (op == "sub" and BOOL in kinds):
        raise UntraceableError(f"`{op}` of conditions; `x.int()` has the number of one")
    if op in NO_REAL and REAL in kinds:
        raise UntraceableError(f"`{op}` of real numbers")
    if op == "where" and operands[0].kind != BOOL:
        raise UntraceableError("`where` of what is no condition")
    return operands


for op, names in {
    "mul": ("multiply",), "neg": ("negative",), "abs": ("absolute",),
    "minimum": (), "maximum": (), "where": (), "exp": (), "log": (), "tanh": (), "sigmoid": (), "erf": (),
    "sqrt": (), "rsqrt": (), "lt": ("less",), "le": ("less_equal",), "gt": ("greater",), "ge": ("greater_equal",),
    "eq": (), "ne": ("not_equal",),
}.items():  # fmt: skip
    direct(op, *names)
direct("and_", "bitwise_and")
direct("or_", "bitwise_or")
direct("xor", "bitwise_xor")
direct("not_", "bitwise_not")


def binary(*names: str) -> Callable[[Any], Any]:
    """Register a function of two operands; `alpha` multiplies the second one."""

    def register(fn: Any) -> Any:
        def call(tracer: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
            b, left, right = tracer.builder, tracer.node(x), tracer.node(y)
            return tracer.proxy(fn(b, left, right if alpha == 1 else b.op("mul", right, tracer.node(alpha))))

        FUNCTIONS.update(dict.fromkeys(names, call))
        return fn

    return register


@binary("add")
def add(b: Builder, x: Node, y: Node) -> Node:
    return b.op("add", x, y)


@binary("sub", "subtract")
def sub(b: Builder, x: Node, y: Node) -> Node:
    return b.op("sub", *checked("sub", x, y))


@special("rsub")
def rsub(tracer: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return FUNCTIONS["sub"](tracer, y, x, alpha=alpha)


@special("div", "divide", "true_divide")
def div(tracer: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    b, left, right = tracer.builder, tracer.node(x), tracer.node(y)
    if rounding_mode is None:
        return tracer.proxy(b.op("div", left, right))
    if rounding_mode == "floor":
        return tracer.proxy(floor_divide(b, left, right))
    raise UntraceableError("a division that rounds toward zero; `//` rounds down")


@named("floor_divide")
def floor_divide(b: Builder, x: Node, y: Node) -> Node:
    if REAL in (x.kind, y.kind):
        raise UntraceableError("a division of real numbers that rounds down, which is no rounded quotient")
    return whole(b, "floordiv", x, y)


@named("remainder")
def remainder(b: Builder, x: Node, y: Node) -> Node:
    if REAL in (x.kind, y.kind):
        raise UntraceableError("a remainder of real numbers")
    return whole(b, "mod", x, y)


def whole(b: Builder, op: str, x: Node, y: Node) -> Node:
    if b.constant_of(y) == 0:
        raise UntraceableError("a division by 0")
    return b.op(op, *checked(op, x, y))


def of_two(op: str, name: str) -> None:
    def call(tracer: Any, *args: Any) -> Any:
        if len(args) != 2:
            raise UntraceableError(f"`{name}` over a dimension; of two values it is `torch.{op}(x, y)`")
        return tracer.proxy(tracer.builder.op(op, *(tracer.node(x) for x in args)))

    FUNCTIONS[name] = call


of_two("minimum", "min")
of_two("maximum", "max")


def shift(name: str, op: str) -> None:
    """A shift by a constant: a product with a power of two, or a quotient that rounds down."""

    def call(tracer: Any, x: Any, bits: Any) -> Any:
        b, node, n = tracer.builder, tracer.node(x), tracer.builder.constant_of(tracer.node(bits))
        if type(n) is not int or not 0 <= n < 63:
            raise UntraceableError("a shift by what is no constant from 0 to 62")
        if node.kind not in INTEGERS:
            raise UntraceableError("a shift of what is no integer")
        return tracer.proxy(b.op(op, node, b.constant(1 << n)))

    FUNCTIONS[name] = call


shift("bitwise_left_shift", "mul")
shift("bitwise_right_shift", "floordiv")


@special("clamp", "clip")
def clamp(tracer: Any, x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    """By conditions, as the derivative at a bound is that inside. Of integers, their range is known."""
    b, node = tracer.builder, tracer.node(x)
    limits = [None if bound is None else tracer.node(bound) for bound in (min, max)]
    given = [y for y in limits if y is not None]
    if not given or all(y.kind == BOOL for y in (node, *given)):
        raise UntraceableError("`clamp` of conditions, or without a bound")
    if len(given) == 2 and any(y.kind == REAL and b.constant_of(y) is None for y in given):
        raise UntraceableError("`clamp` between tensors, whose gradients PyTorch drops where they are equal")
    for limit, below, op in zip(limits, ("lt", "gt"), ("maximum", "minimum"), strict=True):
        if limit is not None and node.kind in INTEGERS and limit.kind in INTEGERS:
            node = b.op(op, node, limit)
        elif limit is not None:
            outside, known = b.op(below, node, limit), b.constant_of(limit)
            if limit.kind == REAL and (known is None or known != known):  # NaN hides what it bounds
                outside = b.op("or_", outside, b.op("ne", limit, limit))
            node = b.op("where", outside, limit, node)
    return tracer.proxy(node)


@special("clamp_min")
def clamp_min(tracer: Any, x: Any, min: Any) -> Any:  # noqa: A002
    return clamp(tracer, x, min=min)


@special("clamp_max")
def clamp_max(tracer: Any, x: Any, max: Any) -> Any:  # noqa: A002
    return clamp(tracer, x, max=max)


@named("square")
def square(b: Builder, x: Node) -> Node:
    return b.as_integer(x) if x.kind == BOOL else b.op("mul", x, x)


@named("reciprocal")
def reciprocal(b: Builder, x: Node) -> Node:
    return b.op("div", b.constant(1.0), x)


@named("exp2")
def exp2(b: Builder, x: Node) -> Node:
    return b.op("exp", b.op("mul", x, b.constant(math.log(2))))


@named("log2")
def log2(b: Builder, x: Node) -> Node:
    return b.op("mul", b.op("log", x), b.constant(1 / math.log(2)))


@named("floor")
def floor(b: Builder, x: Node) -> Node:
    [x] = checked("floor", x)
    return b.op("floor", x) if x.kind == REAL else x


@named("ceil")
def ceil(b: Builder, x: Node) -> Node:
    [x] = checked("floor", x)
    return b.op("neg", b.op("floor", b.op("neg", x))) if x.kind == REAL else x


@named("sign", "sgn")
def sign(b: Builder, x: Node) -> Node:
    return x if x.kind == BOOL else b.op("sign", x)


@special("pow")
def power(tracer: Any, x: Any, exponent: Any) -> Any:
    """`x ** n` for a number `n`: products for a whole one, else by logarithms."""
    b, base = tracer.builder, tracer.node(x)
    n = b.constant_of(tracer.node(exponent))
    if n is None:
        raise UntraceableError("a power whose exponent is no constant")
    if base.kind == BOOL or isinstance(n, bool):
        raise UntraceableError("a power of a condition")
    if base.kind in INTEGERS and isinstance(n, int):
        if n < 0:
            raise UntraceableError("a negative power of an integer")
    else:
        base = b.cast(base, REAL)
    if n in (0.5, -0.5):
        return tracer.proxy(b.op("sqrt" if n > 0 else "rsqrt", base))
    if not math.isfinite(n) or (n == int(n) and abs(n) > 64):
        raise UntraceableError(f"a power of {n}")
    if n != int(n):
        return tracer.proxy(by_logarithm(b, base, float(n)))
    result = b.constant(1 if base.kind in INTEGERS else 1.0)
    factor, left = (reciprocal(b, base) if n < 0 else base), int(abs(n))
    while left:
        result = b.op("mul", result, factor) if left & 1 else result
        factor, left = (b.op("mul", factor, factor) if left > 1 else factor), left >> 1
    return tracer.proxy(result)


def by_logarithm(b: Builder, x: Node, n: float) -> Node:
    """`x ** n` for an `n` that is no whole number. At 0 and infinity, where the derivative of the logarithm makes NaN
    of 0 * inf, it is another function of the same value and derivative there.
    """
    zero, infinity = b.constant(0.0), b.constant(math.inf)
    if n < 0:  # PyTorch's has no sign of 0 and of infinity
        size = b.op("where", b.op("eq", x, b.constant(-math.inf)), infinity, b.op("add", x, zero))
        return b.op("exp", b.op("mul", b.op("log", size), b.constant(n)))
    size = b.op("where", b.op("lt", x, zero), b.op("neg", x), b.op("add", x, zero))
    at_end = b.op("or_", b.op("eq", x, zero), b.op("eq", size, infinity))
    inside = b.op("where", at_end, b.constant(1.0), x)
    end = b.op("mul", size, size) if n > 1 else b.op("sqrt", size)
    return b.op("where", at_end, end, b.op("exp", b.op("mul", b.op("log", inside), b.constant(n))))


@named("logical_and")
def logical_and(b: Builder, x: Node, y: Node) -> Node:
    return b.op("and_", b.cast(x, BOOL), b.cast(y, BOOL))


@named("logical_or")
def logical_or(b: Builder, x: Node, y: Node) -> Node:
    return b.op("or_", b.cast(x, BOOL), b.cast(y, BOOL))


@named("logical_xor")
def logical_xor(b: Builder, x: Node, y: Node) -> Node:
    return b.op("xor", b.cast(x, BOOL), b.cast(y, BOOL))


@named("logical_not")
def logical_not(b: Builder, x: Node) -> Node:
    return b.op("not_", b.cast(x, BOOL))


@named("isnan")
def isnan(b: Builder, x: Node) -> Node:
    return b.op("ne", x, x) if x.kind == REAL else b.constant(False)


@named("masked_fill")
def masked_fill(b: Builder, x: Node, mask: Node, value: Node) -> Node:
    """The numbers keep their kind."""
    kinds = [BOOL, *INTEGERS, REAL]
    if mask.kind != BOOL:
        raise UntraceableError("`masked_fill` by what is no condition")
    if kinds.index(value.kind) > kinds.index(x.kind) and not {value.kind, x.kind} <= {*INTEGERS}:
        raise UntraceableError("`masked_fill` with a number of another kind")
    return b.op("where", mask, value, x)


@named("clone", "contiguous")
def clone(b: Builder, x: Node) -> Node:
    return x


@named("positive")
def positive(b: Builder, x: Node) -> Node:
    [x] = checked("neg", x)
    return x


# Conversions and constants --------------------------------------------------------------------------------------------


def converted(tracer: Any, x: Any, dtype: Any) -> Any:
    """A real rounds to float16 and bfloat16; for float32 and wider dtypes it stays in the accumulation dtype."""
    b, node = tracer.builder, tracer.node(x)
    if not isinstance(dtype, torch.dtype):
        raise UntraceableError(f"a conversion to {dtype!r}")
    if dtype is torch.bool:
        return tracer.proxy(b.cast(node, BOOL))
    if dtype.is_complex:
        raise UntraceableError("a conversion to complex numbers")
    if not dtype.is_floating_point:
        if dtype not in (torch.int32, torch.int64):
            raise UntraceableError(f"a conversion to {dtype}; torch.int32 and torch.int64 are accepted")
        wanted = INT32 if dtype is torch.int32 and node.kind == REAL else None
        return tracer.proxy(b.cast(node, wanted) if wanted else b.as_integer(node))
    node = b.cast(node, REAL)
    if dtype in (torch.float32, torch.float64):
        return tracer.proxy(node)
    if dtype not in NARROW:
        raise UntraceableError(f"a conversion to {dtype}")
    return tracer.proxy(b.round(node, NARROW[dtype]))


@special("to")
def to(tracer: Any, x: Any, dtype: Any = None, *_: Any, **options: Any) -> Any:
    dtype, device = options.get("dtype", dtype), options.get("device")
    if isinstance(dtype, torch.device | str):
        dtype, device = None, dtype
    if device is not None and device is not getattr(x, "device", None):
        raise UntraceableError("a conversion to another device")
    return tracer.proxy(tracer.node(x)) if dtype is None else converted(tracer, x, getattr(dtype, "dtype", dtype))


@special("type_as")
def type_as(tracer: Any, x: Any, other: Any) -> Any:
    return converted(tracer, x, other.dtype)


def conversion(name: str, dtype: torch.dtype) -> None:
    FUNCTIONS[name] = lambda tracer, x: converted(tracer, x, dtype)


for name in ("float", "double", "half", "bfloat16", "int", "long", "bool"):
    conversion(name, getattr(torch, name))


def filled(name: str, value: Any) -> None:
    def call(tracer: Any, x: Any, *args: Any, size: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Any:
        like, given = name.endswith("like"), [*args] if size is None else [size, *args]
        if not like and given.pop(0) not in ((), [], torch.Size([])):
            raise UntraceableError(f"`{name}` of a shape other than ()")
        fill = given[0] if value is None else value
        of: torch.dtype = x.dtype if dtype is None else dtype
        if not of.is_floating_point and of is not torch.bool:
            fill = int(fill)
        return converted(tracer, bool(fill) if of is torch.bool else fill, of)

    FUNCTIONS[name] = call


for name, value in {"zeros": 0, "ones": 1, "full": None}.items():
    filled(f"new_{name}", value)
    filled(f"{name}_like", value)
