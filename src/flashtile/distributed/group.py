"""The process groups of a mesh, this process's place in them, and their exchanges."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from .copies import flat_copy

EXAMPLE = 'flashtile.distributed.attention(q, k, v, mesh=init_device_mesh("cuda", (2,)))'
# The name until PyTorch 2.13, which warns of it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GATHERED, EXCHANGED = "tensors of all ranks", "keys, rows or their gradients"


class ExchangeError(RuntimeError):
    """An exchange of a sharded call that failed: another rank has ended, raised, or not come in time."""


class Group(NamedTuple):
    """A process group, its size, and this process's rank in it. A group of one process has no handle."""

    handle: dist.ProcessGroup | None
    size: int
    rank: int

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Say which rank waited for what if an exchange fails. NCCL ends the process itself, after its own message."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.size} lost another one in flashtile.distributed, waiting for {what}: "
                f"{str(error).splitlines()[0]}\n"
                "  look at: the first error of the other ranks; calls that differ between ranks (check=True compares "
                "them); the timeout of the process group, if a rank is slower"
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all ranks. Waits for the device."""
        values: list[Any] = [value] * self.size
        if self.handle is not None:
            with self.exchanging("the arguments of all ranks"):
                dist.all_gather_object(values, value, group=self.handle)
        return values

    def gather_tensors(self, x: Tensor) -> "Gathering":
        """Begin to gather contiguous tensors of one shape from all ranks."""
        if self.handle is None:
            return Gathering(self, x[None], None)
        whole = x.new_empty((self.size, *x.shape))
        with self.exchanging(GATHERED):
            work = all_gather(whole.flatten(), x.flatten(), group=self.handle, async_op=True)
        return Gathering(self, whole, work)

    def exchange(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> "Exchange":
        """Begin an all-to-all: element r of `sent` goes to rank r, from which a tensor of shape r arrives."""
        if sent[0].dtype == torch.bool:  # which collectives need not know
            return self.exchange([x.view(torch.uint8) for x in sent], shapes)._replace(dtype=torch.bool)
        arriving = [torch.Size(shape).numel() for shape in shapes]
        return Exchange(self.all_to_all(flat_copy(sent), [x.numel() for x in sent], arriving), shapes)

    def pass_on(self, sent: Tensor, size: int, distance: int = 1) -> "Transfer":
        """Begin to pass a flat tensor on to a rank ahead, while one of `size` elements arrives from as far behind."""
        leaving, arriving = [0] * self.size, [0] * self.size
        leaving[(self.rank + distance) % self.size], arriving[(self.rank - distance) % self.size] = sent.numel(), size
        return self.all_to_all(sent, leaving, arriving)

    def all_to_all(self, sent: Tensor, leaving: list[int], arriving: list[int]) -> "Transfer":
        """Begin to send each rank its elements of a flat tensor, one rank after another, and to receive theirs."""
        if self.handle is None:
            return Transfer(self, sent, sent, None)
        received = sent.new_empty(sum(arriving))
        with self.exchanging(EXCHANGED):
            work = dist.all_to_all_single(received, sent, arriving, leaving, group=self.handle, async_op=True)
        return Transfer(self, received, sent, work)


class Gathering(NamedTuple):
    """An all-gather under way."""

    group: Group
    whole: Tensor  # [ranks, ...]
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.group.exchanging(GATHERED):
                self.work.wait()
        return self.whole


class Transfer(NamedTuple):
    """Elements on their way to other ranks, and those that arrive."""

    group: Group
    received: Tensor
    sent: Tensor  # alive until the exchange ends
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.group.exchanging(EXCHANGED):
                self.work.wait()
        return self.received


class Exchange(NamedTuple):
    """An all-to-all under way."""

    transfer: Transfer
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype | None = None  # dtype of the results, if it is another one of one byte

    def wait(self) -> list[Tensor]:
        received = self.transfer.wait()
        received = received if self.dtype is None else received.view(self.dtype)
        parts = received.split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


ALONE = Group(None, 1, 0)


class Grid(NamedTuple):
    """The ranks of a mesh, which count along `inner` first. Keys travel over `outer`, heads over `inner`."""

    outer: Group
    inner: Group

    @property
    def size(self) -> int:
        return self.outer.size * self.inner.size

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    @property
    def over_heads(self) -> "Grid":
        """The same ranks, with heads in place of keys over a mesh with one dimension."""
        return Grid(self.inner, self.outer)

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all ranks."""
        return [x for values in self.outer.gather(self.inner.gather(value)) for x in values]

    def gather_tensors(self, x: Tensor) -> Tensor:
        """`[ranks, ...]` from contiguous tensors of one shape."""
        return self.outer.gather_tensors(self.inner.gather_tensors(x).wait()).wait().flatten(0, 1)


def grid_of(mesh: DeviceMesh | None) -> Grid:
    """The grid of a mesh with two dimensions, or with one, over which keys travel."""
    here = mesh.get_coordinate() if isinstance(mesh, DeviceMesh) else None  # get_local_rank takes far longer
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2) or here is None:
        accepted = 'a DeviceMesh with one or two dimensions that this process is in; of a larger one, `mesh["name"]`'
        raise ArgumentError("mesh", mesh, accepted, EXAMPLE)
    groups = [Group(mesh.get_group(n), mesh.size(n), here[n]) for n in range(mesh.ndim)]
    return Grid(groups[0], groups[1] if len(groups) == 2 else ALONE)
