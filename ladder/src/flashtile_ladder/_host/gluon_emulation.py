"""Skip this file when you learn: as much of Gluon as step 9's last kernel needs, on a CPU, without Triton.

The roles of a program run one at a time, and who goes on is drawn at every barrier, copy and product. A tile that the
copy engine brings, and a product in flight, are NaN until they are there. Layouts, registers and fences are not
modelled: that a kernel is right here is necessary on a GPU, and not enough.
"""

import functools
import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import step09_hopper as step

ORDERS = 3  # of the roles, for each launch
FUNCTIONS = ("kernel", "barriers", "loads", "warpgroup")


class EmulationError(RuntimeError):
    """Roles wait for ever, or the result depends on who goes first."""


class Stopped(BaseException):
    """Ends the thread of a role when another one has failed."""


class Barrier:
    """An mbarrier: a phase is over after `count` arrivals and all announced bytes."""

    def __init__(self) -> None:
        self.count = self.arrivals = self.bytes = self.phase = 0

    def arrive(self, count: int = 1, received: int = 0) -> None:
        self.arrivals, self.bytes = self.arrivals + count, self.bytes - received
        if self.arrivals == self.count and self.bytes == 0:
            self.arrivals, self.phase = 0, self.phase + 1


class Shared:
    """A view of shared memory, NaN in the beginning."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, list(data.shape)

    def index(self, i: int) -> "Shared":
        return Shared(self.data[i])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def store(self, values: Tensor) -> None:
        self.data.copy_(values)


class Pointer(NamedTuple):
    """To an element of a tensor, or several."""

    data: Tensor
    offset: Any = 0

    def __add__(self, more: Any) -> "Pointer":  # type: ignore[override]
        return Pointer(self.data, self.offset + more)


class Box:
    """A descriptor: boxes of a tensor [heads, N, D], with zeros beyond N."""

    def __init__(self, data: Tensor, rows: int) -> None:
        self.data, self.dtype, self.layout = data, data.dtype, None
        size = rows * data.shape[2]
        self.block_type = SimpleNamespace(shape=[1, rows, data.shape[2]], nbytes=size * data.element_size())

    def read(self, place: list[int]) -> Tensor:
        head, first, _ = place
        box = self.data.new_zeros(self.block_type.shape)
        rows = self.data[head, first : first + box.shape[1]]
        box[0, : len(rows)] = rows
        return box

    def write(self, place: list[int], box: Tensor) -> None:
        head, first, _ = place
        rows = self.data[head, first : first + box.shape[1]]
        rows.copy_(box[0, : len(rows)])


class Role:
    """A partition of the program, on a thread that runs when it is told to."""

    def __init__(self, machine: "Machine", function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.go, self.done, self.error = threading.Semaphore(0), False, None
        self.waits: tuple[Barrier, int] | None = None
        self.products: list[Callable[[], None]] = []  # in flight, the oldest first
        self.machine, self.call = machine, functools.partial(function, *arguments)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            self.go.acquire()
            if not self.machine.stopped:
                self.call()
        except Stopped:
            pass
        except Exception as error:  # raised again by the machine
            self.error = error
        self.done = True
        self.machine.back.release()

    @property
    def ready(self) -> bool:
        """It is not over, and the barrier that it waits for is past the phase of this parity."""
        return not self.done and (self.waits is None or self.waits[0].phase % 2 != self.waits[1])


class Machine:
    """One program."""

    def __init__(self, program: int, order: int) -> None:
        self.program, self.random = program, random.Random(order)
        self.back, self.stopped, self.copies = threading.Semaphore(0), False, list[Callable[[], None]]()
        self.roles: list[Role] = []
        self.role: Any = None  # the one that runs

    def specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        self.roles = [Role(self, function, arguments) for function, arguments in partitions]
        for role in self.roles:
            role.thread.start()
        try:
            while not all(role.done for role in self.roles):
                able = [role for role in self.roles if role.ready]
                if not (able or self.copies):
                    raise EmulationError("all roles wait at barriers that nobody completes")
                chosen = self.random.randrange(len(able) + len(self.copies))
                if chosen >= len(able):
                    self.copies.pop(chosen - len(able))()
                    continue
                self.role = able[chosen]
                self.role.go.release()
                self.back.acquire()
                if self.role.error is not None:
                    raise self.role.error
        finally:
            self.stopped = True
            for role in self.roles:
                role.go.release()
            for role in self.roles:
                role.thread.join()

    def pause(self, waits: tuple[Barrier, int] | None = None) -> None:
        """Let others go first; with a barrier and a parity, until that phase is over."""
        role = self.role
        role.waits = waits
        self.back.release()
        role.go.acquire()
        role.waits = None
        if self.stopped:
            raise Stopped

    def load(self, box: Box, place: list[int], barrier: Barrier, to: Shared) -> None:
        def copy() -> None:
            to.store(box.read(place))
            barrier.arrive(0, box.block_type.nbytes)

        to.data.fill_(torch.nan)
        self.copies.append(copy)
        self.pause()

    def multiply(self, a: Any, b: Any, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
        result = torch.full_like(acc, torch.nan)

        def product() -> None:
            x, y = (part.data if isinstance(part, Shared) else part for part in (a, b))
            result.copy_(x.float() @ y.float() + (acc if use_acc else 0))

        self.role.products.append(product)
        if not is_async:
            self.wait_for_products(0)
        self.pause()
        return result

    def wait_for_products(self, most: int, deps: tuple[Any, ...] = ()) -> Any:
        self.pause()
        while len(self.role.products) > most:
            self.role.products.pop(0)()
        return deps[0] if len(deps) == 1 else deps

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == "barrier":
            made = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=made.__getitem__)
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def announce(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        barrier.arrive()

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)
        self.pause()

    def names(self) -> dict[str, Any]:
        """Stand-ins by the names that the kernel's file has from Gluon."""
        nothing = SimpleNamespace
        gl = SimpleNamespace(
            float32=torch.float32, int64="barrier", cdiv=lambda a, b: -(-a // b), minimum=min, static_range=range,
            program_id=lambda axis: self.program, warp_specialize=self.specialize, allocate_shared_memory=self.allocate,
            NVMMADistributedLayout=lambda *_: nothing(), DotOperandLayout=lambda *_: nothing(),
            SliceLayout=lambda *_: nothing(), convert_layout=lambda x, layout: x, expand_dims=torch.unsqueeze,
            arange=lambda first, end, layout: torch.arange(first, end), exp2=torch.exp2, log2=torch.log2,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), maximum=torch.maximum, sum=torch.sum,
            where=lambda seen, x, other: torch.where(seen, x, other), max=torch.amax, store=store,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=nothing, init=lambda barrier, count: setattr(barrier, "count", count), expect=self.announce,
            wait=lambda barrier, parity: self.pause((barrier, parity)), arrive=self.arrive,
        )  # fmt: skip
        hopper = SimpleNamespace(
            mbarrier=mbarrier, warpgroup_mma=self.multiply, warpgroup_mma_wait=self.wait_for_products,
            fence_async_shared=lambda: None, tma=SimpleNamespace(store_wait=lambda most: None),
        )  # fmt: skip
        copies = {"tma_load": self.load, "tma_store": lambda box, place, tile: box.write(place, tile.data)}
        return {"gl": gl, "hopper": hopper, **copies}


