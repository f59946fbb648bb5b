"""Gluon's values: scalars and tensors with a GPU's arithmetic, pointers, and shared memory."""

import functools
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .machine import EmulationError, machine

LAYOUT = SimpleNamespace(layout=None)
UNSIGNED = ("uint32", "uint64")  # dtypes; values of 64 bits hold what kernels make of them


def unwrap(x: Any) -> Any:
    """A value's tensor; other objects as they are."""
    return x.tensor if isinstance(x, Value) else x


def divide(a: Any, b: Any) -> Tensor:
    return torch.div(as_tensor(a), b, rounding_mode="trunc")


def remainder(a: Any, b: Any) -> Tensor:
    return torch.fmod(as_tensor(a), b)


def as_tensor(x: Any) -> Tensor:
    """A scalar as a kernel receives it: 32 bits if they suffice."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int):
        return torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    return torch.tensor(x, dtype=torch.float32)


class Value:
    """A scalar or a tensor in registers."""

    type = LAYOUT

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def T(self) -> "Value":  # noqa: N802
        return Value(self.tensor.mT)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)

    __int__ = __index__

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.tensor[index])

    def to(self, dtype: Any, bitcast: bool = False) -> "Value":
        if dtype in UNSIGNED:
            x = self.tensor.long()
            return Value(x & 0xFFFFFFFF if dtype == "uint32" else torch.where(x < 0, 2**63 - 1, x))
        if bitcast:
            return Value(self.tensor.contiguous().view(dtype))
        return Value(self.tensor.to(dtype))

    def reshape(self, shape: Sequence[int]) -> "Value":
        return Value(self.tensor.reshape(list(shape)))

    def permute(self, order: Sequence[int]) -> "Value":
        return Value(self.tensor.permute(*order))

    def split(self) -> tuple["Value", "Value"]:
        return Value(self.tensor[..., 0]), Value(self.tensor[..., 1])

    def broadcast_to(self, shape: Sequence[int]) -> "Value":
        return Value(self.tensor.expand(list(shape)))

    def __hash__(self) -> int:
        return id(self)

    def __neg__(self) -> "Value":
        return Value(-self.tensor)

    def __invert__(self) -> "Value":
        return Value(~self.tensor)


def add_operators() -> None:
    """C's integer rules: division rounds towards 0."""
    binary: dict[str, Callable[[Any, Any], Any]] = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
        "floordiv": divide, "mod": remainder, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
        "lshift": operator.lshift, "rshift": operator.rshift,
    }  # fmt: skip

    def define(name: str, function: Callable[[Any, Any], Any]) -> None:
        def direct(self: Value, other: Any) -> Any:
            if isinstance(other, Value):
                other = other.tensor
            elif isinstance(other, Pointer):
                return NotImplemented
            return Value(function(self.tensor, other))

        def reflected(self: Value, other: Any) -> Value:
            return Value(function(unwrap(other), self.tensor))

        setattr(Value, f"__{name}__", direct)
        setattr(Value, f"__r{name}__", reflected)

    for name, function in binary.items():
        define(name, function)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        compare = getattr(operator, name)
        setattr(Value, f"__{name}__", lambda self, other, f=compare: Value(f(self.tensor, unwrap(other))))


class Pointer:
    """Elements of a tensor's memory, counted from its first one."""

    def __init__(self, base: Tensor, offset: Any = 0, memory: "Memory | None" = None):
        self.base, self.offset, self.of_base = base, offset, memory or Memory(base)
        self.dtype = self.of_base.dtype

    def __add__(self, more: Any) -> "Pointer":
        more = unwrap(more)
        return Pointer(self.base, self.offset + (more.long() if isinstance(more, Tensor) else more), self.of_base)

    def to(self, dtype: Any) -> "Pointer":
        return self

    @property
    def shape(self) -> list[int]:
        return list(torch.as_tensor(self.offset).shape)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.base, torch.as_tensor(self.offset)[index], self.of_base)

    def at(self, mask: Any) -> Tensor:
        """Offsets `[...]`, 0 where masked; the others have to be in bounds."""
        offset = torch.as_tensor(self.offset)
        if mask is None:
            self.of_base.check_extent(offset)
            return offset
        offset, selected = torch.broadcast_tensors(offset, torch.as_tensor(unwrap(mask)))
        self.of_base.check_extent(offset[selected])
        return torch.where(selected, offset, 0)

    def memory(self) -> Tensor:
        return self.of_base.elements


