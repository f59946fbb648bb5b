"""Stand-ins for the numbers and tensors that a traced function gets: their operations are recorded."""

import operator
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from ..private_torch import operator_types
from .builder import Builder, Node
from .functions import UntraceableError
from .program import BOOL, INTEGERS, REAL, TensorType


class Recorder(Protocol):
    """The trace that stand-ins belong to (`trace.Tracer`)."""

    builder: Builder

    def node(self, x: Any) -> Node: ...
    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def fail(self, reason: str) -> NoReturn: ...


def operation_name(func: Any) -> str:
    """The name of a torch function, method or property; an operator's name has its library."""
    if isinstance(func, operator_types()):
        return str(func)
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


NOTHING = torch.empty((), device="meta")


class Standing(Tensor):
    """A stand-in for a tensor. It is one for `isinstance`, without elements."""

    tracer: Recorder

    @classmethod
    def make(cls, tracer: Recorder) -> Self:
        made = Tensor._make_subclass(cls, NOTHING)
        made.tracer = tracer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        tracer = next(x.tracer for x in values if isinstance(x, Standing))
        return tracer.call(operation_name(func), args, kwargs or {})

    def changed(self, name: str, result: "Proxy") -> "Proxy":
        """Become the result of an operation in place: all that the function has of this number is changed then."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        self.tracer.fail("a branch depends on a value; `torch.where(condition, x, y)` chooses")

    def __float__(self) -> float:
        self.tracer.fail("Python asks for the value of a tensor")

    __int__ = __index__ = __len__ = __iter__ = __complex__ = __float__  # type: ignore[assignment]

    device = torch.device("cpu")
    requires_grad = False
    is_cuda = False


def method(name: str, *, swap: bool = False) -> Any:
    def call(self: Standing, *others: Any) -> Any:
        return self.tracer.call(name, (*others, self) if swap else (self, *others), {})

    return call


def in_place(name: str) -> Any:
    def call(self: Standing, other: Any) -> Any:
        return self.changed(name, self.tracer.call(name, (self, other), {}))

    return call


OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
UNARY_OPERATORS = {"neg": "neg", "abs": "abs", "invert": "bitwise_not", "pos": "positive"}
OTHERS = ("matmul", "rmatmul", "imatmul", "divmod", "rdivmod", "contains", "getitem", "setitem", "reversed", "array")
for symbol in OTHERS:
    setattr(Standing, f"__{symbol}__", method(f"__{symbol}__"))
for symbol, function_name in OPERATORS.items():
    setattr(Standing, f"__{symbol}__", method(function_name))
    setattr(Standing, f"__r{symbol}__", method(function_name, swap=True))
    setattr(Standing, f"__i{symbol}__", in_place(function_name))
for symbol, function_name in UNARY_OPERATORS.items():
    setattr(Standing, f"__{symbol}__", method(function_name))
for comparison in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Standing, f"__{comparison}__", method(comparison))


class Proxy(Standing):
    """The stand-in of a number of the pair."""

    node: Node

    shape = torch.Size([])
    ndim = 0

    @classmethod
    def of(cls, tracer: Recorder, node: Node) -> "Proxy":
        made = cls.make(tracer)
        made.node = node
        return made

    @property
    def dtype(self) -> torch.dtype:
        """Reals are of float32 for the function; they may be wider."""
        kind = self.node.kind
        return torch.float32 if kind == REAL else torch.bool if kind == BOOL else torch.int64

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return self.shape

    def is_floating_point(self) -> bool:
        return self.node.kind == REAL

    def changed(self, name: str, result: "Proxy") -> "Proxy":
        if self.dtype is not result.dtype:
            self.tracer.fail(f"`{name}` in place, which makes numbers of another kind")
        self.node = result.node
        return self

    __hash__ = object.__hash__


class Captured(Standing):
    """The stand-in of a captured tensor, some of whose first dimensions have indices already."""

    tensor: int
    indices: tuple[Node, ...]

    @classmethod
    def of(cls, tracer: Recorder, tensor: int, indices: tuple[Node, ...] = ()) -> "Captured":
        made = cls.make(tracer)
        made.tensor, made.indices = tensor, indices
        return made

    @property
    def tensor_type(self) -> TensorType:
        return self.tracer.builder.tensors[self.tensor]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.tensor_type.dtype)
        return torch.float32 if dtype.is_floating_point else dtype

    @property
    def ndim(self) -> int:
        return self.tensor_type.ndim - len(self.indices)

    @property
    def shape(self) -> tuple[Proxy, ...]:
        return tuple(self.size(n) for n in range(self.ndim))

    def dim(self) -> int:
        return self.ndim

    def size(self, dimension: int) -> Proxy:
        number = len(self.indices) + operator.index(dimension) % max(self.ndim, 1)
        return Proxy.of(self.tracer, self.tracer.builder.size(self.tensor, number))

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, indices: Any) -> "Captured":
        found = []
        for index in indices if isinstance(indices, tuple) else (indices,):
            if not isinstance(index, Standing | int | Tensor) or isinstance(index, bool):
                self.tracer.fail(f"a captured tensor is indexed by {index!r}; integers and index tensors are accepted")
            node = self.tracer.node(index)
            if node.kind not in INTEGERS:
                self.tracer.fail("a captured tensor is indexed by what is no integer")
            found.append(node)
        if len(found) > self.ndim:
            self.tracer.fail(f"a captured tensor of {self.tensor_type.ndim} dimensions has more indices")
        return Captured.of(self.tracer, self.tensor, (*self.indices, *found))

    def loaded(self) -> Node:
        if self.ndim > 0:
            raise UntraceableError(
                f"a captured tensor of {self.tensor_type.ndim} dimensions has {len(self.indices)} indices; a formula "
                "reads single elements"
            )
        return self.tracer.builder.load(self.tensor, list(self.indices))

    def changed(self, name: str, result: Proxy) -> NoReturn:
        self.tracer.fail(f"`{name}` in place, of an element of a tensor")

    __hash__ = object.__hash__
