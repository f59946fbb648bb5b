"""Trace a function of one pair, `(score, b, h, q_idx, k_idx, *tensors) -> score` or `(b, h, q_idx, k_idx, *tensors) ->
bool`, into a program: the function runs once, on stand-ins that record the operations.

The signatures are those of `score_mod` and `mask_mod` in Dong et al., "Flex Attention", 2024, section 3.
"""

import linecache
import operator
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import private_torch
from ..errors import AttentionError
from ..private_torch import operator_types
from . import activations  # noqa: F401 - adds its functions to FUNCTIONS
from .builder import Builder, Node
from .functions import FUNCTIONS, UntraceableError
from .program import BOOL, INPUTS, INTEGERS, REAL, Program, TensorType, type_of
from .purity import SCORE_MOD, Role, Watch

OTHERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))  # folders of frames that are not the user's


def trace(
    fn: Callable[..., Any], tensors: Sequence[Tensor] = (), role: Role = SCORE_MOD
) -> tuple[Program, list[Tensor]]:
    """The program of a function, and the tensors that it reads: its arguments `tensors`, then those that it finds in
    closures, globals and objects.

    Raises:
        UntraceableError: the function branches on a value, or calls what programs do not have; with its line.
        ArgumentError: it draws random numbers, or writes into a tensor that it has not made.
    """
    tracer = Tracer()
    arguments = [tracer.capture(x) for x in tensors]
    inputs = [Proxy(tracer, tracer.builder.input(name)) for name in INPUTS[role.hides :]]
    try:
        with GradEnabled(), Watch(fn, role), Operations(tracer):
            result = fn(*inputs, *arguments)
            kind, name = (BOOL, "a condition") if role.hides else (REAL, "a real tensor")
            if not isinstance(result, Standing) or (node := tracer.node(result)).kind != kind:
                raise UntraceableError(f"it does not return {name}")
    except AttentionError:
        raise
    except Exception as error:
        raise UntraceableError(f"{place(error)}{reason(error)}") from error
    return tracer.builder.program(node), tracer.tensors


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, UntraceableError) else f"{type(error).__name__}: {error}"


def place(error: Exception) -> str:
    """The line of the traced function where an error came up, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [x for x in frames if not x.filename.startswith(OTHERS)]
    if not frames:
        return ""
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"line {frames[-1].lineno}, `{line}`: " if line else f"line {frames[-1].lineno}: "


class Tracer:
    """The builder of one trace, and the tensors that the function reads."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.types: list[TensorType] = []  # of the tensors
        self.builder = Builder(self.types)
        self.captured: dict[int, Captured] = {}  # by the tensor's id
        self.made: dict[int, Tensor] = {}  # constants that the function made, by id

    def capture(self, x: Tensor) -> "Captured":
        """The stand-in of a tensor that the function reads. The same tensor may be several arguments."""
        if x.is_complex():
            raise UntraceableError("it reads a tensor of complex numbers")
        stand_in = Captured(self, len(self.tensors), ())
        self.tensors.append(x)
        self.types.append(type_of(x))
        self.captured.setdefault(id(x), stand_in)
        return stand_in

    def standing(self, x: Any) -> Any:
        """The stand-in of a tensor that the function has found; anything else stays."""
        if not isinstance(x, Tensor) or id(x) in self.made:
            return x
        return self.captured[id(x)] if id(x) in self.captured else self.capture(x)

    def node(self, x: Any) -> Node:
        """The node of an operand."""
        x = self.standing(x)
        if isinstance(x, Proxy):
            return x.node
        if isinstance(x, Captured):
            return x.loaded()
        if isinstance(x, Tensor):
            return self.builder.constant(x.item())
        if isinstance(x, bool | int | float):
            return self.builder.constant(x)
        raise UntraceableError(f"an operand is {type(x).__name__}")

    def proxy(self, node: Node) -> "Proxy":
        return Proxy(self, node)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():  # as inside of an autograd.Function, whose derivative is its own
            raise UntraceableError("an operation under torch.no_grad() or in a torch.autograd.Function")
        if name == "__getitem__":
            return self.standing(args[0])[args[1]]
        if name not in FUNCTIONS:
            raise UntraceableError(f"`{name}` is not an operation that can be traced")
        return FUNCTIONS[name](self, *args, **kwargs)


class GradEnabled:
    """`torch.enable_grad()` that torch.export, where it traces the caller, does not make a part of its program."""

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        self.set(True)

    def __exit__(self, *error: Any) -> None:
        self.set(self.before)

    def set(self, enabled: bool) -> None:
        with private_torch.without_torch_function():
            private_torch.set_grad_enabled(enabled)


class Operations(TorchFunctionMode):
    """Calls of torch functions by the traced function. Tensors without dimensions that it makes are constants."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        values += [y for x in values if isinstance(x, tuple | list) for y in x]
        if any(isinstance(x, Standing) for x in values):
            return self.tracer.call(operation_name(func), args, kwargs)
        result = func(*args, **kwargs)
        constant = all(id(x) in self.tracer.made for x in values if isinstance(x, Tensor))
        if isinstance(result, Tensor) and result.dim() == 0 and constant:
            self.tracer.made[id(result)] = result
        return result


def operation_name(func: Any) -> str:
    """The name of a torch function or method, or of a property; that of an operator with its library."""
    if isinstance(func, operator_types()):
        return str(func)
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


class Standing:
    """A stand-in for a tensor."""

    tracer: Tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        tracer = next(x.tracer for x in values if isinstance(x, Standing))
        return tracer.call(operation_name(func), args, kwargs or {})

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
    "pow": "pow", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor",
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
        """Reals are of float32 for the function; they may be wider."""
        kind = self.node.kind
        return torch.float32 if kind == REAL else torch.bool if kind == BOOL else torch.int64

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
        return torch.float32 if dtype.is_floating_point else dtype

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