class Memory:
    """What pointers to one tensor share: its storage from its first element on, and how far it reaches."""

    def __init__(self, base: Tensor):
        self.base, self.dtype = base, SimpleNamespace(element_ty=base.dtype)

    @functools.cached_property
    def elements(self) -> Tensor:
        x = self.base
        if x.numel() == 0:
            return x.new_zeros(1)
        storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return storage[x.storage_offset() :]

    @functools.cached_property
    def extent(self) -> int:
        return extent_of(self.base)

    def check_extent(self, offset: Tensor) -> None:
        if offset.dim() == 0:
            first = last = int(offset)
        elif offset.numel() > 0:
            first, last = (int(x) for x in torch.aminmax(offset))
        else:
            return
        if not 0 <= first <= last < self.extent:
            refuse(self.base, first, last)


def extent_of(x: Tensor) -> int:
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() > 0 else 0


def check_range(x: Tensor, first: int, last: int) -> None:
    if not 0 <= first <= last < extent_of(x):
        refuse(x, first, last)


def refuse(x: Tensor, first: int, last: int) -> None:
    name = machine().current_task().name
    raise EmulationError(f"{name} reaches elements {first} to {last} of {list(x.shape)}, {x.stride()}")


class Shared:
    """Shared memory or a view of it; initially NaN."""

    def __init__(self, data: Tensor):
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def span(self) -> tuple[int, int]:
        """First address and end address."""
        start = self.data.data_ptr()
        last = sum((n - 1) * stride for n, stride in zip(self.data.shape, self.data.stride(), strict=True))
        return start, start + (last + 1) * self.data.element_size()

    def index(self, n: Any) -> "Shared":
        n = int(n)
        if not 0 <= n < len(self.data):
            raise EmulationError(f"index {n} of {len(self.data)}")
        return Shared(self.data[n])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(list(shape)))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def load(self, layout: Any = None) -> Value:
        machine().current_task().check_copied("reads memory", self)
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise EmulationError(f"{value.shape} {value.dtype} stored to {self.shape} {self.dtype}")
        task = machine().current_task()
        task.check_copied("writes memory", self)
        task.program.writes += 1
        task.clock[task] = task.program.writes
        task.program.unfenced[self.span] = task, task.program.writes
        self.data.copy_(value.tensor)

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int]) -> "Shared":
        size = torch.empty(0, dtype=dtype).element_size()
        for n in shape:
            size *= n
        return Shared(self.data.reshape(-1).view(torch.uint8)[:size].view(dtype).view(list(shape)))

    def check_fenced(self) -> None:
        """Require a proxy fence after the last write, by the writer or by a task that knows of the write."""
        program = machine().current_task().program
        if not program.unfenced:
            return
        first, last = self.span
        for (start, stop), (writer, _) in program.unfenced.items():
            if start < last and first < stop:
                raise EmulationError(
                    f"{machine().current_task().name} passes on a write of {writer.name} without a fence"
                )


class Boxes:
    """Shared memory `[stages, ..., R, W]` as boxes `[n, ..., r, w]`, which are counted along the rows of a panel of `w`
    columns, then by panel, as they lie in memory.
    """

    def __init__(self, data: Tensor, rows: int, columns: int):
        self.data, self.rows, self.columns = data, rows, columns

    @classmethod
    def of(cls, memory: Shared, shape: Sequence[int]) -> "Boxes | None":
        """`None` if the shape is the memory's own, or not one of boxes."""
        own, (rows, columns) = memory.shape, shape[-2:]
        alike = len(own) == len(shape) and own[1:-2] == list(shape[1:-2]) and own != list(shape)
        if not alike or own[-2] % rows != 0 or own[-1] % columns != 0:
            return None
        boxes = cls(memory.data, rows, columns)
        return boxes if boxes.count == shape[0] else None

    @property
    def count(self) -> int:
        return self.data.numel() // (self.data[0, ..., : self.rows, : self.columns]).numel()

    def index(self, n: Any) -> Shared:
        parts, panels = self.data.shape[-2] // self.rows, self.data.shape[-1] // self.columns
        stage, rest = divmod(int(n), parts * panels)
        panel, part = divmod(rest, parts)
        if not 0 <= int(n) < self.count:
            raise EmulationError(f"box {int(n)} of {self.count}")
        rows = self.data[stage].narrow(-2, part * self.rows, self.rows)
        return Shared(rows.narrow(-1, panel * self.columns, self.columns))


add_operators()
