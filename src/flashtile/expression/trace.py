"""Trace a function of one pair, `(score, b, h, q_idx, k_idx, *tensors) -> score` or `(b, h, q_idx, k_idx, *tensors) ->
bool`, into a program: the function runs once, on stand-ins that note down what is done to them.

The signatures are those of `score_mod` and `mask_mod` in Dong et al., "Flex Attention", 2024, section 3.
"""

import linecache
import operator
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .builder import Builder, Node
from .functions import FUNCTIONS, UNKNOWN_TENSOR, UntraceableError
from .program import BOOL, INPUTS, INTEGERS, REAL, Program, TensorType


def trace(fn: Callable[..., Any], tensors: tuple[TensorType, ...], real: torch.dtype, *, mask: bool = False) -> Program:
    """The program of a function. `real` is the accumulation dtype, which is the score's for the function.

    Raises:
        UntraceableError: the function branches on a value, or calls what programs do not have; with its line.
    """
    tracer = Tracer(Builder(tensors), real)
    inputs = [Proxy(tracer, tracer.builder.input(name)) for name in INPUTS[mask:]]
    captured = [Captured(tracer, n, ()) for n in range(len(tensors))]
    try:
        with Fresh(tracer):
            node = tracer.node(fn(*inputs, *captured))
            if node.kind != (BOOL if mask else REAL):
                raise UntraceableError(f"it returns {'a number' if mask else 'no real number'}")
    except Exception as error:
        raise UntraceableError(f"{place(error, fn)}{reason(error)}") from error
    return tracer.builder.program(node)


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, UntraceableError) else f"{type(error).__name__}: {error}"


def place(error: Exception, fn: Any) -> str:
    """The line of the traced function where an error came up, and its text."""
    ours = (__file__, FUNCTIONS["add"].__code__.co_filename)
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename not in ours]
    frames = [x for x in frames if f"{torch.__name__}/" not in x.filename.replace("\\", "/")]
    if not frames:
        return ""
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"line {frames[-1].lineno}, `{line}`: " if line else f"line {frames[-1].lineno}: "


class Tracer:
    """The builder of one trace, and the conversion of what functions pass to it."""

    def __init__(self, builder: Builder, real: torch.dtype):
        self.builder, self.real = builder, real
        self.fresh: dict[int, Tensor] = {}  # tensors without dimensions that the function made, by id

    def node(self, x: Any) -> Node:
        """The node of an operand."""
        if isinstance(x, Proxy):
            return x.node
        if isinstance(x, Captured):
            return x.loaded()
        if isinstance(x, bool | int | float):
            return self.builder.constant(x)
        if isinstance(x, Tensor) and id(x) in self.fresh:
            return self.builder.constant(x.item())
        if isinstance(x, Tensor):
            raise UntraceableError(UNKNOWN_TENSOR)
        raise UntraceableError(f"an operand is {type(x).__name__}")

    def proxy(self, node: Node) -> "Proxy":
        return Proxy(self, node)

    def dtype(self, node: Node) -> torch.dtype:
        return self.real if node.kind == REAL else torch.bool if node.kind == BOOL else torch.int64

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in FUNCTIONS:
            raise UntraceableError(f"`{name}` is not an operation that can be traced")
        return FUNCTIONS[name](self, *args, **kwargs)


