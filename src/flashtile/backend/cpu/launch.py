"""Launch a compiled kernel on PyTorch's threads."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        return cls(x.shape, x.stride(), x.dtype)

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


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


def run(launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
    """Run a kernel on as many threads as pay. The block holds bare addresses, so `tensors` and `block` must be named
    until the kernel returns: Dynamo, which may enter this function after a graph break, drops names at their last use.
    """
    count = min(torch.get_num_threads(), launch.max_threads)
    if count == 0:
        return
    tensors = tensors | {"workspace": torch.empty(count * launch.work_size, dtype=torch.uint8, device="cpu")}
    block = args.bind(launch.block, tensors)
    threads.run(launch.function, ctypes.addressof(block), count)
    del tensors, block
