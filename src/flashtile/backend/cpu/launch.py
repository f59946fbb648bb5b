"""Launch a compiled kernel on PyTorch's threads."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import private_torch
from . import arguments as args
from . import threads
from .blocks import BlockTable
from .lengths import Lengths


class TensorSpec(NamedTuple):
    """Shape, strides and dtype of a result, from which later calls allocate it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorSpec":
        return cls(tuple(x.shape), x.stride(), x.dtype)

    def new(self) -> Tensor:
        return allocate(*self)


def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor, from the allocator of compiled programs if there is one: it takes half as long."""
    quick = private_torch.allocator("cpu")
    if quick is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return quick(shape, stride, dtype)


class KernelLaunch(NamedTuple):
    """A kernel and its arguments without addresses."""

    function: Any
    block: Any
    max_threads: int
    work_size: int
    lengths: Lengths
    splits: int = 1
    results: tuple[TensorSpec, ...] = ()
    blocks: BlockTable | None = None
    task_rows: tuple[int, int] = (0, 0)  # query rows of a task in forward, and those of them that may be in use


def run(launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
    """Run a kernel on as many threads as pay. The workspace becomes one of its `tensors`. The block holds bare
    addresses, so `tensors` and `block` must be named until the kernel returns: Dynamo, which may enter this function
    after a graph break, drops names at their last use.
    """
    count = min(torch.get_num_threads(), launch.max_threads)
    if count == 0:
        return
    tensors["workspace"] = allocate((count * launch.work_size,), (1,), torch.uint8)
    block = args.bind(launch.block, tensors)
    threads.run(launch.function, ctypes.addressof(block), count)
    del tensors, block
