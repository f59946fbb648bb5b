"""mbarriers, TMA and wgmma: `gluon.language.nvidia.hopper` and TMA descriptors."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .machine import EmulationError, machine
from .values import Shared, Value, check_range, unwrap

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}  # dtypes of operands that need not be alike
TMA_BYTES = 128  # that divide an address in shared memory which TMA writes to


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all expected bytes are there."""

    def __init__(self, number: int):
        self.number = number
        self.count = 0  # arrivals of a phase; 0: not initialized
        self.pending_arrivals = 0
        self.pending_bytes = 0
        self.phase = 0

    def arrive(self, count: int) -> None:
        if not 0 < count <= self.pending_arrivals:
            name = machine().current_task().name
            raise EmulationError(f"{name} arrives {count} times with {self.pending_arrivals} of {self.count} pending")
        self.pending_arrivals -= count
        self.try_complete_phase()

    def receive(self, nbytes: int) -> None:
        self.pending_bytes -= nbytes
        self.try_complete_phase()

    def try_complete_phase(self) -> None:
        if self.pending_arrivals == 0 and self.pending_bytes == 0:
            self.pending_arrivals = self.count
            self.phase ^= 1


class Barriers:
    """An array of mbarriers in shared memory."""

    def __init__(self, count: int):
        self.barriers = [Barrier(n) for n in range(count)]

    def index(self, n: Any) -> Barrier:
        return self.barriers[int(n)]


class MBarrierLayout:
    """Layout that marks memory as an array of mbarriers."""

    barriers = Barriers


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending_arrivals = count


def expect(barrier: Barrier, nbytes: int) -> None:
    barrier.pending_bytes += nbytes
    barrier.arrive(1)
    machine().pause()


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
        machine().pause()


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    if barrier.count == 0:
        raise EmulationError("wait for an uninitialized barrier")
    if not pred:
        return
    parity = int(phase)
    machine().wait(lambda: barrier.phase != parity, f"barrier {barrier.number} to leave phase {parity}")


class TensorDescriptor:
    """A TMA descriptor."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        nbytes = int(np.prod(self.block_shape)) * self.base.element_size()
        return SimpleNamespace(shape=list(self.block_shape), nbytes=nbytes)

    def box(self, coordinates: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of a box that is in bounds, in memory, and its place in the box. Addresses are computed modulo
        2**64.
        """
        address, size, sizes, strides, place = 0, self.base.element_size(), [], [], []
        for start, length, stride, count in zip(coordinates, self.shape, self.strides, self.block_shape, strict=True):
            first = int(start)
            low = min(max(-first, 0), count)
            high = max(min(length - first, count), low)
            address += (first + low) * stride * size
            place.append(slice(low, high))
            sizes.append(high - low)
            strides.append(signed(stride * size) // size if high - low > 1 else 0)
        if 0 in sizes:
            return self.base.new_empty(sizes), tuple(place)
        begin = signed(address) // size
        check_range(self.base, begin, begin + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)))
        return self.base.detach().as_strided(sizes, strides, self.base.storage_offset() + begin), tuple(place)


def signed(n: int) -> int:
    """An integer of 64 bits, modulo 2**64."""
    return (n + 2**63) % 2**64 - 2**63


class Store:
    """A TMA store or addition that completes later."""

    def __init__(self, desc: TensorDescriptor, coordinates: Sequence[Any], source: Shared, add: bool):
        source.check_fenced()
        if source.shape != list(desc.block_shape) or source.dtype != desc.dtype:
            raise EmulationError(f"store of {source.shape} {source.dtype} to a box of {desc.block_shape} {desc.dtype}")
        self.desc, self.source, self.add = desc, source, add
        self.memory, self.place = desc.box(coordinates)
        self.snapshot = source.data.clone()
        self.read = self.written = False
        machine().current_task().stores.append(self)
        machine().current_task().unread_stores.append(self)
        machine().tma_operations.append(self.write)
        machine().pause()

    def finish_reading(self) -> None:
        if not self.read and not same(self.snapshot, self.source.data):
            raise EmulationError("shared memory was written before TMA had read it")
        self.read = True

    def write(self) -> None:
        try:
            self.finish_reading()
        except EmulationError as error:
            machine().fail(error)
            return
        values = self.snapshot[self.place]
        self.memory.copy_(self.memory + values if self.add else values)
        self.written = True


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def async_load(desc: TensorDescriptor, coordinates: Sequence[Any], barrier: Barrier, result: Shared) -> None:
    if result.shape != list(desc.block_shape) or result.dtype != desc.dtype:
        raise EmulationError(f"load of a box of {desc.block_shape} {desc.dtype} to {result.shape} {result.dtype}")
    offset = result.data.storage_offset() * result.data.element_size()
    if result.data.is_contiguous() and offset % TMA_BYTES:  # columns of a tile lie elsewhere than here
        raise EmulationError(f"load to byte {offset} of shared memory, not to a multiple of {TMA_BYTES}")
    memory, place = desc.box(coordinates)
    result.data.fill_(torch.nan if result.dtype.is_floating_point else 77)

    def load() -> None:
        result.data.zero_()
        result.data[place] = memory
        barrier.receive(result.nbytes)

    machine().tma_operations.append(load)
    machine().pause()


