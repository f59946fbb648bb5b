"""Trace a function of one pair, `(score, b, h, q_idx, k_idx, *tensors) -> score` or `(b, h, q_idx, k_idx, *tensors) ->
bool`, into a program: the function runs once, on stand-ins that record the operations.

The signatures follow `score_mod` and `mask_mod` in Dong et al., "Flex Attention", 2024, section 3.
"""

import linecache
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import private_torch
from ..errors import AttentionError
from ..private_torch import tree_leaves
from . import activations  # noqa: F401 - adds its functions to FUNCTIONS
from .builder import Builder, Node
from .functions import FUNCTIONS, ComputedError, UntraceableError
from .program import BOOL, INPUTS, REAL, Program, TensorType, type_of
from .purity import SCORE_MOD, Role, Watch
from .stand_ins import Captured, Proxy, Standing, operation_name

COMPUTED = (
    "`{}` reads the values of a whole tensor, which may change: the function is traced in each call. Make its result "
    "before, and pass that as a tensor"
)
METADATA = frozenset({  # that functions read of a tensor, without its values
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "stride", "dtype", "device", "layout",
    "is_floating_point", "is_complex", "is_contiguous", "requires_grad", "element_size", "itemsize", "is_cuda",
    "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "get_device", "is_leaf", "grad_fn", "names",
})  # fmt: skip
OTHERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))  # folders of frames that are not the user's


def trace(
    fn: Callable[..., Any], tensors: Sequence[Tensor] = (), role: Role = SCORE_MOD, *, once: bool = False
) -> tuple[Program, list[Tensor]]:
    """The program of a function, and the tensors that it reads: its arguments `tensors`, then those that it finds in
    closures, globals and objects. `once`, the program is for later calls too, in which their values may be others.

    Raises:
        UntraceableError: the function branches on a value, or calls what programs do not have; with its line.
        ComputedError: with `once`, it calculates with whole tensors that it finds, or asks for their values.
        ArgumentError: it draws random numbers, or writes into a tensor that it has not made.
    """
    tracer = Tracer(once)
    arguments = [tracer.capture(x) for x in tensors]
    inputs = [Proxy.of(tracer, tracer.builder.input(name)) for name in INPUTS[role.hides :]]
    try:
        with GradEnabled(), Watch(fn, role), Operations(tracer):
            result = fn(*inputs, *arguments)
            if tracer.failed is not None:
                raise tracer.failed  # the function has caught it, and has done something else instead
            kind, name = (BOOL, "a condition") if role.hides else (REAL, "a real tensor")
            if not isinstance(result, Standing) or (node := tracer.node(result)).kind != kind:
                raise UntraceableError(f"it does not return {name}")
    except AttentionError:
        raise
    except Exception as error:
        kind_of_error = ComputedError if isinstance(error, ComputedError) else UntraceableError
        raise kind_of_error(f"{place(error)}{reason(error)}") from error
    finally:
        tracer.failed = None  # whose frames have the tracer: a cycle
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


class Computed(NamedTuple):
    """A tensor that a function has computed from tensors that it found, by the function `name`; `args` are `None` where
    this is no operation of single numbers.
    """

    tensor: Tensor
    name: str
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]


class Tracer:
    """The builder of one trace, and the tensors that the function reads."""

    def __init__(self, once: bool = False) -> None:
        self.once = once
        self.tensors: list[Tensor] = []
        self.types: list[TensorType] = []  # types of the tensors
        self.builder = Builder(self.types)
        self.captured: dict[int, Captured] = {}  # by the tensor's id
        self.made: dict[int, Tensor] = {}  # tensors that follow from constants alone, by id
        self.computed: dict[int, Computed] = {}  # from captured tensors, by id
        self.failed: Exception | None = None  # the first error, which the function may catch

    def capture(self, x: Tensor) -> Captured:
        """The stand-in of a tensor that the function reads. The same tensor may be several arguments."""
        if x.is_complex():
            raise UntraceableError("it reads a tensor of complex numbers")
        if x.dtype is torch.uint64:
            raise UntraceableError("it reads a tensor of uint64, whose largest numbers have no int64")
        stand_in = Captured.of(self, len(self.tensors))
        self.tensors.append(x)
        self.types.append(type_of(x))
        self.captured.setdefault(id(x), stand_in)
        return stand_in

    def standing(self, x: Any) -> Any:
        """The stand-in of a tensor that the function has found; anything else stays."""
        if isinstance(x, Standing) or not isinstance(x, Tensor) or (id(x) in self.made and x.dim() == 0):
            return x
        if id(x) in self.captured:
            return self.captured[id(x)]
        return self.recomputed(self.computed[id(x)]) if id(x) in self.computed else self.capture(x)

    def recomputed(self, x: "Computed") -> Any:
        """The stand-in of a tensor that was computed from captured ones: their operation is a part of the program where
        it is one of single numbers.
        """
        if x.args is not None:
            try:
                return self.run(x.name, x.args, x.kwargs)
            except UntraceableError:
                pass
        if self.once:
            raise ComputedError(COMPUTED.format(x.name))
        return self.capture(x.tensor)

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

    def proxy(self, node: Node) -> Proxy:
        return Proxy.of(self, node)

    def fail(self, reason: str) -> NoReturn:
        """Raise an error, and again when the function is done, which may catch it."""
        error = UntraceableError(reason)
        self.failed = self.failed or error
        raise error

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if not torch.is_grad_enabled():  # as inside of an autograd.Function, whose derivative is its own
                raise UntraceableError("an operation under torch.no_grad() or in a torch.autograd.Function")
            return self.run(name, args, kwargs)
        except Exception as error:
            self.failed = self.failed or error
            raise

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__getitem__":
            return self.standing(args[0])[args[1]]
        if name not in FUNCTIONS:
            raise UntraceableError(f"`{name}` is not an operation that can be traced")
        return FUNCTIONS[name](self, *args, **kwargs)

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what the results of an operation on tensors, which has run, follow from."""
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if all(id(x) in self.made for x in inputs):
            self.made.update({id(x): x for x in results})
        elif name not in METADATA:
            if not results and self.once:
                self.failed = self.failed or ComputedError(COMPUTED.format(name))
                raise self.failed
            changed = [x for x in inputs if not results or any(x is y for y in results)]  # perhaps, in place
            single = torch.is_grad_enabled() and isinstance(result, Tensor) and is_single(name, args, inputs)
            for x in results:
                if all(x is not y for y in inputs):
                    self.computed[id(x)] = Computed(x, name, args if single else None, kwargs)
            for x in changed:
                if self.made.pop(id(x), None) is not None or id(x) in self.computed:
                    self.computed[id(x)] = Computed(x, name, None, kwargs)


def is_single(name: str, args: tuple[Any, ...], inputs: list[Tensor]) -> bool:
    """Whether an operation on tensors is one of single numbers, or reads a single element."""
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return len(indices) == args[0].dim() and all(type(n) is int for n in indices)
    return all(x.dim() == 0 for x in inputs)


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
    """Calls of torch functions by the traced function: of stand-ins, or of tensors that it makes or finds."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Standing) for x in tree_leaves((args, kwargs))):
            return self.tracer.call(operation_name(func), args, kwargs)
        result = func(*args, **kwargs)
        self.tracer.note(operation_name(func), args, kwargs, result)
        return result
