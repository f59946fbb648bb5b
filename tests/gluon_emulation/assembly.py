"""Inline assembly: synchronization and accesses to memory are emulated, arithmetic is interpreted."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import eight_bit, instructions
from .machine import EmulationError, machine, merge_clock
from .memory import load, store
from .values import Pointer, Value, as_tensor, unwrap

LANES = torch.arange(32, dtype=torch.int32)  # a scalar that differs between the threads of a warp


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    emulate = emulation_of(asm)
    if emulate is not None:
        return emulate(*args)
    if getattr(getattr(args[0], "dtype", None), "itemsize", 0) == 1:
        return Value(instructions.run_on_bytes(asm, args[0].tensor))
    num_results = len(dtype) if isinstance(dtype, tuple) else 1
    results = instructions.run(asm, constraints, [as_tensor(unwrap(x)) for x in args], num_results, pack)
    return tuple(Value(x) for x in results) if isinstance(dtype, tuple) else Value(results[0])


@functools.cache
def emulation_of(asm: str) -> Callable[..., Any] | None:
    """What stands for the assembly; `None` if it is interpreted."""
    if asm == "mov.b32 $0, $1;":
        return lambda x: x
    if "ld.global." in asm:
        return functools.partial(with_adjacent, asm)
    if asm.startswith("griddepcontrol."):
        return functools.partial(grid_control, asm.partition(";")[0])
    if found := [f for name, f in eight_bit.MEANINGS.items() if name in asm]:
        return found[0]
    return next((f for name, f in SYNCHRONIZATION.items() if asm.startswith(name)), None)


def bar_sync(number: Any, threads: Any) -> Any:
    barrier_sync(int(number), int(threads) // 32)
    return number


def bar_arrive(number: Any, threads: Any) -> Any:
    barrier_arrive(int(number), int(threads) // 32)
    return number


def bulk_wait(x: Any) -> Any:
    """Wait until all stores have been written."""
    task = machine().current_task()
    machine().wait(lambda: all(store.written for store in task.stores), "its results to arrive")
    task.stores.clear()
    task.unread_stores.clear()
    return x


def grid_control(instruction: str, x: Any) -> Any:
    machine().grid_controls.append(instruction)
    return x


def fence_of_polling(x: Any) -> Any:
    """Follows the polling loop."""
    machine().current_task().polled.clear()
    return x


def with_adjacent(asm: str, t: Value, pointers: Pointer) -> Value:
    """Scores with a bias or a mask whose columns are read two by two."""
    if (torch.as_tensor(pointers.offset)[..., ::2] % 2 != 0).any():
        raise EmulationError("the address of two elements is not aligned")
    values = load(pointers).tensor
    return Value(torch.where(values != 0, t.tensor, -torch.inf) if "selp" in asm else t.tensor + values.float())


def add_in_fours(pointers: Pointer, x: Value) -> Value:
    """Add to adjacent elements by fours."""
    machine().pause()
    offsets = torch.as_tensor(pointers.offset)
    first = offsets[..., ::4, None]
    if (first % 4 != 0).any() or not torch.equal(offsets, (first + torch.arange(4)).flatten(-2)):
        raise EmulationError("four elements are not adjacent or not aligned")
    store(pointers, load(pointers).tensor + x.tensor)
    return x


def barrier_arrive(number: int, num_warps: int) -> int:
    """Arrive at a named barrier. Returns the arrivals that complete this phase, in warps."""
    task = machine().current_task()
    barriers = task.program.named_barriers
    arrived = barriers.get(number, 0)
    barriers[number] = arrived + task.num_warps
    phase = arrived // num_warps
    if task.barrier_phases.get(number) == phase:
        raise EmulationError(f"{task.name} arrives at named barrier {number} twice in a phase")
    task.barrier_phases[number] = phase
    merge_clock(task.program.barrier_clocks.setdefault((number, phase), {}), task.clock)
    machine().pause()
    return (phase + 1) * num_warps


def barrier_sync(number: int, num_warps: int) -> None:
    """Arrive at a named barrier and wait until `num_warps` warps have arrived."""
    goal = barrier_arrive(number, num_warps)
    task = machine().current_task()
    machine().wait(lambda: task.program.named_barriers[number] >= goal, f"named barrier {number}")
    merge_clock(task.clock, task.program.barrier_clocks[number, task.barrier_phases[number]])


def load_acquire(semaphore: Pointer) -> Value:
    """A semaphore's value. A repeated load waits for a change, as a polling loop would."""
    task = machine().current_task()
    key = (semaphore.base.data_ptr(), int(semaphore.offset))
    machine().wait(lambda: int(load(semaphore)) != task.polled.get(key), f"a semaphore to leave {task.polled.get(key)}")
    value = load(semaphore)
    task.polled[key] = int(value)
    return value


SYNCHRONIZATION: dict[str, Callable[..., Any]] = {
    "bar.sync $1, $2;": bar_sync,
    "bar.arrive $1, $2;": bar_arrive,
    "red.relaxed.gpu.global.add.v4.f32": add_in_fours,
    "cp.async.bulk.wait_group 0;": bulk_wait,
    "ld.acquire.gpu.global.b32 $0, [$1];": load_acquire,
    "mov.u32 $0, %laneid;": lambda _: Value(LANES),
    "shfl.sync.idx.b32 $0, $1, $2, 31": lambda x, lane: x[int(lane)],
    "fence.proxy.async.global;": fence_of_polling,
}
