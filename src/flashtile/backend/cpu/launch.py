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

QUICK = private_torch.allocator("cpu")
WORKSPACE, COUNTER = args.FIELD_INDEX["workspace"], args.FIELD_INDEX["counter"]


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
    if QUICK is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return QUICK(shape, stride, dtype)


class KernelLaunch(NamedTuple):
    """A kernel and its arguments without addresses."""

    function: Any
    block: Any
    max_threads: int
    work_size: int
    lengths: Lengths
    splits: int = 1  # the most; in backward those of the keys
    least_splits: int = 1  # forward only
    split_keys: int | None = None  # keys of a split, where they do not depend on the longest sequence
    results: tuple[TensorSpec, ...] = ()
    blocks: BlockTable | None = None
    task_rows: tuple[int, int] = (0, 0)  # query rows of a task in forward, and those of them that may be in use


def run(launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
    """Run a kernel with these tensors, by the names of their fields. The block holds bare addresses, so tensors must be
    named until the kernel returns: Dynamo, which may enter this function after a graph break, drops names at their last
    use.
    """
    block = args.copied(launch.block)
    for name, x in tensors.items():
        block[args.FIELD_INDEX[name]] = x.data_ptr()
    start(launch, block)
    del tensors, block


def start(launch: KernelLaunch, block: Any) -> None:
    """Run a kernel on as many threads as pay, with a block of its own that has the tensors' addresses."""
    count = min(torch.get_num_threads(), launch.max_threads)
    if count == 0 or not launch.function:  # collected instead (`machine_code.collected_kernels`)
        return
    workspace, address = allocate((count * launch.work_size,), (1,), torch.uint8), ctypes.addressof(block)
    block[WORKSPACE], block[COUNTER] = workspace.data_ptr(), address + args.COUNTERS_INDEX * 8
    if count == 1:
        launch.function(address)
    else:
        threads.run(launch.function, address, count)
    del workspace, block
