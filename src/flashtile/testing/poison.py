"""Poisoned memory: it reveals reads before a write, and reads and writes outside of a tensor.

`poisoned_allocation` replaces the allocating functions in `torch` and `torch.Tensor`, and the allocators of compiled
programs, within a `with` block. Other ways fail here:

- A TorchDispatchMode or TorchFunctionMode is switched off while it handles an operator, so it does not see what the
  implementation of a torch.library operator allocates, which is where backends do. Modes also belong to one
  thread, and autograd runs the backward of CUDA operators in another.
- `torch.utils.deterministic.fill_uninitialized_memory` needs `torch.use_deterministic_algorithms(True)`, which
  makes other operators raise and is what `deterministic=None` follows: the code under test would take another path.

Allocations inside ATen's own operators are not poisoned; those operators fill their results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards  # the allocators of compiled programs
except ImportError:
    guards = None

ALLOCATORS = (
    (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
    (Tensor, ("new_empty", "new_empty_strided")),
    *([(guards, ("_empty_strided_cpu", "_empty_strided_cuda"))] if guards else []),
)


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """NaN for floating and complex dtypes, the largest value of integers, True for bool."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def poisoned_allocation() -> Iterator[None]:
    """Fill uninitialized tensors made from Python with `poison_value` inside this block, in every thread."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(allocate)
        def filled(*args, **kwargs) -> Tensor:
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(poison_value(tensor.dtype)) if tensor.numel() else tensor

        return filled

    places = [(owner, name) for owner, names in ALLOCATORS for name in names]
    originals = [vars(owner).get(name) for owner, name in places]  # None: inherited
    try:
        for owner, name in places:
            setattr(owner, name, poisoned(getattr(owner, name)))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a buffer with poison before it, after it, and in the gaps of its strides."""

    tensor: Tensor
    buffer: Tensor  # one-dimensional

    def intact(self) -> bool:
        """Whether the poison outside of the tensor is unchanged."""
        value = poison_value(self.buffer.dtype)
        outside = self.buffer.clone()
        inside = outside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        each_once(inside).fill_(value)
        return bool((outside.isnan() if value != value else outside == value).all())


def with_guard_bands(values: Tensor, band: int = 1024) -> Guarded:
    """A copy of `values` with the same strides, `band` elements of poison on both sides."""
    dtype = values.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # by bits, which are NaN as floats
        values = values.view(torch.uint8)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(values.shape, values.stride(), strict=True))
    extent = extent if values.numel() else 0
    buffer = torch.full((extent + 2 * band,), poison_value(values.dtype), dtype=values.dtype, device=values.device)
    tensor = buffer.as_strided(values.shape, values.stride(), band)
    each_once(tensor).copy_(each_once(values))
    return Guarded(tensor.view(dtype), buffer)


def each_once(x: Tensor) -> Tensor:
    """The part of an expanded tensor that holds each of its elements once: they share memory, which forbids writing."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def in_larger_buffer(values: Tensor, margins: Sequence[tuple[int, int]], steps: Sequence[int] | None = None) -> Tensor:
    """A copy of `values` inside a buffer of poison that is larger by (before, behind) in each dimension. Between these
    margins, the copy takes every entry, or every `step`-th one.

    Unlike guard bands this changes the strides, and a read past the end of any row, head or batch reads poison.
    """
    steps = steps or [1] * values.ndim
    sizes = [n * step for n, step in zip(values.shape, steps, strict=True)]
    shape = [before + n + behind for n, (before, behind) in zip(sizes, margins, strict=True)]
    buffer = torch.full(shape, poison_value(values.dtype), dtype=values.dtype, device=values.device)
    inside = tuple(slice(before, before + n, step) for n, step, (before, _) in zip(sizes, steps, margins, strict=True))
    buffer[inside] = values
    return buffer[inside]
