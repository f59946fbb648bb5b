"""`triton.experimental.gluon.language` and `triton.language` on CPU tensors."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from .assembly import inline_asm_elementwise  # noqa: F401
from .machine import machine
from .memory import atomic_add, load, store  # noqa: F401
from .values import UNSIGNED, Pointer, Shared, Value, as_tensor, unwrap

float64, float32, float16, bfloat16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
float8e4nv = torch.float8_e4m3fn
int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint32, uint64 = UNSIGNED
tensor, shared_memory_descriptor, pointer_type = Value, Shared, Pointer
static_range = range


class Constant(int):
    """A compile-time constant that host code reads too."""

    @property
    def value(self) -> int:
        return int(self)


def constexpr(x: Any) -> Any:
    return Constant(x) if type(x) is int else x


class PropagateNan(Enum):
    """The treatment of NaN by minimum and maximum."""

    NONE = 0
    ALL = 1


class Layout:
    """Any layout; layouts have no effect here."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    @classmethod
    def get_default_for(cls, *args: Any) -> "Layout":
        return cls()


SliceLayout = BlockedLayout = SwizzledSharedLayout = NVMMASharedLayout = NVMMADistributedLayout = Layout
DotOperandLayout = DistributedLinearLayout = Layout


def program_id(axis: int) -> Value:
    return Value(as_tensor(machine().current_task().program.number))


def num_programs(axis: int) -> Value:
    return Value(as_tensor(machine().num_programs))


def num_warps() -> int:
    return machine().current_task().num_warps


def warp_specialize(
    functions: Sequence[tuple[Callable[..., None], tuple]], warps: Sequence[int], registers: Sequence[int], **_: Any
) -> None:
    """Run functions as partitions; the first one has the warps that the kernel started with."""
    assert len(functions) == len(warps) + 1 == len(registers) + 1
    task = machine().current_task()
    partitions = [
        machine().add(task.program, f"{task.name}, partition {n} ({f.__name__})", count, lambda f=f, a=a: f(*a))
        for n, ((f, a), count) in enumerate(zip(functions, (task.num_warps, *warps), strict=True))
    ]
    machine().wait(lambda: all(task.done for task in partitions), "its partitions")


def thread_barrier() -> None:
    """No effect: a partition is one thread here."""


def arange(start: int, stop: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, stop, dtype=torch.int32))


def full(shape: Sequence[int], x: Any, dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.as_tensor(unwrap(x)).to(dtype).expand(list(shape)))


def cast(x: Any, dtype: torch.dtype) -> Value:
    return Value(as_tensor(unwrap(x))).to(dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.zeros(list(shape), dtype=dtype))


def full_like(x: Value, value: float) -> Value:
    return Value(torch.full_like(x.tensor, value))


def expand_dims(x: Value, axis: int) -> Value:
    return Value(x.tensor.unsqueeze(axis))


def reshape(x: Value, shape: Sequence[int]) -> Value:
    return x.reshape(shape)


def permute(x: Value, order: Sequence[int]) -> Value:
    return x.permute(order)


def static_assert(condition: Any) -> None:
    assert condition


def split(x: Value) -> tuple[Value, Value]:
    return x.split()


def join(left: Value, right: Value) -> Value:
    return Value(torch.stack((left.tensor, right.tensor), -1))


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    """No effect. It may use shared memory that has been read for the last time, though a copy to it is in flight."""
    if not assert_trivial:
        machine().current_task().check_copied("converts a layout")
    return x


def where(condition: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(torch.as_tensor(unwrap(condition)), unwrap(a), unwrap(b)))


def minimum(a: Any, b: Any, propagate_nan: PropagateNan = PropagateNan.NONE) -> Value:
    """NaN loses by default, as on a GPU."""
    function = torch.fmin if propagate_nan is PropagateNan.NONE else torch.minimum
    return Value(function(as_tensor(unwrap(a)), as_tensor(unwrap(b))))


def maximum(a: Any, b: Any, propagate_nan: PropagateNan = PropagateNan.NONE) -> Value:
    """NaN loses by default, as on a GPU."""
    function = torch.fmax if propagate_nan is PropagateNan.NONE else torch.maximum
    return Value(function(as_tensor(unwrap(a)), as_tensor(unwrap(b))))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def max(x: Value, axis: int) -> Value:  # noqa: A001
    values = x.tensor
    if values.is_floating_point():
        is_nan = values.isnan()
        return Value(torch.where(is_nan.all(axis), torch.nan, values.masked_fill(is_nan, -torch.inf).amax(axis)))
    return Value(values.amax(axis))


def min(x: Value, axis: int) -> Value:  # noqa: A001
    return Value(-max(Value(-x.tensor), axis).tensor)


def cumsum(x: Value, axis: int) -> Value:
    return Value(x.tensor.cumsum(axis, dtype=x.dtype))


def sum(x: Value, axis: int | None = None) -> Value:  # noqa: A001
    return Value(x.tensor.sum(axis))


def abs(x: Value) -> Value:  # noqa: A001
    return Value(x.tensor.abs())


def fma(x: Any, y: Any, z: Any) -> Value:
    """Rounded once."""
    product = as_tensor(unwrap(x)).double() * as_tensor(unwrap(y)).double()
    return Value((product + as_tensor(unwrap(z)).double()).to(torch.float32))


def exp2(x: Value) -> Value:
    return Value(torch.exp2(x.tensor))


def log2(x: Value) -> Value:
    return Value(torch.log2(x.tensor))


def log(x: Value) -> Value:
    return Value(torch.log(x.tensor))


def sqrt(x: Value) -> Value:
    return Value(torch.sqrt(x.tensor))


def rsqrt(x: Value) -> Value:
    return Value(torch.rsqrt(x.tensor))


def erf(x: Value) -> Value:
    return Value(torch.erf(x.tensor))


def floor(x: Value) -> Value:
    return Value(torch.floor(x.tensor))


def ceil(x: Value) -> Value:
    return Value(torch.ceil(x.tensor))


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any = None) -> Any:
    if not hasattr(layout, "barriers"):
        data = torch.empty(list(shape), dtype=dtype)
        return Shared(data.fill_(torch.nan if dtype.is_floating_point else -(2 ** (8 * dtype.itemsize - 2))))
    return layout.barriers(shape[0])