def store(at: Pointer, values: Tensor, mask: Tensor) -> None:
    at.data.view(-1)[at.offset[mask]] = values[mask]


def launch(functions: dict[str, Any], order: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    """out and lse of the kernel, with these functions in the place of the step's."""
    out, lse = torch.empty_like(q), q.new_full((len(q),), torch.nan, dtype=torch.float32)
    boxes = [Box(x[None], rows) for x, rows in ((q, 64), (k, step.BLOCK_N), (v, step.BLOCK_N), (out, 64))]
    for program in range(-(-len(q) // step.BLOCK_M)):
        names = Machine(program, order).names()
        for name in FUNCTIONS:
            function = functions.get(name, getattr(step, name))
            names[name] = FunctionType(getattr(function, "fn", function).__code__, names | {"range": range})
        for name in FUNCTIONS:
            names[name].__globals__.update(names)
        names["kernel"](*boxes, Pointer(lse), len(q), scale * step.LOG2_E, q.shape[1], step.STAGES, causal)
    return out, lse


def attention(functions: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    """out `[N, d]` and lse `[N]` of float32, in several orders of the roles.

    Raises:
        EmulationError: roles wait for ever, or two orders have two results.
    """
    found = [launch(functions, order, q, k, v, causal, scale) for order in range(ORDERS)]
    if not all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for other in found for x, y in zip(found[0], other, strict=True)
    ):
        raise EmulationError("the result depends on which role goes first")
    return found[0]