def async_store(desc: TensorDescriptor, coordinates: Sequence[Any], source: Shared) -> None:
    Store(desc, coordinates, source, add=False)


def async_atomic_add(desc: TensorDescriptor, coordinates: Sequence[Any], source: Shared) -> None:
    Store(desc, coordinates, source, add=True)


def store_wait(pendings: int) -> None:
    """Wait until TMA has read the shared memory of all stores but the latest `pendings`."""
    stores = machine().current_task().unread_stores
    for store in stores[: len(stores) - pendings]:
        store.finish_reading()
    del stores[: len(stores) - pendings]
    machine().pause()


def fence_async_shared() -> None:
    task = machine().current_task()
    unfenced = task.program.unfenced
    for span in [span for span, (writer, write) in unfenced.items() if write <= task.clock.get(writer, 0)]:
        del unfenced[span]


UNREAD = torch.tensor(torch.nan)


class Product(Value):
    """A product in flight, which may not be read before a wait."""

    def __init__(self, a: Value | Shared, b: Shared, acc: Value | None, shape: list[int]):
        self.value = UNREAD.expand(shape)
        self.a, self.b, self.acc = a, b, acc
        self.snapshot = [x.data.clone() if isinstance(x, Shared) else x.tensor for x in (a, b)]
        self.finished = False

    @property
    def tensor(self) -> Tensor:
        if not self.finished:
            raise EmulationError(f"{machine().current_task().name} reads a product in flight")
        return self.value

    @property
    def shape(self) -> list[int]:
        return list(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def finish(self) -> None:
        operands = zip(self.snapshot, (self.a, self.b), strict=True)
        if not all(same(x, y.data) for x, y in operands if isinstance(y, Shared)):
            raise EmulationError(
                f"{machine().current_task().name}: an operand was written while its product was in flight"
            )
        a, b = self.snapshot
        self.value = a.float() @ b.float()
        if self.acc is not None:
            self.value = self.value + self.acc.tensor
        self.finished = True


def warpgroup_mma(a: Value | Shared, b: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
    for x in (a, b):
        if isinstance(x, Shared):
            x.check_fenced()
    alike = a.dtype == b.dtype or {a.dtype, b.dtype} == EIGHT_BITS
    if not (alike and [a.shape[0], b.shape[1]] == acc.shape and a.shape[1] == b.shape[0]):
        raise EmulationError(f"product of {a.shape} {a.dtype} and {b.shape} {b.dtype} to {acc.shape}")
    task = machine().current_task()
    product = Product(a, b, acc if unwrap(use_acc) else None, acc.shape)
    task.products.append(product)
    machine().pause()
    if not is_async:
        warpgroup_mma_wait(0)
    return product


def warpgroup_mma_wait(num_outstanding: int, deps: tuple[Any, ...] = ()) -> Any:
    """Wait for all products but the latest `num_outstanding`."""
    products = machine().current_task().products
    for product in products[: len(products) - num_outstanding]:
        product.finish()
    del products[: len(products) - num_outstanding]
    machine().pause()
    return deps[0] if len(deps) == 1 else deps


mbarrier = SimpleNamespace(MBarrierLayout=MBarrierLayout, init=init, expect=expect, arrive=arrive, wait=wait)
tma = SimpleNamespace(
    async_load=async_load, async_store=async_store, async_atomic_add=async_atomic_add, store_wait=store_wait
)