class Fresh(TorchFunctionMode):
    """Calls of torch functions by the traced function. Tensors without dimensions that it makes are constants."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        values += [y for x in values if isinstance(x, tuple | list) for y in x]
        if any(isinstance(x, Standing) for x in values):
            return self.tracer.call(name_of(func), args, kwargs)
        result = func(*args, **kwargs)
        known = all(id(x) in self.tracer.fresh for x in values if isinstance(x, Tensor))
        if isinstance(result, Tensor) and result.dim() == 0 and known:
            self.tracer.fresh[id(result)] = result
        return result


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return name if name not in ("__get__", "__set__") else func.__self__.__name__


class Standing:
    """A stand-in for a tensor."""

    tracer: Tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        tracer = next(x.tracer for x in values if isinstance(x, Standing))
        return tracer.call(name_of(func), args, kwargs or {})

    def __bool__(self) -> bool:
        raise UntraceableError("a branch depends on a value; `torch.where(condition, x, y)` chooses")

    def __float__(self) -> float:
        raise UntraceableError("Python asks for the value of a tensor")

    __int__ = __index__ = __len__ = __iter__ = __float__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FUNCTIONS:
            raise UntraceableError(f"`{name}` is not an operation that can be traced")
        return lambda *args, **kwargs: self.tracer.call(name, (self, *args), kwargs)

    device = torch.device("cpu")
    requires_grad = False
    is_cuda = False


def method(name: str, *, swap: bool = False) -> Any:
    def call(self: Standing, *others: Any) -> Any:
        return self.tracer.call(name, (*others, self) if swap else (self, *others), {})

    return call


OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
UNARY_OPERATORS = {"neg": "neg", "abs": "abs", "invert": "bitwise_not", "pos": "clone"}
for symbol, function_name in OPERATORS.items():
    setattr(Standing, f"__{symbol}__", method(function_name))
    setattr(Standing, f"__r{symbol}__", method(function_name, swap=True))
for symbol, function_name in UNARY_OPERATORS.items():
    setattr(Standing, f"__{symbol}__", method(function_name))
for comparison in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Standing, f"__{comparison}__", method(comparison))


class Proxy(Standing):
    """The stand-in of a number of the pair."""

    shape = torch.Size([])
    ndim = 0

    def __init__(self, tracer: Tracer, node: Node):
        self.tracer, self.node = tracer, node

    @property
    def dtype(self) -> torch.dtype:
        return self.tracer.dtype(self.node)

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return self.shape

    def is_floating_point(self) -> bool:
        return self.node.kind == REAL

    __hash__ = object.__hash__


class Captured(Standing):
    """The stand-in of a captured tensor, some of whose first dimensions have indices already."""

    def __init__(self, tracer: Tracer, tensor: int, indices: tuple[Node, ...]):
        self.tracer, self.tensor, self.indices = tracer, tensor, indices

    @property
    def type(self) -> TensorType:
        return self.tracer.builder.tensors[self.tensor]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.type.dtype)
        return self.tracer.real if dtype.is_floating_point else dtype

    @property
    def ndim(self) -> int:
        return self.type.ndim - len(self.indices)

    @property
    def shape(self) -> tuple[Proxy, ...]:
        return tuple(self.size(n) for n in range(self.ndim))

    def dim(self) -> int:
        return self.ndim

    def size(self, dimension: int) -> Proxy:
        number = len(self.indices) + operator.index(dimension) % max(self.ndim, 1)
        return Proxy(self.tracer, self.tracer.builder.size(self.tensor, number))

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, indices: Any) -> "Captured":
        found = []
        for index in indices if isinstance(indices, tuple) else (indices,):
            if not isinstance(index, Standing | int | Tensor) or isinstance(index, bool):
                raise UntraceableError(
                    f"a captured tensor is indexed by {index!r}; integers and index tensors are accepted"
                )
            node = self.tracer.node(index)
            if node.kind not in INTEGERS:
                raise UntraceableError("a captured tensor is indexed by what is no integer")
            found.append(node)
        if len(found) > self.ndim:
            raise UntraceableError(f"a captured tensor of {self.type.ndim} dimensions has more indices")
        return Captured(self.tracer, self.tensor, (*self.indices, *found))

    def loaded(self) -> Node:
        if self.ndim > 0:
            raise UntraceableError(
                f"a captured tensor of {self.type.ndim} dimensions has {len(self.indices)} indices; a formula reads "
                "single elements"
            )
        return self.tracer.builder.load(self.tensor, list(self.indices))

    __hash__ = object.__hash__
