"""Tensor arguments of kernels, by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Described(NamedTuple):
    """A tensor that a kernel takes as `describe(base, given)`: in another dtype, or as a tensor descriptor (TMA). It
    begins where `base` does, because a replay knows the address of `base` alone.
    """

    base: Tensor
    describe: Callable[[Tensor, Any], Any]
    given: Any


class TmaDescriptor(NamedTuple):
    """A tensor as TMA sees it. Triton's `TensorDescriptor` has the same attributes, but needs Triton."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    swizzled: bool = True  # shared memory in the default layout of a box; else row by row
    padding: str = "zero"


Pointers = Mapping[str, Tensor | Described | None]


Layout = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a contiguous tensor


class Part(NamedTuple):
    """A tensor in a workspace: contiguous, from a byte on."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: Tensor) -> Tensor:
        return workspace[self.offset : self.end].view(self.dtype).view(self.shape)


class Slot(NamedTuple):
    """The index of a tensor in a recording, and how a kernel takes it."""

    index: int
    describe: Callable[[Tensor, Any], Any] | None = None
    given: Any = None
    part: Part | None = None  # part of the tensor, which is a workspace

    @property
    def offset(self) -> int:
        """Bytes from the tensor's address to the kernel's."""
        return 0 if self.part is None else self.part.offset

    def resolve(self, tensors: Sequence[Tensor | None]) -> Any:
        """The kernel's argument: a tensor or a `TmaDescriptor`."""
        x: Any = tensors[self.index]
        if self.part is not None:
            x = self.part.of(x)
        if self.describe is None:
            return x
        described = self.describe(x, self.given)
        assert begins_with(described, x), f"the replay of a launch would take {self.describe} for its base"
        return described


def begins_with(described: Tensor | TmaDescriptor, x: Tensor) -> bool:
    """Whether a description of `x` begins where `x` does. An empty tensor has no address."""
    first = described if isinstance(described, Tensor) else described.base
    return x.numel() == 0 or first.storage_offset() * first.itemsize == x.storage_offset() * x.itemsize


Slots = Mapping[str, Slot | None]


def resolved(slots: Slots, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    return {name: None if slot is None else slot.resolve(tensors) for name, slot in slots.items()}


def described_tensors(slots: Slots) -> list[int]:
    """Indices of the tensors of descriptors, each once."""
    return [*dict.fromkeys(x.index for x in slots.values() if x is not None and x.describe is not None)]
