"""What `triton.experimental.gluon.language` and `triton.language` are to the kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import instructions
from .machine import EmulationError, machine, tell
from .values import Pointer, Shared, Value, as_tensor, plain

float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
int32, int64 = torch.int32, torch.int64
tensor, shared_memory_descriptor = Value, Shared
static_range = range


def constexpr(x: Any) -> Any:
    return x


class Layout:
    """Of which nothing is known here."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    @classmethod
    def get_default_for(cls, *args: Any) -> "Layout":
        return cls()


SliceLayout = BlockedLayout = SwizzledSharedLayout = NVMMASharedLayout = NVMMADistributedLayout = Layout
DotOperandLayout = Layout


def program_id(axis: int) -> Value:
    return Value(as_tensor(machine().here().program.number))


def num_programs(axis: int) -> Value:
    return Value(as_tensor(machine().num_programs))


def num_warps() -> int:
    return machine().here().num_warps


def warp_specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple]], warps: Sequence[int], registers: Sequence[int]
) -> None:
    """Run functions side by side; the first one has the warps that the kernel began with."""
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    here = machine().here()
    others = [
        machine().add(here.program, f"{here.name}, partition {n} ({f.__name__})", count, lambda f=f, a=a: f(*a))
        for n, ((f, a), count) in enumerate(zip(partitions, (here.num_warps, *warps), strict=True))
    ]
    machine().wait(lambda: all(task.done for task in others), "its partitions")


def thread_barrier() -> None:
    """A partition is one thread here."""


def arange(start: int, stop: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, stop, dtype=torch.int32))


def full(shape: Sequence[int], x: Any, dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.as_tensor(plain(x)).to(dtype).expand(list(shape)))


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.zeros(list(shape), dtype=dtype))


def full_like(x: Value, value: float) -> Value:
    return Value(torch.full_like(x.tensor, value))


def expand_dims(x: Value, axis: int) -> Value:
    return Value(x.tensor.unsqueeze(axis))


def reshape(x: Value, shape: Sequence[int]) -> Value:
    return Value(x.tensor.reshape(list(shape)))


def permute(x: Value, order: Sequence[int]) -> Value:
    return Value(x.tensor.permute(*order))


def static_assert(condition: Any) -> None:
    assert condition


def split(x: Value) -> tuple[Value, Value]:
    return Value(x.tensor[..., 0]), Value(x.tensor[..., 1])


def join(left: Value, right: Value) -> Value:
    return Value(torch.stack((left.tensor, right.tensor), -1))


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return x


def where(condition: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(torch.as_tensor(plain(condition)), plain(a), plain(b)))


def minimum(a: Any, b: Any) -> Value:
    """NaN loses, as on a GPU."""
    return Value(torch.fmin(as_tensor(plain(a)), as_tensor(plain(b))))


def maximum(a: Any, b: Any) -> Value:
    return Value(torch.fmax(as_tensor(plain(a)), as_tensor(plain(b))))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def max(x: Value, axis: int) -> Value:  # noqa: A001
    found = x.tensor
    if found.is_floating_point():
        hidden = found.isnan()
        return Value(torch.where(hidden.all(axis), torch.nan, found.masked_fill(hidden, -torch.inf).amax(axis)))
    return Value(found.amax(axis))


def sum(x: Value, axis: int) -> Value:  # noqa: A001
    return Value(x.tensor.sum(axis))


def abs(x: Value) -> Value:  # noqa: A001
    return Value(x.tensor.abs())


def exp2(x: Value) -> Value:
    return Value(torch.exp2(x.tensor))


def fma(a: Any, b: Any, c: Any) -> Value:
    return Value(torch.addcmul(as_tensor(plain(c)), as_tensor(plain(a)), as_tensor(plain(b))))


def log2(x: Value) -> Value:
    return Value(torch.log2(x.tensor))


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    found = pointer.memory()[pointer.at(mask)].clone()
    if mask is not None:
        assert other is not None
        found = torch.where(torch.as_tensor(plain(mask)), found, torch.as_tensor(other, dtype=found.dtype))
    return Value(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, memory = pointer.at(mask), pointer.memory()
    given = torch.as_tensor(plain(value)).to(memory.dtype).expand(at.shape)
    if mask is not None:
        chosen = torch.as_tensor(plain(mask)).expand(at.shape)
        at, given = at[chosen], given[chosen]
    memory[at] = given


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str = "gpu") -> Value:
    machine().pause()
    before = load(pointer)
    store(pointer, before.tensor + value)
    return before


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any = None) -> Any:
    if not hasattr(layout, "barriers"):
        data = torch.empty(list(shape), dtype=dtype)
        return Shared(data.fill_(torch.nan if dtype.is_floating_point else -(2**30)))
    return layout.barriers(shape[0])


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """The instructions that Gluon has no name for."""
    if asm.startswith("bar.sync $1, $2;"):
        meet(int(args[0]), int(args[1]) // 32)
    elif asm.startswith("bar.arrive $1, $2;"):
        come(int(args[0]), int(args[1]) // 32)
    elif asm.startswith("cp.async.bulk.wait_group 0;"):
        task = machine().here()
        machine().wait(lambda: all(store.written for store in task.stores), "its results to arrive")
        task.stores.clear()
        task.unread.clear()
    elif asm.startswith("ld.acquire.gpu.global.b32 $0, [$1];"):
        return changed(args[0])
    elif asm.startswith("fence.proxy.async.global;"):
        machine().here().seen.clear()  # it stands behind the loop that asks
    elif asm != "mov.b32 $0, $1;":
        results = len(dtype) if isinstance(dtype, tuple) else 1
        found = instructions.run(asm, constraints, [as_tensor(plain(x)) for x in args], results, pack)
        return tuple(Value(x) for x in found) if isinstance(dtype, tuple) else Value(found[0])
    return args[0]


def come(number: int, num_warps: int) -> int:
    """Named barrier: arrive, and go on. Gives how many warps have come when all have."""
    task = machine().here()
    gates = task.program.gates
    before = gates.get(number, 0)
    gates[number] = before + task.num_warps
    phase = before // num_warps
    if task.phases.get(number) == phase:
        raise EmulationError(f"{task.name} comes to named barrier {number} twice")
    task.phases[number] = phase
    tell(task.program.told.setdefault((number, phase), {}), task.sees)
    machine().pause()
    return (phase + 1) * num_warps


def meet(number: int, num_warps: int) -> None:
    """Named barrier: wait until so many warps have come."""
    goal = come(number, num_warps)
    task = machine().here()
    machine().wait(lambda: task.program.gates[number] >= goal, f"named barrier {number}")
    tell(task.sees, task.program.told[number, task.phases[number]])


def changed(counter: Pointer) -> Value:
    """A counter's value. Who asks again before it has changed waits: a loop that goes round would."""
    task = machine().here()
    key = (counter.base.data_ptr(), int(counter.offset))
    machine().wait(lambda: int(load(counter)) != task.seen.get(key), f"a counter to leave {task.seen.get(key)}")
    found = load(counter)
    task.seen[key] = int(found)
    return found
